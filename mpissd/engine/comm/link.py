"""The link between lead and draft: OUTCOME goes to the draft, SPECULATION comes back.

An end of a link holds buffers and a carrier that moves them. A second carrier, the side, moves
PROPOSALS, the distributions of sampled tokens, to the lead while the target already verifies. A
third one takes PROMPT to the draft, after outcomes that admit sequences with prompts.
comm.queue_link joins two threads without MPI, for tests; comm.mpi_link joins two ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Outcome, Speculation
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

    batch: the largest b. vocab: entries of a distribution if tokens are sampled, or 0. num_tokens:
    exceeds every token (None: it is vocab). prompt_tokens: tokens of the longest prompt that is
    sent; 0: sequences have no prompts.
    """

    def __init__(
        self,
        group: int,
        batch: int,
        lookahead: int,
        *,
        vocab: int = 0,
        num_tokens: int | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        self.group, self.batch, self.lookahead, self.vocab = group, batch, lookahead, vocab
        self.num_tokens, self.prompt_tokens = num_tokens or vocab or wire.MOST, prompt_tokens

    @property
    def sampled(self) -> bool:
        """Whether speculations carry q, the probability of each token."""
        return self.vocab > 0

    def outcome_buffer(self) -> wire.Buffer:
        """Makes a buffer for an outcome: 2b rows, as it may release and admit b sequences each."""
        return self._buffer(wire.Kind.OUTCOME, 2 * self.batch * Outcome.WIDTH)

    def speculation_buffer(self) -> wire.Buffer:
        """Makes a buffer for a speculation."""
        width = Speculation.width(self.lookahead, self.sampled)
        return self._buffer(wire.Kind.SPECULATION, self.batch * width)

    def plan_buffer(self) -> wire.Buffer:
        """Makes a buffer for a plan: an outcome and a speculation."""
        width = Speculation.width(self.lookahead, self.sampled)
        return self._buffer(wire.Kind.PLAN, self.batch * (2 * Outcome.WIDTH + width))

    def proposals_buffer(self) -> wire.Buffer:
        """Makes a buffer for a round's distributions, at most b·K of them."""
        return self._buffer(wire.Kind.PROPOSALS, self.batch * self.lookahead * self.vocab)

    def prompt_buffer(self) -> wire.Buffer:
        """Makes a buffer for the prompts that an outcome or a plan admits."""
        return self._buffer(wire.Kind.PROMPT, wire.prompt_capacity(self.batch, self.prompt_tokens))

    def nothing_buffer(self, kind: wire.Kind) -> wire.Buffer:
        """Makes an unused buffer, for the direction in which no message of this kind is sent.

        Its receive is posted all the same: with another kind's tag it would take that kind's first
        message.
        """
        return self._buffer(kind, 0)

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
        prompts: Side | None = None,
    ) -> None:
        self._carrier, self._out, self._in = carrier, outgoing, incoming
        self.lookahead, self.waiter = lookahead, waiter
        self._vocab, self._side, self._prompts = vocab, side, prompts
        self.num_messages = self.num_bytes = 0
        self.proposal_bytes, self.proposal_wait_s = 0, 0.0

    def send_outcome(self, outcome: Outcome, stop: bool = False) -> None:
        """Starts to send OUTCOME: it asks for the speculation of outcome.round + 1, or to stop."""
        self._carrier.ready()
        wire.write_outcome(self._out, outcome, stop)
        self._carrier.send()
        self._count(self._out.array.nbytes)
        if self._prompts is not None and outcome.prompts:
            self._send_prompts(self._prompts, outcome)

    def _send_prompts(self, side: Side, outcome: Outcome) -> None:
        if wire.has_prompts(outcome):
            side.carrier.ready()
            size = wire.write_prompts(side.outgoing, outcome)
            side.carrier.send(size)
            self._count(4 * size)

    @property
    def sampled(self) -> bool:
        """Whether speculations carry q, the probability of each token."""
        return self._vocab > 0

    def speculation(self, round_: int, count: int) -> Speculation:
        """Waits for the speculation of round `round_` for `count` sequences."""
        self.waiter.until(self._carrier.arrived, "draft: speculation")
        speculation = wire.read_speculation(
            self._in, round_, count, self.lookahead, sampled=self.sampled
        )
        self._carrier.release()
        self._count(self._in.array.nbytes)
        return speculation

    def proposals(self, round_: int, count: int) -> NDArray[np.float32]:
        """Waits for the `count` distributions of round `round_`; returns them [count, V]."""
        side = self._take_proposals(count)
        rows = wire.read_proposals(side.incoming, round_, count, self._vocab)
        side.carrier.release()
        return rows

    def skip_proposals(self, round_: int, count: int) -> None:
        """Waits for the `count` distributions of a round that needs none of them; drops them."""
        side = self._take_proposals(count)
        wire.check_proposals(side.incoming, round_, count)
        side.carrier.release()

    def wait_for_proposals(self) -> Side:
        """Returns the side carrier once a message of distributions has arrived; counts the wait."""
        assert self._side is not None, "proposals without a side carrier"
        start = perf_counter()
        self.waiter.until(self._side.carrier.arrived, "draft: proposals")
        self.proposal_wait_s += perf_counter() - start
        return self._side

    def _take_proposals(self, count: int) -> Side:
        """Returns the side carrier with a message of `count` distributions."""
        side = self.wait_for_proposals()
        size = 4 * (wire.HEADER + count * self._vocab)
        self.proposal_bytes += size
        self._count(size)
        return side

    def _count(self, num_bytes: int) -> None:
        self.num_messages += 1
        self.num_bytes += num_bytes

    def close(self) -> None:
        """Closes the carriers."""
        for carrier in _carriers(self._carrier, self._side, self._prompts):
            carrier.close()


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
        prompts: Side | None = None,
    ) -> None:
        self._carrier, self._out, self._in = carrier, outgoing, incoming
        self._waiter, self._side, self._prompts = waiter, side, prompts

    def outcome_arrived(self) -> bool:
        """Returns whether an OUTCOME has arrived, without blocking."""
        return self._carrier.arrived()

    def outcome(self, round_: int | None = None) -> tuple[Outcome, bool]:
        """Waits for OUTCOME, of round `round_` if given; returns it, and its stop flag."""
        self._waiter.until(self._carrier.arrived, "target: outcome")
        outcome, stop = wire.read_outcome(self._in, round_)
        self._carrier.release()
        if self._prompts is not None and wire.has_prompts(outcome):
            self._waiter.until(self._prompts.carrier.arrived, "target: prompts")
            outcome = wire.read_prompts(self._prompts.incoming, outcome)
            self._prompts.carrier.release()
        return outcome, stop

    def send_speculation(self, speculation: Speculation) -> None:
        """Starts to send SPECULATION."""
        self._carrier.ready()
        wire.write_speculation(self._out, speculation)
        self._carrier.send()

    def send_proposals(self, round_: int, rows: Sequence[NDArray[np.float32]]) -> None:
        """Starts to send PROPOSALS: the distribution [V] of each token that was not certain."""
        assert self._side is not None, "proposals without a side carrier"
        self._side.carrier.ready()
        self._side.carrier.send(wire.write_proposals(self._side.outgoing, round_, rows))

    def close(self) -> None:
        """Closes the carriers."""
        for carrier in _carriers(self._carrier, self._side, self._prompts):
            carrier.close()


def _carriers(carrier: Carrier, *sides: Side | None) -> list[Carrier]:
    return [carrier, *(side.carrier for side in sides if side is not None)]
