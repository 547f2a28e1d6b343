"""Messages over MPI, with persistent requests on preallocated buffers.

They carry the link between a target group's rank 0 and the draft rank, and the plan channel. On the
plan channel rank 0 of a tensor-parallel target group sends the group's other ranks what to verify.
The receive for the next message is posted as soon as the last message was read, a round before it
is needed, so that MPI can deliver at once.
"""

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
    """Sends messages to the ranks `peers`, those of the usual size by persistent requests."""

    def __init__(
        self, comm: MPI.Comm, peers: Sequence[int], message: Message, waiter: Waiter
    ) -> None:
        super().__init__(message)
        self._comm = comm
        self._peers = peers
        self._waiter = waiter
        self._tag = int(message.kind)
        usual = message.array[: message.usual]
        self._usual = [comm.Send_init(usual, peer, self._tag) for peer in peers]
        self._sending: list[MPI.Request] = []

    def ready(self) -> None:
        if self._sending:
            what = f"send of {self.message.kind.name}"
            self._waiter.until(lambda: MPI.Request.Testall(self._sending), what)
            self._sending = []

    def send(self, size: int | None = None) -> None:
        if size is None:
            MPI.Prequest.Startall(self._usual)
            self._sending = [*self._usual]
        else:
            part = self.message.array[:size]
            self._sending = [self._comm.Isend(part, peer, self._tag) for peer in self._peers]

    def close(self) -> None:
        self.ready()
        for request in self._usual:
            request.Free()


class MpiInbox(Inbox):
    """Receives messages of one kind from rank `peer`, by a persistent receive, posted at once."""

    def __init__(self, comm: MPI.Comm, peer: int, message: Message) -> None:
        self._request = comm.Recv_init(message.array, peer, int(message.kind))
        super().__init__(message, self._request.Test)
        self._request.Start()

    def release(self) -> None:
        super().release()
        self._request.Start()

    def close(self) -> None:
        if not self._full:
            self._request.Cancel()
            self._request.Wait()
        self._request.Free()


def mpi_boxes(comm: MPI.Comm, peer: int, waiter: Waiter) -> tuple[MakeOutbox, MakeInbox]:
    """Returns functions that make outboxes to, and inboxes from, rank `peer` of `comm`."""
    return (
        lambda message: MpiOutbox(comm, [peer], message, waiter),
        lambda message: MpiInbox(comm, peer, message),
    )


class PlanSender:
    """Sends plans from rank 0 of a target group to the group's other ranks, so that all of them run
    the same forwards.

    The plan of round r holds the outcome of round r-1 and the drafted tokens of round r. `publish`
    returns only when the plan has left: MPI may transfer a message beyond its eager limit (4 KiB in
    shared memory with Open MPI) only while the sender calls MPI. But rank 0 next waits for a
    forward whose all-reduces need the other ranks, so that neither side would finish.
    """

    def __init__(self, comm: MPI.Comm, shape: LinkShape, waiter: Waiter) -> None:
        followers = range(1, comm.size)
        self.num_followers = len(followers)
        self._plans = MpiOutbox(comm, followers, Message(Kind.PLAN, shape), waiter)
        self._starts = MpiOutbox(comm, followers, Message(Kind.START, shape), waiter)
        self._prompts: MpiOutbox | None = None
        if shape.prompt_tokens:
            self._prompts = MpiOutbox(comm, followers, Message(Kind.PROMPT, shape), waiter)
        self.num_messages = self.num_bytes = 0

    def publish(self, outcome: Outcome, speculation: Speculation, stop: bool = False) -> None:
        """Sends the other ranks of the target group the plan of the next round: the outcome to
        apply and the tokens to verify. With `stop`, these ranks end."""
        message = self._plans.message
        self._plans.send(wire.write_outcome(message, outcome, stop, speculation))
        self._count(4 * message.usual)
        if self._prompts is not None and len(outcome.fresh):
            size = wire.write_prompts(self._prompts.message, outcome)
            self._prompts.send(size)
            self._count(4 * size)
            self._prompts.ready()
        self._plans.ready()

    def start(self, round_: int, forced: Callable[[], Ints | None]) -> Ints | None:
        """Starts, on all target ranks, a round that the GPUs run without the host. forced: a
        function that returns tokens to impose on the models, int32 [b, n], or None if the round
        cannot begin yet. Sends its result to the other target ranks, and returns it."""
        tokens = forced()
        if self.num_followers:
            message = self._starts.message
            rows = () if tokens is None else (tokens,)
            message.write(round_, sum(map(len, rows)), rows)
            self._starts.send()
            self._count(message.array.nbytes)
            self._starts.ready()
        return tokens

    def _count(self, num_bytes: int) -> None:
        self.num_messages += self.num_followers
        self.num_bytes += self.num_followers * num_bytes

    def close(self) -> None:
        """Finishes sends that are in progress, and frees the persistent requests."""
        close_all(self._plans, self._starts, self._prompts)


class PlanReceiver:
    """Receives plans (what to verify next) from rank 0 of `comm`, on another rank of its group."""

    def __init__(self, comm: MPI.Comm, shape: LinkShape, waiter: Waiter) -> None:
        self._waiter = waiter
        self._plans = MpiInbox(comm, 0, Message(Kind.PLAN, shape))
        self._starts = MpiInbox(comm, 0, Message(Kind.START, shape))
        has_prompts = shape.prompt_tokens > 0
        self._prompts = MpiInbox(comm, 0, Message(Kind.PROMPT, shape)) if has_prompts else None

    def outcome_arrived(self) -> bool:
        """Returns whether a plan has arrived, without blocking."""
        return self._plans.arrived()

    def plan(self, round_: int) -> tuple[Outcome, Speculation, bool]:
        """Waits for the plan of round r = `round_`. Returns (the outcome of round r-1, the drafted
        tokens of round r, whether to stop)."""
        OWN.bytes[DOING] = _PLAN_WAIT
        self._waiter.until(self._plans.arrived, "lead: plan")
        OWN.bytes[DOING] = _VERIFY
        outcome, speculation, stop = wire.read_plan(self._plans.message, round_)
        self._plans.release()
        return with_prompts(outcome, self._prompts, self._waiter), speculation, stop

    def start(self, round_: int, forced: object) -> Ints | None:
        """Waits for rank 0's order to start a round; returns the tokens that PlanSender.start sent,
        or None. `forced` is unused: only rank 0 decides which tokens are imposed."""
        self._waiter.until(self._starts.arrived, "lead: start of a round")
        header = self._starts.message.header(round_)
        rows = self._starts.message.body(header)
        self._starts.release()
        return rows.reshape(header.rows, -1) if header.rows else None

    def close(self) -> None:
        """Cancels the posted receives. Called after the plan that orders to stop has arrived."""
        close_all(self._plans, self._starts, self._prompts)
