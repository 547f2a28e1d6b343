"""Target and draft workers whose forwards decide nothing.

k, t* and the draft tokens come from tables, which imposed laws fill (`gemm`) or a recording
(`replay`). Every mode then emits the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from mpissd.common.rounds import Batch, Ints, Request, Source, Speculation
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.spec.acceptance import count_accepted
from mpissd.engine.spec.fanout import FanOuts, lanes_of
from mpissd.engine.workload.gemm.law import Index
from mpissd.engine.workload.rollout import Branches, Lanes, Rollout
from mpissd.engine.workload.workers import Admissions, DraftWorker, Proposals, TargetWorker

_NOBODY: Index = np.zeros(0, np.int64)


class Stream(Protocol):
    """The tokens Y that the target emits; offset 0 is the position behind a sequence's newest."""

    lookahead: int

    def prepare(self, requests: Iterable[Request]) -> None:
        """Tabulates future sequences, while no sequence is live."""

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        """Admits new sequences, and follows the lengths of the batch."""

    def true(self, offsets: Index, rows: Index | None = None) -> Ints:
        """Returns Y at these offsets, int32 [b, …], or of batch rows `rows` if given."""

    def row(self, count: int) -> list[int]:
        """Returns the next `count` tokens Y of the only sequence of the batch."""


class DraftTables(Stream, Protocol):
    """Tables of the tokens that the draft proposes and of the outcomes that it prepares for."""

    def grown(
        self, speculation: Speculation, fan_out: tuple[int, ...], rows: Index | None = None
    ) -> tuple[Ints, Ints]:
        """Returns the bonus candidates [n, ΣF] of batch rows `rows` [n] (None: all), and the tokens
        that grow behind them [n, ΣF, K]."""

    def restarts(self, source: Source, rows: Index) -> Ints:
        """Returns the tokens [n, K] that a backup drafts for batch rows `rows` [n]."""


class GemmTargetWorker(TargetWorker):
    """Runs the target's forward, and accepts drafted tokens that equal the token stream Y."""

    chains = True

    def __init__(self, stepper: Forwards, stream: Stream) -> None:
        self.stepper, self._stream = stepper, stream
        self._ahead: Index = np.arange(stream.lookahead + 1, dtype=np.int64)

    def twin(self, stepper: Forwards) -> GemmTargetWorker:
        """Returns a worker with the same laws that runs its forwards on `stepper`."""
        return GemmTargetWorker(stepper, self._stream)

    def prepare(self, requests: Iterable[Request]) -> None:
        """Draws the first tokens of these sequences ahead of the rounds that admit them."""
        self._stream.prepare(requests)

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._stream.begin_round(batch, admissions)

    def truth(self) -> Ints:
        return self._stream.true(self._ahead)

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Compares the drafted tokens with Y; row j scores position n + j, n the committed length.

        Returns (num_accepted, bonus), both int32 [b].
        """
        if len(batch) == 1:  # plain Python saves 12 to 18 µs in every round
            return _judge_one(self._stream.row(len(self._ahead)), speculation)
        true = self._stream.true(self._ahead)  # [b, K+1]
        accepted = count_accepted(speculation.tokens, true, speculation.num_draft)
        row_starts = np.arange(0, true.size, len(self._ahead))
        return accepted, true.reshape(-1).take(row_starts + accepted)


def _judge_one(true: list[int], speculation: Speculation) -> tuple[Ints, Ints]:
    """Returns (num_accepted, bonus), both [1]; `true` holds the target's next K+1 tokens."""
    drafts, limit = speculation.tokens[0].tolist(), int(speculation.num_draft[0])
    accepted = 0
    while accepted < limit and drafts[accepted] == true[accepted]:
        accepted += 1
    return np.array([accepted], np.int32), np.array([true[accepted]], np.int32)


class GemmDraftWorker(DraftWorker):
    """Runs the draft's forwards; takes tokens and bonus candidates from the stream's tables."""

    chains = True

    def __init__(self, stepper: Forwards, stream: DraftTables, num_tokens: int = 1) -> None:
        """Makes a worker whose forward drafts `num_tokens` tokens (Medusa: all K)."""
        self.stepper, self.lookahead = stepper, stream.lookahead
        self._stream, self._num_tokens = stream, num_tokens
        self._full: dict[
            tuple[tuple[int, ...], int], Lanes
        ] = {}  # {(fan-out, batch size): the lanes of all rows}

    def twin(self, stepper: Forwards) -> GemmDraftWorker:
        """Returns a worker with the same laws that runs its forwards on `stepper`."""
        return GemmDraftWorker(stepper, self._stream, self._num_tokens)

    def prepare(self, requests: Iterable[Request]) -> None:
        """Draws the first tokens of these sequences ahead of the rounds that admit them."""
        self._stream.prepare(requests)

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._stream.begin_round(batch, admissions)

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a lane for each (s, k, t*); it grows from n + k + 1, behind its bonus token."""
        if fan_outs.is_one:
            return self._branches(speculation, fan_outs.after_hit)
        sources = sorted(set(speculation.source.tolist()))
        if len(sources) == 1:
            return self._branches(speculation, fan_outs.behind(sources[0]))
        parts = [
            self._branches(
                speculation, fan_outs.behind(source), np.flatnonzero(speculation.source == source)
            )
            for source in sources
        ]
        lanes = Lanes(
            *(
                np.concatenate([getattr(part.lanes, name) for part in parts])
                for name in ("rows", "k", "place")
            )
        )
        first = np.concatenate([part.rollout.first for part in parts])
        tokens = np.concatenate([part.rollout.tokens for part in parts])
        return Branches(lanes, Rollout(_NOBODY, first, tokens))

    def _branches(
        self, speculation: Speculation, fan_out: tuple[int, ...], rows: Index | None = None
    ) -> Branches:
        """Returns the branches of batch rows `rows` (None: all), which share one fan-out."""
        candidates, tokens = self._stream.grown(speculation, fan_out, rows)
        lanes = self._lanes(fan_out, len(candidates) if rows is None else rows)
        first = candidates.reshape(-1)
        return Branches(lanes, Rollout(_NOBODY, first, tokens.reshape(len(first), self.lookahead)))

    def _lanes(self, fan_out: tuple[int, ...], rows: int | Index) -> Lanes:
        """Returns the lanes of batch rows 0 … rows − 1 (int), or of the given rows (array)."""
        if isinstance(rows, int) and (fan_out, rows) in self._full:
            return self._full[fan_out, rows]
        chosen = np.arange(rows) if isinstance(rows, int) else rows
        k, place = lanes_of(fan_out)
        lanes = Lanes(
            np.repeat(chosen, len(k)), np.tile(k, len(chosen)), np.tile(place, len(chosen))
        )
        if isinstance(rows, int):
            self._full[fan_out, rows] = lanes
        return lanes

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        chosen = np.asarray(rows, np.int64)
        return Rollout(chosen, batch.last_tokens[chosen], self._stream.restarts(source, chosen))

    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            rollout.steps += self._num_tokens
