"""Lead ↔ draft: OUTCOME one way, SPECULATION the other, whatever carries them.

A link end is its buffers and a carrier, which moves them: send, has something arrived, release.
QueueLink joins two threads (tests, no MPI); mpi_link joins two ranks.
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod

import numpy as np

from mpissd.comm import wire
from mpissd.rounds import Ints, Outcome, Speculation
from mpissd.wait import Waiter


class Carrier(ABC):
    """Moves one preallocated buffer each way; one message in flight a direction."""

    @abstractmethod
    def ready(self) -> None:
        """Returns when the outgoing buffer may be written again."""

    @abstractmethod
    def send(self) -> None:
        """Starts sending the outgoing buffer."""

    @abstractmethod
    def arrived(self) -> bool:
        """Whether the incoming buffer holds a message (never blocks)."""

    @abstractmethod
    def release(self) -> None:
        """Gives the incoming buffer back for the next message."""

    @abstractmethod
    def close(self) -> None:
        """Finishes or cancels what is in flight."""


class LinkShape:
    """Sizes that both ends agree on."""

    def __init__(self, group: int, batch: int, lookahead: int) -> None:
        self.group, self.batch, self.lookahead = group, batch, lookahead

    def outcome_buffer(self) -> wire.Buffer:
        """Room for one outcome; twice the batch, as admissions ride beside releases."""
        return wire.Buffer(wire.Kind.OUTCOME, self.group, 2 * self.batch * Outcome.WIDTH)

    def speculation_buffer(self) -> wire.Buffer:
        """Room for one speculation."""
        size = self.batch * (Speculation.HEAD + self.lookahead)
        return wire.Buffer(wire.Kind.SPECULATION, self.group, size)

    def plan_buffer(self) -> wire.Buffer:
        """Room for one plan, outcome and speculation together."""
        size = 2 * self.batch * Outcome.WIDTH + self.batch * (Speculation.HEAD + self.lookahead)
        return wire.Buffer(wire.Kind.PLAN, self.group, size)


class LeadEnd:
    """The lead's end: tells outcomes, gets speculations."""

    def __init__(
        self,
        carrier: Carrier,
        outgoing: wire.Buffer,
        incoming: wire.Buffer,
        lookahead: int,
        waiter: Waiter,
    ) -> None:
        self._carrier, self._out, self._in = carrier, outgoing, incoming
        self._lookahead, self._waiter = lookahead, waiter
        self.num_messages = 0
        self.num_bytes = 0

    def send_outcome(self, outcome: Outcome, stop: bool = False) -> None:
        """Starts OUTCOME; it asks for the speculation of outcome.round + 1 unless it says stop."""
        self._carrier.ready()
        wire.write_outcome(self._out, outcome, stop)
        self._carrier.send()
        self.num_messages += 1
        self.num_bytes += self._out.array.nbytes

    def speculation(self, round_: int, count: int) -> Speculation:
        """Waits for SPECULATION `round_` of `count` sequences."""
        self._waiter.until(self._carrier.arrived, "draft: speculation")
        found = wire.read_speculation(self._in, round_, count, self._lookahead)
        self._carrier.release()
        self.num_messages += 1
        self.num_bytes += self._in.array.nbytes
        return found

    def close(self) -> None:
        """Closes the carrier."""
        self._carrier.close()


class DraftEnd:
    """The draft's end: hears outcomes, answers with speculations."""

    def __init__(
        self, carrier: Carrier, outgoing: wire.Buffer, incoming: wire.Buffer, waiter: Waiter
    ) -> None:
        self._carrier, self._out, self._in = carrier, outgoing, incoming
        self._waiter = waiter

    def outcome_arrived(self) -> bool:
        """Whether an OUTCOME waits to be taken (never blocks)."""
        return self._carrier.arrived()

    def outcome(self, round_: int | None = None) -> tuple[Outcome, bool]:
        """Waits for the next OUTCOME, of round `round_` if that is given; (outcome, stop)."""
        self._waiter.until(self._carrier.arrived, "target: outcome")
        found = wire.read_outcome(self._in, round_)
        self._carrier.release()
        return found

    def send_speculation(self, speculation: Speculation) -> None:
        """Starts SPECULATION."""
        self._carrier.ready()
        wire.write_speculation(self._out, speculation)
        self._carrier.send()

    def close(self) -> None:
        """Closes the carrier."""
        self._carrier.close()


class QueueCarrier(Carrier):
    """One direction each of two thread-safe queues."""

    def __init__(
        self,
        outgoing: wire.Buffer,
        incoming: wire.Buffer,
        to_peer: queue.SimpleQueue[Ints],
        from_peer: queue.SimpleQueue[Ints],
    ) -> None:
        self._out, self._in = outgoing, incoming
        self._to_peer, self._from_peer = to_peer, from_peer
        self._full = False

    def ready(self) -> None:
        return None

    def send(self) -> None:
        self._to_peer.put(self._out.array.copy())

    def arrived(self) -> bool:
        if not self._full:
            try:
                np.copyto(self._in.array, self._from_peer.get_nowait())
            except queue.Empty:
                return False
            self._full = True
        return True

    def release(self) -> None:
        self._full = False

    def close(self) -> None:
        return None


def queue_link(shape: LinkShape, waiter: Waiter) -> tuple[LeadEnd, DraftEnd]:
    """Both ends of a link between two threads of one process."""
    down: queue.SimpleQueue[Ints] = queue.SimpleQueue()
    up: queue.SimpleQueue[Ints] = queue.SimpleQueue()
    lead = shape.outcome_buffer(), shape.speculation_buffer()
    draft = shape.speculation_buffer(), shape.outcome_buffer()
    return (
        LeadEnd(QueueCarrier(*lead, down, up), *lead, shape.lookahead, waiter),
        DraftEnd(QueueCarrier(*draft, up, down), *draft, waiter),
    )
