"""Lead ↔ draft: OUTCOME one way, SPECULATION the other, whatever carries them.

A link end is its buffers and a carrier, which moves them: send, has something arrived, release.
A second carrier takes what only some jobs need: TRUNK, the speculation that was served, to a draft
that did not make all of it, and PROPOSALS, whole distributions, which follow a sampled speculation
while the target already verifies. queue_link joins two threads (tests, no MPI), mpi_link two ranks.
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.comm import wire
from mpissd.rounds import Ints, Outcome, Speculation
from mpissd.wait import Waiter


class Carrier(ABC):
    """Moves one preallocated buffer each way; one message in flight a direction."""

    @abstractmethod
    def ready(self) -> None:
        """Returns when the outgoing buffer may be written again."""

    @abstractmethod
    def send(self, size: int | None = None) -> None:
        """Starts sending the outgoing buffer, or the first `size` numbers of it."""

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
    """Sizes that both ends agree on. vocab: of the rows that sampled tokens need; 0: none are.
    num_tokens: all tokens are below it (V)."""

    def __init__(
        self,
        group: int,
        batch: int,
        lookahead: int,
        *,
        vocab: int = 0,
        num_drafts: int = 1,
        num_tokens: int = wire.MOST,
    ) -> None:
        self.group, self.batch, self.lookahead, self.vocab = group, batch, lookahead, vocab
        self.num_drafts, self.num_tokens = num_drafts, vocab or num_tokens

    @property
    def sampled(self) -> bool:
        """Whether speculations carry q."""
        return self.vocab > 0

    @property
    def has_side(self) -> bool:
        """Whether TRUNK or PROPOSALS travel."""
        return self.sampled or self.num_drafts > 1

    def outcome_buffer(self) -> wire.Buffer:
        """Room for one outcome; twice the batch, as admissions ride beside releases."""
        return self._buffer(wire.Kind.OUTCOME, 2 * self.batch * Outcome.WIDTH)

    def speculation_buffer(self, kind: wire.Kind = wire.Kind.SPECULATION) -> wire.Buffer:
        """Room for one speculation (or TRUNK)."""
        return self._buffer(kind, self.batch * Speculation.width(self.lookahead, self.sampled))

    def plan_buffer(self) -> wire.Buffer:
        """Room for one plan, outcome and speculation together."""
        width = Speculation.width(self.lookahead, self.sampled)
        return self._buffer(wire.Kind.PLAN, self.batch * (2 * Outcome.WIDTH + width))

    def trunk_buffer(self) -> wire.Buffer:
        """Room for the speculation that was served."""
        return self.speculation_buffer(wire.Kind.TRUNK)

    def proposals_buffer(self) -> wire.Buffer:
        """Room for the rows of all proposals of a round."""
        return self._buffer(wire.Kind.PROPOSALS, self.batch * self.lookahead * self.vocab)

    def _buffer(self, kind: wire.Kind, size: int) -> wire.Buffer:
        return wire.Buffer(kind, self.group, size, lookahead=self.lookahead, vocab=self.num_tokens)


class Side(NamedTuple):
    """The second carrier of an end, and its buffers."""

    carrier: Carrier
    outgoing: wire.Buffer
    incoming: wire.Buffer


class LeadEnd:
    """The lead's end: tells outcomes, gets speculations."""

    def __init__(
        self,
        carrier: Carrier,
        outgoing: wire.Buffer,
        incoming: wire.Buffer,
        lookahead: int,
        waiter: Waiter,
        *,
        vocab: int = 0,
        side: Side | None = None,
    ) -> None:
        self._carrier, self._out, self._in = carrier, outgoing, incoming
        self.lookahead, self.waiter = lookahead, waiter
        self._vocab, self._side = vocab, side
        self.num_messages = 0
        self.num_bytes = 0

    def send_outcome(self, outcome: Outcome, stop: bool = False) -> None:
        """Starts OUTCOME; it asks for the speculation of outcome.round + 1 unless it says stop."""
        self._carrier.ready()
        wire.write_outcome(self._out, outcome, stop)
        self._carrier.send()
        self.num_messages += 1
        self.num_bytes += self._out.array.nbytes

    def arrived(self) -> bool:
        """Whether a SPECULATION waits to be taken (never blocks)."""
        return self._carrier.arrived()

    def speculation(self, round_: int, count: int) -> Speculation:
        """Waits for SPECULATION `round_` of `count` sequences."""
        self.waiter.until(self._carrier.arrived, "draft: speculation")
        sampled = self._vocab > 0
        found = wire.read_speculation(self._in, round_, count, self.lookahead, sampled=sampled)
        self._carrier.release()
        self._count(self._in.array.nbytes)
        return found

    def send_trunk(self, speculation: Speculation) -> None:
        """Starts TRUNK: what was served, to a draft that did not make all of it."""
        assert self._side is not None, "a trunk without a side carrier"
        self._side.carrier.ready()
        wire.write_speculation(self._side.outgoing, speculation)
        size = wire.HEADER + speculation.rows.size
        self._side.carrier.send(size)
        self._count(4 * size)

    def proposals(self, round_: int, count: int) -> NDArray[np.float32]:
        """Waits for the `count` rows [count, V] that SPECULATION `round_` announced."""
        assert self._side is not None, "proposals without a side carrier"
        self.waiter.until(self._side.carrier.arrived, "draft: proposals")
        rows = wire.read_proposals(self._side.incoming, round_, count, self._vocab)
        self._side.carrier.release()
        self._count(4 * (wire.HEADER + rows.size))
        return rows

    def skip_proposals(self, round_: int, count: int) -> None:
        """Waits for the `count` rows of a round that needed none of them, and drops them."""
        assert self._side is not None, "proposals without a side carrier"
        self.waiter.until(self._side.carrier.arrived, "draft: proposals")
        wire.check_proposals(self._side.incoming, round_, count)
        self._side.carrier.release()
        self._count(4 * (wire.HEADER + count * self._vocab))

    def _count(self, num_bytes: int) -> None:
        self.num_messages += 1
        self.num_bytes += num_bytes

    def close(self) -> None:
        """Closes the carriers."""
        self._carrier.close()
        if self._side is not None:
            self._side.carrier.close()


class DraftEnd:
    """The draft's end: hears outcomes, answers with speculations."""

    def __init__(
        self,
        carrier: Carrier,
        outgoing: wire.Buffer,
        incoming: wire.Buffer,
        waiter: Waiter,
        *,
        side: Side | None = None,
    ) -> None:
        self._carrier, self._out, self._in = carrier, outgoing, incoming
        self._waiter, self._side = waiter, side

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

    def trunk(self, round_: int, count: int, lookahead: int, *, sampled: bool) -> Speculation:
        """Waits for TRUNK `round_`: what was served, of all drafts."""
        assert self._side is not None, "a trunk without a side carrier"
        self._waiter.until(self._side.carrier.arrived, "target: trunk")
        incoming = self._side.incoming
        found = wire.read_speculation(incoming, round_, count, lookahead, sampled=sampled)
        self._side.carrier.release()
        return found

    def send_proposals(self, round_: int, rows: Sequence[NDArray[np.float32]]) -> None:
        """Starts PROPOSALS: the distributions [V] behind the tokens of SPECULATION `round_` that
        were not certain, sequence by sequence."""
        assert self._side is not None, "proposals without a side carrier"
        self._side.carrier.ready()
        self._side.carrier.send(wire.write_proposals(self._side.outgoing, round_, rows))

    def close(self) -> None:
        """Closes the carriers."""
        self._carrier.close()
        if self._side is not None:
            self._side.carrier.close()


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

    def send(self, size: int | None = None) -> None:
        self._to_peer.put(self._out.array[:size].copy())

    def arrived(self) -> bool:
        if not self._full:
            try:
                found = self._from_peer.get_nowait()
            except queue.Empty:
                return False
            self._in.array[: len(found)] = found
            self._full = True
        return True

    def release(self) -> None:
        self._full = False

    def close(self) -> None:
        return None


def queue_link(shape: LinkShape, waiter: Waiter) -> tuple[LeadEnd, DraftEnd]:
    """Both ends of a link between two threads of one process."""
    lead, draft = _joined(shape.outcome_buffer, shape.speculation_buffer)
    sides = _joined(shape.trunk_buffer, shape.proposals_buffer) if shape.has_side else (None, None)
    return (
        LeadEnd(*lead, shape.lookahead, waiter, vocab=shape.vocab, side=sides[0]),
        DraftEnd(*draft, waiter, side=sides[1]),
    )


def _joined(down: Callable[[], wire.Buffer], up: Callable[[], wire.Buffer]) -> tuple[Side, Side]:
    """Two carriers that lead to each other: `down` from the first, `up` to it."""
    to_second: queue.SimpleQueue[Ints] = queue.SimpleQueue()
    to_first: queue.SimpleQueue[Ints] = queue.SimpleQueue()
    out, into = down(), up()
    back, heard = up(), down()
    return (
        Side(QueueCarrier(out, into, to_second, to_first), out, into),
        Side(QueueCarrier(back, heard, to_first, to_second), back, heard),
    )
