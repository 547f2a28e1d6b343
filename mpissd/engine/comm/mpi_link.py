"""The link and the plan channel over MPI, with persistent requests on preallocated buffers.

The receive for the next message is posted as soon as the last one was read, a round before it is
needed. Each channel has a communicator of its own, so that no receive takes another channel's
message.
"""

from __future__ import annotations

from mpi4py import MPI

from mpissd.common.rounds import Outcome, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.comm import wire
from mpissd.engine.comm.link import Carrier, DraftEnd, LeadEnd, LinkShape, Side


class MpiCarrier(Carrier):
    """A carrier between two ranks: one persistent send and one persistent receive.

    A message that is shorter than its buffer is sent by a request of its own.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        peer: int,
        outgoing: wire.Buffer,
        incoming: wire.Buffer,
        waiter: Waiter,
    ) -> None:
        self._waiter = waiter
        self._comm, self._peer, self._out = comm, peer, outgoing
        self._send = comm.Send_init(outgoing.array, dest=peer, tag=int(outgoing.kind))
        self._receive = comm.Recv_init(incoming.array, source=peer, tag=int(incoming.kind))
        self._sending: MPI.Request | None = None
        self._full = False
        self._receive.Start()

    def ready(self) -> None:
        """Returns when the outgoing buffer may be written again."""
        if self._sending is not None:
            self._waiter.until(self._sending.Test, "send")
            self._sending = None

    def send(self, size: int | None = None) -> None:
        if size is None:
            self._send.Start()
            self._sending = self._send
        else:
            part = self._out.array[:size]
            self._sending = self._comm.Isend(part, self._peer, int(self._out.kind))

    def arrived(self) -> bool:
        if not self._full:
            self._full = self._receive.Test()
        return self._full

    def release(self) -> None:
        self._full = False
        self._receive.Start()

    def close(self) -> None:
        self.ready()
        if not self._full:
            self._receive.Cancel()
            self._receive.Wait()
        self._send.Free()
        self._receive.Free()


def lead_end(comm: MPI.Comm, draft: int, shape: LinkShape, waiter: Waiter) -> LeadEnd:
    """Opens the lead's end of a link to rank `draft` of `comm`."""
    main = _open(comm, draft, shape.outcome_buffer(), shape.speculation_buffer(), waiter)
    side = prompts = None
    if shape.sampled:
        side = _open(
            comm, draft, shape.nothing_buffer(wire.Kind.PROPOSALS), shape.proposals_buffer(), waiter
        )
    if shape.prompt_tokens:
        prompts = _open(
            comm, draft, shape.prompt_buffer(), shape.nothing_buffer(wire.Kind.PROMPT), waiter
        )
    return LeadEnd(*main, shape.lookahead, waiter, vocab=shape.vocab, side=side, prompts=prompts)


def draft_end(comm: MPI.Comm, lead: int, shape: LinkShape, waiter: Waiter) -> DraftEnd:
    """Opens the draft's end of a link to rank `lead` of `comm`."""
    main = _open(comm, lead, shape.speculation_buffer(), shape.outcome_buffer(), waiter)
    side = prompts = None
    if shape.sampled:
        side = _open(
            comm, lead, shape.proposals_buffer(), shape.nothing_buffer(wire.Kind.PROPOSALS), waiter
        )
    if shape.prompt_tokens:
        prompts = _open(
            comm, lead, shape.nothing_buffer(wire.Kind.PROMPT), shape.prompt_buffer(), waiter
        )
    return DraftEnd(*main, waiter, side=side, prompts=prompts)


def _open(comm: MPI.Comm, peer: int, out: wire.Buffer, into: wire.Buffer, waiter: Waiter) -> Side:
    return Side(MpiCarrier(comm, peer, out, into, waiter), out, into)


class PlanSender:
    """The lead's end of the plan channel: sends each follower outcome r-1 and speculation r.

    A plan is sent when `publish` returns. A message beyond MPI's eager limit (4 KiB of shared
    memory in Open MPI) may move only while the sender calls MPI, and the lead next waits for a
    forward that needs the followers: on a GPU neither would end.
    """

    def __init__(self, comm: MPI.Comm, shape: LinkShape, waiter: Waiter) -> None:
        self._buffer, self._waiter = shape.plan_buffer(), waiter
        self._comm, self._followers = comm, range(1, comm.size)
        self.num_followers = len(self._followers)
        self._sends = [
            comm.Send_init(self._buffer.array, dest=rank, tag=int(self._buffer.kind))
            for rank in self._followers
        ]
        self._prompts = shape.prompt_buffer() if shape.prompt_tokens else None
        self.num_messages = 0
        self.num_bytes = 0

    def publish(self, outcome: Outcome, speculation: Speculation, stop: bool = False) -> None:
        """Sends the plan of round speculation.round to every follower."""
        if not self._sends:
            return
        wire.write_plan(self._buffer, outcome, speculation, stop)
        MPI.Prequest.Startall(self._sends)
        sending: list[MPI.Request] = [*self._sends]
        self._count(self._buffer.array.nbytes)
        if self._prompts is not None and wire.has_prompts(outcome):
            part = self._prompts.array[: wire.write_prompts(self._prompts, outcome)]
            tag = int(self._prompts.kind)
            sending += [self._comm.Isend(part, rank, tag) for rank in self._followers]
            self._count(part.nbytes)
        self._waiter.until(lambda: MPI.Request.Testall(sending), "plan to followers")

    def _count(self, num_bytes: int) -> None:
        self.num_messages += len(self._sends)
        self.num_bytes += len(self._sends) * num_bytes

    def close(self) -> None:
        """Frees the requests."""
        for request in self._sends:
            request.Free()


class PlanReceiver:
    """A follower's end of the plan channel."""

    def __init__(self, comm: MPI.Comm, shape: LinkShape, waiter: Waiter) -> None:
        self._waiter = waiter
        self._lookahead, self._sampled = shape.lookahead, shape.sampled
        self._plans = _Inbox(comm, shape.plan_buffer())
        self._prompts = _Inbox(comm, shape.prompt_buffer()) if shape.prompt_tokens else None

    def outcome_arrived(self) -> bool:
        """Returns whether a plan has arrived, without blocking."""
        return self._plans.arrived()

    def plan(self, round_: int) -> tuple[Outcome, Speculation, bool]:
        """Waits for the plan of round r = `round_`; returns (outcome r-1, speculation r, stop)."""
        buffer = self._plans.wait(self._waiter, "lead: plan")
        outcome, speculation, stop = wire.read_plan(
            buffer, round_, self._lookahead, sampled=self._sampled
        )
        self._plans.release()
        if self._prompts is not None and wire.has_prompts(outcome):
            arrived = self._prompts.wait(self._waiter, "lead: prompts")
            outcome = wire.read_prompts(arrived, outcome)
            self._prompts.release()
        return outcome, speculation, stop

    def close(self) -> None:
        """Cancels the posted receives; called after the plan with the stop flag."""
        self._plans.close()
        if self._prompts is not None:
            self._prompts.close()


class _Inbox:
    """A persistent receive from the lead into one buffer, posted from the start."""

    def __init__(self, comm: MPI.Comm, buffer: wire.Buffer) -> None:
        self._buffer = buffer
        self._receive = comm.Recv_init(buffer.array, source=0, tag=int(buffer.kind))
        self._receive.Start()
        self._full = False

    def arrived(self) -> bool:
        """Returns whether a message is in the buffer, without blocking."""
        if not self._full:
            self._full = self._receive.Test()
        return self._full

    def wait(self, waiter: Waiter, what: str) -> wire.Buffer:
        """Returns the buffer when a message is in it."""
        waiter.until(self.arrived, what)
        return self._buffer

    def release(self) -> None:
        """Gives the buffer back for the next message."""
        self._full = False
        self._receive.Start()

    def close(self) -> None:
        """Cancels the posted receive."""
        self._receive.Cancel()
        self._receive.Wait()
        self._receive.Free()
