"""The link between lead and draft: OUTCOME goes to the draft, SPECULATION comes back.

An end of a link holds buffers and a carrier that moves them. A second carrier, the side, moves what
only some jobs need: TRUNK, the speculation that was served, goes to a draft that did not make all
of it; PROPOSALS, the distributions behind sampled tokens, come while the target already verifies.
queue_link joins two threads without MPI, for tests; mpi_link joins two ranks.
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints, Outcome, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.comm import wire


class Carrier(ABC):
    """Moves one preallocated buffer in each direction, with one message in flight in each."""

    @abstractmethod
    def ready(self) -> None:
        """Returns when the outgoing buffer may be written again."""

    @abstractmethod
    def send(self, size: int | None = None) -> None:
        """Starts sending the outgoing buffer, or the first `size` numbers of it."""

    @abstractmethod
    def arrived(self) -> bool:
        """Returns whether the incoming buffer holds a message, without blocking."""

    @abstractmethod
    def release(self) -> None:
        """Gives the incoming buffer back for the next message."""

    @abstractmethod
    def close(self) -> None:
        """Finishes the send and cancels the receive that are in flight."""


class LinkShape:
    """The sizes of messages, the same at both ends.

    batch: the largest b. vocab: V if tokens are sampled, else 0. num_tokens: exceeds every token.
    """

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
        """Whether speculations carry q, the probability of each token."""
        return self.vocab > 0

    @property
    def has_side(self) -> bool:
        """Whether the link needs a side carrier, for TRUNK or PROPOSALS."""
        return self.sampled or self.num_drafts > 1

    def outcome_buffer(self) -> wire.Buffer:
        """Makes a buffer for an outcome: 2b rows, as it may release and admit b sequences each."""
        return self._buffer(wire.Kind.OUTCOME, 2 * self.batch * Outcome.WIDTH)

    def speculation_buffer(self, kind: wire.Kind = wire.Kind.SPECULATION) -> wire.Buffer:
        """Makes a buffer for a speculation, as SPECULATION or as TRUNK."""
        return self._buffer(kind, self.batch * Speculation.width(self.lookahead, self.sampled))

    def plan_buffer(self) -> wire.Buffer:
        """Makes a buffer for a plan: an outcome and a speculation."""
        width = Speculation.width(self.lookahead, self.sampled)
        return self._buffer(wire.Kind.PLAN, self.batch * (2 * Outcome.WIDTH + width))

    def trunk_buffer(self) -> wire.Buffer:
        """Makes a buffer for the speculation that was served."""
        return self.speculation_buffer(wire.Kind.TRUNK)

    def proposals_buffer(self) -> wire.Buffer:
        """Makes a buffer for a round's distributions, at most b·K of them."""
        return self._buffer(wire.Kind.PROPOSALS, self.batch * self.lookahead * self.vocab)

    def _buffer(self, kind: wire.Kind, size: int) -> wire.Buffer:
        return wire.Buffer(kind, self.group, size, lookahead=self.lookahead, vocab=self.num_tokens)


class Side(NamedTuple):
    """A carrier with its two buffers."""

    carrier: Carrier
    outgoing: wire.Buffer
    incoming: wire.Buffer


class LeadEnd:
    """The lead's end: sends outcomes, receives speculations; counts messages and bytes."""

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
        """Starts to send OUTCOME: it asks for the speculation of outcome.round + 1, or to stop."""
        self._carrier.ready()
        wire.write_outcome(self._out, outcome, stop)
        self._carrier.send()
        self.num_messages += 1
        self.num_bytes += self._out.array.nbytes

    def arrived(self) -> bool:
        """Returns whether a SPECULATION has arrived, without blocking."""
        return self._carrier.arrived()

    def speculation(self, round_: int, count: int) -> Speculation:
        """Waits for the speculation of round `round_` for `count` sequences."""
        self.waiter.until(self._carrier.arrived, "draft: speculation")
        sampled = self._vocab > 0
        speculation = wire.read_speculation(
            self._in, round_, count, self.lookahead, sampled=sampled
        )
        self._carrier.release()
        self._count(self._in.array.nbytes)
        return speculation

    def send_trunk(self, speculation: Speculation) -> None:
        """Starts to send TRUNK, the speculation that was served."""
        assert self._side is not None, "a trunk without a side carrier"
        self._side.carrier.ready()
        wire.write_speculation(self._side.outgoing, speculation)
        size = wire.HEADER + speculation.rows.size
        self._side.carrier.send(size)
        self._count(4 * size)

    def proposals(self, round_: int, count: int) -> NDArray[np.float32]:
        """Waits for the `count` distributions of round `round_`; returns them [count, V]."""
        assert self._side is not None, "proposals without a side carrier"
        self.waiter.until(self._side.carrier.arrived, "draft: proposals")
        rows = wire.read_proposals(self._side.incoming, round_, count, self._vocab)
        self._side.carrier.release()
        self._count(4 * (wire.HEADER + rows.size))
        return rows

    def skip_proposals(self, round_: int, count: int) -> None:
        """Waits for the `count` distributions of a round that needs none of them; drops them."""
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
    """The draft's end: receives outcomes, sends speculations."""

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
        """Returns whether an OUTCOME has arrived, without blocking."""
        return self._carrier.arrived()

    def outcome(self, round_: int | None = None) -> tuple[Outcome, bool]:
        """Waits for OUTCOME, of round `round_` if given; returns it, and whether it says stop."""
        self._waiter.until(self._carrier.arrived, "target: outcome")
        outcome = wire.read_outcome(self._in, round_)
        self._carrier.release()
        return outcome

    def send_speculation(self, speculation: Speculation) -> None:
        """Starts to send SPECULATION."""
        self._carrier.ready()
        wire.write_speculation(self._out, speculation)
        self._carrier.send()

    def trunk(self, round_: int, count: int, lookahead: int, *, sampled: bool) -> Speculation:
        """Waits for the speculation that was served in round `round_`, of all drafts."""
        assert self._side is not None, "a trunk without a side carrier"
        self._waiter.until(self._side.carrier.arrived, "target: trunk")
        incoming = self._side.incoming
        speculation = wire.read_speculation(incoming, round_, count, lookahead, sampled=sampled)
        self._side.carrier.release()
        return speculation

    def send_proposals(self, round_: int, rows: Sequence[NDArray[np.float32]]) -> None:
        """Starts to send PROPOSALS: the distribution [V] behind each token that was not certain."""
        assert self._side is not None, "proposals without a side carrier"
        self._side.carrier.ready()
        self._side.carrier.send(wire.write_proposals(self._side.outgoing, round_, rows))

    def close(self) -> None:
        """Closes the carriers."""
        self._carrier.close()
        if self._side is not None:
            self._side.carrier.close()


class QueueCarrier(Carrier):
    """A carrier between two threads, over one queue in each direction."""

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
                message = self._from_peer.get_nowait()
            except queue.Empty:
                return False
            self._in.array[: len(message)] = message
            self._full = True
        return True

    def release(self) -> None:
        self._full = False

    def close(self) -> None:
        return None


def queue_link(
    shape: LinkShape, waiter: Waiter, draft_waiter: Waiter | None = None
) -> tuple[LeadEnd, DraftEnd]:
    """Returns both ends of a link between two threads of one process.

    draft_waiter: how the draft waits; None: as the lead does.
    """
    lead, draft = _joined(shape.outcome_buffer, shape.speculation_buffer)
    sides = _joined(shape.trunk_buffer, shape.proposals_buffer) if shape.has_side else (None, None)
    return (
        LeadEnd(*lead, shape.lookahead, waiter, vocab=shape.vocab, side=sides[0]),
        DraftEnd(*draft, draft_waiter or waiter, side=sides[1]),
    )


def _joined(down: Callable[[], wire.Buffer], up: Callable[[], wire.Buffer]) -> tuple[Side, Side]:
    """Returns two connected carriers with buffers; the first sends `down` and receives `up`."""
    to_second: queue.SimpleQueue[Ints] = queue.SimpleQueue()
    to_first: queue.SimpleQueue[Ints] = queue.SimpleQueue()
    out, into = down(), up()
    back, heard = up(), down()
    return (
        Side(QueueCarrier(out, into, to_second, to_first), out, into),
        Side(QueueCarrier(back, heard, to_first, to_second), back, heard),
    )
