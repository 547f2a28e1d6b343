"""A run as the recurrence predicts it: its rounds, and their totals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Source
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import Floats
from mpissd.lab.predict.timing import Ints, Timing

Mask = NDArray[np.bool_]


_FOLD = 4096  # Rounds stored as separate arrays take twelve times the memory of one array.


class Trail:
    """Collects the fields of a Prediction, round by round."""

    def __init__(self) -> None:
        self._fresh: dict[str, list[NDArray[Any]]] = {}
        self._folded: dict[str, list[NDArray[Any]]] = {}

    def add(self, **fields: NDArray[Any]) -> None:
        """Adds one round; each field is [chains] or [chains, b]."""
        for name, value in fields.items():
            fresh = self._fresh.setdefault(name, [])
            fresh.append(value)
            if len(fresh) == _FOLD:
                self._fold(name)

    def _fold(self, name: str) -> None:
        if fresh := self._fresh.pop(name, None):
            self._folded.setdefault(name, []).append(np.array(fresh))

    def stacked(self) -> dict[str, Any]:
        """Returns all rounds of every field, [rounds, chains] or [rounds, chains, b]."""
        for name in list(self._fresh):
            self._fold(name)
        return {name: np.concatenate(folds) for name, folds in self._folded.items()}


@dataclass(frozen=True)
class Prediction:
    """The rounds of a job, [rounds, chains] (sequences: [rounds, chains, b]); times in seconds.

    counted: live, and not a forced first miss. wait_s: the lead's wait for its speculation (the
    ledger's draft wait, the exposed draft time). steps: growth steps taken when each outcome was
    seen. t_growth_s: glue, keys and K growth steps; t_draft_s: K sequential steps; each None if
    there is none.
    """

    round_s: Floats
    wait_s: Floats
    tokens: Ints
    steps: Ints
    live: Mask
    counted: Mask
    hit: Mask
    num_draft: Ints
    accepted: Ints
    bonus: Ints
    backup: Source
    t_target_s: float  # Of b(K+1) rows.
    t_draft_s: float | None
    t_growth_s: float | None

    @classmethod
    def of(cls, job: Job, timing: Timing, trail: Trail) -> Prediction:
        """Makes the prediction of a trail's rounds."""
        grows = job.fan_outs.branches > 0
        growth = timing.glue_s[-1] + timing.keys_s[-1] + job.lookahead * timing.growth_s[-1]
        drafts = job.lookahead * timing.lanes_s[-1]
        return cls(
            **trail.stacked(),
            backup=Source[job.config.backup.upper()] if job.lookahead else Source.NONE,
            t_target_s=float(timing.verify_s[-1]),
            t_draft_s=float(drafts) if job.lookahead else None,
            t_growth_s=float(growth) if grows else None,
        )

    @property
    def num_rounds(self) -> int:
        """The number of rounds of each chain."""
        return len(self.round_s)

    @property
    def tok_per_s(self) -> float:
        """Tokens over wall time, all chains together; inf if rounds take no time."""
        wall = float(self.round_s.sum())
        return float(self.tokens.sum()) / wall if wall else math.inf

    @property
    def tok_per_s_error(self) -> float:
        """Standard error of tok_per_s, from the spread of the chains; nan for one chain."""
        return self._spread / math.sqrt(self.round_s.shape[1])

    def tok_per_s_noise(self, num_rounds: int) -> float:
        """Returns the standard deviation of tok_per_s of one run with num_rounds rounds."""
        return self._spread * math.sqrt(self.num_rounds / num_rounds)

    @property
    def _spread(self) -> float:
        """Standard deviation of one chain's tok_per_s (ratio of sums, first order)."""
        tokens, wall = self.tokens.sum(axis=0), self.round_s.sum(axis=0)
        if len(wall) < 2:
            return math.nan
        return float(np.std(tokens - self.tok_per_s * wall, ddof=1) / wall.mean())

    @property
    def hit_rate(self) -> float | None:
        """The share of outcomes that were keys, without forced misses; None if no key was asked
        for."""
        asked = int(self.counted.sum())
        if self.t_growth_s is None or not asked:
            return None
        return float((self.hit & self.counted).sum() / asked)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a sequence and round, including the bonus token."""
        return float(self.accepted[self.live].mean() + 1)

    @property
    def exposed_s(self) -> float:
        """The lead's mean wait for its speculation in a round."""
        return float(self.wait_s.mean())

    @property
    def T_p(self) -> float | None:
        """Growth time over verification time [THEORY: (G − R)/t_T]."""
        if self.t_growth_s is None or not self.t_target_s:
            return None
        return self.t_growth_s / self.t_target_s

    def round_us(self) -> dict[str, float | int]:
        """Returns {mean, p50, p90, p99, n} of all chains' round durations in µs, as in a result
        row."""
        us = self.round_s.ravel() * 1e6
        p50, p90, p99 = np.percentile(us, [50, 90, 99])
        mean = float(us.mean())
        return {"mean": mean, "p50": float(p50), "p90": float(p90), "p99": float(p99), "n": us.size}

    def sequences(self, chain: int = 0) -> NDArray[np.int64]:
        """Returns one chain's rows as RoundRecords.sequences() has them, [n, 8].

        The columns are round, id, epoch, k, t*, source, hit and num_draft.
        """
        rounds, ids = np.nonzero(self.live[:, chain])
        chosen = rounds, np.full_like(ids, chain), ids
        hit = self.hit[chosen]
        source = np.where(hit, int(Source.CACHE), int(self.backup))
        columns: list[Any] = [rounds, ids, np.zeros_like(ids)]
        columns += [self.accepted[chosen], self.bonus[chosen], source, hit, self.num_draft[chosen]]
        return np.column_stack(columns).astype(np.int64)
