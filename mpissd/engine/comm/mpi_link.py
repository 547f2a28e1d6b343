"""The link and the plan channel over MPI, with persistent requests on preallocated memory.

The receive for the next message is posted as soon as the last one was read, a round before it is
needed. Each channel has a communicator of its own, and each kind of message a tag and a receive
only where it is read, so that no receive takes another's message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpi4py import MPI

from mpissd.common.rounds import Ints, Outcome, Speculation
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.common.wait import Waiter
from mpissd.engine.comm import wire
from mpissd.engine.comm.link import Inbox, MakeInbox, MakeOutbox, Outbox, close_all, with_prompts
from mpissd.engine.comm.wire import Kind, LinkShape, Message

_PLAN_WAIT = int(Doing.PLAN_WAIT)
_VERIFY = int(Doing.VERIFY)


class MpiOutbox(Outbox):
    """Sends a message to some ranks.

    A message of another size than usual is sent by requests of its own.
    """

    def __init__(
        self, comm: MPI.Comm, peers: Sequence[int], message: Message, waiter: Waiter
    ) -> None:
        super().__init__(message)
        self._comm, self._peers, self._waiter = comm, peers, waiter
        self._tag = int(message.kind)
        usual = message.array[: message.usual]
        self._whole = [comm.Send_init(usual, peer, self._tag) for peer in peers]
        self._sending: list[MPI.Request] = []

    def ready(self) -> None:
        if self._sending:
            what = f"send of {self.message.kind.name}"
            self._waiter.until(lambda: MPI.Request.Testall(self._sending), what)
            self._sending = []

    def send(self, size: int | None = None) -> None:
        if size is None:
            MPI.Prequest.Startall(self._whole)
            self._sending = [*self._whole]
        else:
            part = self.message.array[:size]
            self._sending = [self._comm.Isend(part, peer, self._tag) for peer in self._peers]

    def close(self) -> None:
        self.ready()
        for request in self._whole:
            request.Free()


class MpiInbox(Inbox):
    """Receives a message from one rank, by a persistent receive that is posted from the start."""

    def __init__(self, comm: MPI.Comm, peer: int, message: Message) -> None:
        super().__init__(message)
        self._request = comm.Recv_init(message.array, peer, int(message.kind))
        self._request.Start()

    def _receive(self) -> bool:
        return self._request.Test()

    def release(self) -> None:
        super().release()
        self._request.Start()

    def close(self) -> None:
        if not self._full:
            self._request.Cancel()
            self._request.Wait()
        self._request.Free()


def mpi_boxes(comm: MPI.Comm, peer: int, waiter: Waiter) -> tuple[MakeOutbox, MakeInbox]:
    """Returns what carries the messages of a link to rank `peer` of `comm`."""
    return (
        lambda message: MpiOutbox(comm, [peer], message, waiter),
        lambda message: MpiInbox(comm, peer, message),
    )


class PlanSender:
    """The lead's end of the plan channel: sends each follower outcome r-1 and speculation r.

    A plan is sent when `publish` returns. A message beyond MPI's eager limit (4 KiB of shared
    memory in Open MPI) may move only while the sender calls MPI, and the lead next waits for a
    forward that needs the followers: on a GPU neither would end.
    """

    def __init__(self, comm: MPI.Comm, shape: LinkShape, waiter: Waiter) -> None:
        followers = range(1, comm.size)
        self.num_followers = len(followers)
        self._plans = MpiOutbox(comm, followers, shape.message(Kind.PLAN), waiter)
        self._starts = MpiOutbox(comm, followers, shape.message(Kind.START), waiter)
        self._prompts: MpiOutbox | None = None
        if shape.prompt_tokens:
            self._prompts = MpiOutbox(comm, followers, shape.message(Kind.PROMPT), waiter)
        self.num_messages = self.num_bytes = 0

    def publish(self, outcome: Outcome, speculation: Speculation, stop: bool = False) -> None:
        """Sends the plan of round speculation.round to every follower."""
        if not self.num_followers:
            return
        message = self._plans.message
        self._plans.send(wire.write_plan(message, outcome, speculation, stop))
        self._count(4 * message.usual)
        if self._prompts is not None and wire.has_prompts(outcome):
            size = wire.write_prompts(self._prompts.message, outcome)
            self._prompts.send(size)
            self._count(4 * size)
            self._prompts.ready()
        self._plans.ready()

    def start(self, round_: int, forced: Callable[[], Ints | None]) -> Ints | None:
        """Lets the followers launch a chained round (features.device_rounds.Start)."""
        tokens = forced()
        if self.num_followers:
            message, rows = self._starts.message, () if tokens is None else (tokens,)
            message.write(round_, sum(map(len, rows)), rows)
            self._starts.send()
            self._count(message.array.nbytes)
            self._starts.ready()
        return tokens

    def _count(self, num_bytes: int) -> None:
        self.num_messages += self.num_followers
        self.num_bytes += self.num_followers * num_bytes

    def close(self) -> None:
        """Frees the requests."""
        close_all(self._plans, self._starts, self._prompts)


class PlanReceiver:
    """A follower's end of the plan channel."""

    def __init__(self, comm: MPI.Comm, shape: LinkShape, waiter: Waiter) -> None:
        self._waiter = waiter
        self._plans = MpiInbox(comm, 0, shape.message(Kind.PLAN))
        self._starts = MpiInbox(comm, 0, shape.message(Kind.START))
        self._prompts: MpiInbox | None = None
        if shape.prompt_tokens:
            self._prompts = MpiInbox(comm, 0, shape.message(Kind.PROMPT))

    def outcome_arrived(self) -> bool:
        """Returns whether a plan has arrived, without blocking."""
        return self._plans.arrived()

    def plan(self, round_: int) -> tuple[Outcome, Speculation, bool]:
        """Waits for the plan of round r = `round_`; returns (outcome r-1, speculation r, stop)."""
        OWN.bytes[DOING] = _PLAN_WAIT
        self._waiter.until(self._plans.arrived, "lead: plan")
        OWN.bytes[DOING] = _VERIFY
        outcome, speculation, stop = wire.read_plan(self._plans.message, round_)
        self._plans.release()
        return with_prompts(outcome, self._prompts, self._waiter), speculation, stop

    def start(self, round_: int, forced: object) -> Ints | None:
        """Waits for the lead's start of a chained round; `forced` is the lead's to compute."""
        self._waiter.until(self._starts.arrived, "lead: start of a round")
        header = self._starts.message.header(round_)
        rows = self._starts.message.body(header)
        self._starts.release()
        return rows.reshape(header.rows, -1) if header.rows else None

    def close(self) -> None:
        """Cancels the posted receives; called after the plan with the stop flag."""
        close_all(self._plans, self._starts, self._prompts)
