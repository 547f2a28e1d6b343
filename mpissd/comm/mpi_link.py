"""The link and the plan channel over MPI: persistent requests on preallocated buffers.

A receive for the next message is posted as soon as the last one was read, a round ahead of its use.
Each channel has a communicator of its own, so that no tag can meet another's message.
"""

from __future__ import annotations

from mpi4py import MPI

from mpissd.comm import wire
from mpissd.comm.link import Carrier, DraftEnd, LeadEnd, LinkShape
from mpissd.rounds import Outcome, Speculation
from mpissd.wait import Waiter


class MpiCarrier(Carrier):
    """One persistent send and one persistent receive with one peer."""

    def __init__(
        self,
        comm: MPI.Comm,
        peer: int,
        outgoing: wire.Buffer,
        incoming: wire.Buffer,
        waiter: Waiter,
    ) -> None:
        self._waiter = waiter
        self._send = comm.Send_init(outgoing.array, dest=peer, tag=int(outgoing.kind))
        self._receive = comm.Recv_init(incoming.array, source=peer, tag=int(incoming.kind))
        self._sending = False
        self._full = False
        self._receive.Start()

    def ready(self) -> None:
        """Returns when the outgoing buffer may be written again."""
        if self._sending:
            self._waiter.until(self._send.Test, "send")
            self._sending = False

    def send(self) -> None:
        self._send.Start()
        self._sending = True

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
    """The lead's end towards rank `draft` of `comm`."""
    out, into = shape.outcome_buffer(), shape.speculation_buffer()
    return LeadEnd(MpiCarrier(comm, draft, out, into, waiter), out, into, shape.lookahead, waiter)


def draft_end(comm: MPI.Comm, lead: int, shape: LinkShape, waiter: Waiter) -> DraftEnd:
    """The draft's end towards rank `lead` of `comm`."""
    out, into = shape.speculation_buffer(), shape.outcome_buffer()
    return DraftEnd(MpiCarrier(comm, lead, out, into, waiter), out, into, waiter)


class PlanSender:
    """Lead → followers: {outcome r-1, speculation r}, one small message to each."""

    def __init__(self, comm: MPI.Comm, shape: LinkShape, waiter: Waiter) -> None:
        self._buffer = shape.plan_buffer()
        self._waiter = waiter
        self._sends = [
            comm.Send_init(self._buffer.array, dest=rank, tag=int(self._buffer.kind))
            for rank in range(1, comm.size)
        ]
        self._in_flight = False
        self.num_messages = 0
        self.num_bytes = 0

    def publish(self, outcome: Outcome, speculation: Speculation, stop: bool = False) -> None:
        """Starts the plan of round speculation.round towards every follower."""
        if not self._sends:
            return
        self._finish()
        wire.write_plan(self._buffer, outcome, speculation, stop)
        MPI.Prequest.Startall(self._sends)
        self._in_flight = True
        self.num_messages += len(self._sends)
        self.num_bytes += len(self._sends) * self._buffer.array.nbytes

    def _finish(self) -> None:
        if self._in_flight:
            self._waiter.until(lambda: MPI.Request.Testall(self._sends), "plan to followers")
            self._in_flight = False

    def close(self) -> None:
        """Finishes the last plan."""
        self._finish()
        for request in self._sends:
            request.Free()


class PlanReceiver:
    """A follower's end of the plan channel."""

    def __init__(self, comm: MPI.Comm, shape: LinkShape, waiter: Waiter) -> None:
        self._buffer = shape.plan_buffer()
        self._waiter = waiter
        self._lookahead = shape.lookahead
        self._receive = comm.Recv_init(self._buffer.array, source=0, tag=int(self._buffer.kind))
        self._receive.Start()

    def plan(self, round_: int) -> tuple[Outcome, Speculation, bool]:
        """Waits for the plan of round `round_`: (outcome r-1, speculation r, stop)."""
        self._waiter.until(self._receive.Test, "lead: plan")
        found = wire.read_plan(self._buffer, round_, self._lookahead)
        self._receive.Start()
        return found

    def close(self) -> None:
        """Takes the posted receive back; only after the plan that said stop."""
        self._receive.Cancel()
        self._receive.Wait()
        self._receive.Free()
