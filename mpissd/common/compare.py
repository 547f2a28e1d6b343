"""Is one configuration faster than another? A speedup with its 95% interval, and how it was found.

Three levels; the first that the rows allow is taken, and the result says which (How):

seeds   Both were measured under three or more common seeds. Each seed is a pair: the mean of
        log(b/a) over the seeds, Student's t. One seed means the same draws (a token, a coin and a
        rank are keyed by seed, sequence and absolute position), so the luck that both had in
        common falls out. What differs from one measurement to the next is in the interval; what
        one sweep has in common, and another does not (a host, a day), is not. Several rows of one
        seed count as the mean of their logarithms; where rows of 400 rounds share three seeds,
        shorter ones are left out.
blocks  One row each, of one seed and one acceptance law, with the rounds of both kept. Both runs
        are cut at the same token positions into at most 20 blocks of 5 or more rounds, so that
        unlike K meet over the same coins; where the outcomes are equal, that is round by round. It
        is the ratio of the summed seconds with the delta method over blocks, Student's t: a mean
        of the blocks' log ratios would answer for the mean block, not for tokens a second.
        Rounds are no sample of their own: those of H200s resemble their neighbours (.4 to .7 at
        lag 1, nothing left after 10), so whole blocks are compared. Only tokens that both runs
        emitted count; where those are less than half of the longer run's, or where one is AR
        (which draws nothing), there is nothing to pair. One measurement each: what differs from
        one to the next is not seen.
rounds, rows  Independent runs: the variances of both logarithms add up, from the rounds of both
        or from what each row says of itself (Rate.of_row). Shared luck stays in the interval,
        which is then too wide.

tests/common/test_compare_levels.py simulates each: 95% intervals hold the truth 93 to 97 times in
100. No draws are made here: the same rows give the same text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.rates import Rate, Rounds, num_blocks, rate_of, ratio_variance, student_t
from mpissd.common.rows import Row

SEVERAL = 3  # seeds that make a sample
HEADLINE_SEEDS, HEADLINE_ROUNDS = 5, 400
FEW_SEEDS = f"few seeds (a speedup is claimed from {HEADLINE_SEEDS} × {HEADLINE_ROUNDS} rounds on)"
_LEAST_SHARE = 0.5  # of the longer run's tokens, that both emitted
_LAW = "workload acceptance seed temperature vocab order divergence prompt_tokens".split()


class How(str, Enum):
    """What an interval is made of, the surest first."""

    SEEDS = "seeds"
    BLOCKS = "blocks"
    ROUNDS = "rounds"
    ROWS = "rows"


@dataclass(frozen=True)
class Comparison:
    """b's rate over a's, and the 95% interval of that.

    num_seeds: that both share; num_rounds: of the shortest run.
    """

    speedup: float
    low: float
    high: float
    how: How = How.ROWS
    num_seeds: int = 1
    num_rounds: int = 0

    @property
    def is_real(self) -> bool:
        """Whether the interval leaves 1 out."""
        return not self.low <= 1.0 <= self.high

    @property
    def is_headline(self) -> bool:
        """Whether it is of enough seeds and rounds to claim a speedup, if there is one."""
        enough = self.num_seeds >= HEADLINE_SEEDS and self.num_rounds >= HEADLINE_ROUNDS
        return self.how is How.SEEDS and enough

    def scaled(self, factor: float) -> Comparison:
        """The same times a factor without error: a share of GPUs."""
        speedup, low, high = (factor * value for value in (self.speedup, self.low, self.high))
        return replace(self, speedup=speedup, low=low, high=high)

    def __str__(self) -> str:
        """The speedup, or "no difference", and the interval."""
        digits = 2 if self.high - self.low > 0.02 else 3
        interval = f"95% interval {self.low:.{digits}f} to {self.high:.{digits}f}"
        if not self.is_real:
            return f"no difference ({interval})"
        return f"{self.speedup:.{digits}f}× ({interval})"

    @property
    def brief(self) -> str:
        """For a table: the speedup or "no difference", the interval, and + where it is a claim."""
        told = f"{self.speedup:.2f}" if self.is_real else "no difference"
        mark = "+" * (self.is_headline and self.is_real)
        return f"{told} ({self.low:.2f}–{self.high:.2f}){mark}"

    @property
    def claim(self) -> str:
        """What a sentence may say: a speedup from enough seeds alone, else the interval."""
        return claim_of(self.speedup, self.low, self.high, self.is_headline)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the speedup is null where the interval holds 1."""
        verdict = "faster" if self.speedup > 1 else "slower"
        return {
            "verdict": verdict if self.is_real else "no difference",
            "speedup": self.speedup if self.is_real else None,
            "low": self.low,
            "high": self.high,
            "how": self.how.value,
            "seeds": self.num_seeds,
            "headline": self.is_headline,
        }


def claim_of(speedup: float, low: float, high: float, is_headline: bool) -> str:
    """What a sentence may say of a speedup and its interval."""
    interval = f"{low:.2f}–{high:.2f}"
    if low <= 1 <= high:
        return f"no difference ({interval})"
    return f"{speedup:.2f}× ({interval})" if is_headline else f"{interval} (few seeds)"


def compare_rows(
    a: Sequence[Row], b: Sequence[Row], rounds: Mapping[str, Rounds] | None = None
) -> Comparison:
    """Rows of b's configuration against those of a's, as surely as they allow.

    rounds: by run_id, where they were kept. ConfigError: no row, or where runs are independent one
    with fewer than 20 rounds or that lacks what `run` writes.
    """
    kept = rounds or {}
    for sides in ([_long(side) for side in (a, b)], [a, b]):
        ratios = _log_ratios(*sides)
        if len(ratios) >= SEVERAL:
            found = _of_pairs(ratios)
            break
    else:
        found = _of_blocks(a, b, kept) or _of_independent(a, b, kept)
    fewest = min(_num_rounds(row) for side in sides for row in side)
    return replace(found, num_seeds=len(ratios), num_rounds=fewest)


def compare_rates(a: Rate, b: Rate) -> Comparison:
    """b against a as independent runs: the logarithms of both, by Student's t."""
    how = How.ROUNDS if a.from_rounds and b.from_rounds else How.ROWS
    freedom = min(a.freedom, b.freedom)
    return _interval(math.log(b.value / a.value), a.variance + b.variance, freedom, how)


def compare_blocks(a: Rounds, b: Rounds) -> Comparison | None:
    """b against a over the tokens that both emitted; None where those are too few."""
    ends = a.tokens.sum(), b.tokens.sum()
    edge = min(ends)
    fewest = min(int(np.searchsorted(np.cumsum(run.tokens), edge)) + 1 for run in (a, b))
    blocks = num_blocks(fewest)
    if blocks < 4 or edge < _LEAST_SHARE * max(ends):
        return None
    edges = np.linspace(0, edge, blocks + 1)
    a_s, b_s = (np.diff(_seconds_at(run, edges)) for run in (a, b))
    middle = math.log(a_s.sum() / b_s.sum())
    return _interval(middle, ratio_variance(a_s, b_s), blocks - 1, How.BLOCKS)


def _num_rounds(row: Row) -> int:
    return int(row.get("num_rounds") or 0)


def _long(rows: Sequence[Row]) -> list[Row]:
    """Those of as many rounds as a headline needs: short ones beside them only blur the mean."""
    return [row for row in rows if _num_rounds(row) >= HEADLINE_ROUNDS]


def _log_ratios(a: Sequence[Row], b: Sequence[Row]) -> NDArray[np.float64]:
    """log(b/a) of every seed that both have."""
    logs = _by_seed(a), _by_seed(b)
    shared = sorted(logs[0].keys() & logs[1].keys())
    return np.array([logs[1][seed] - logs[0][seed] for seed in shared])


def _by_seed(rows: Sequence[Row]) -> dict[int, float]:
    """{seed: mean log tok/s}; without rows that do not say both."""
    logs: dict[int, list[float]] = {}
    for row in rows:
        seed, rate = row.get("seed"), row.get("tok_per_s")
        if seed is not None and rate and 0 < rate < math.inf:
            logs.setdefault(int(seed), []).append(math.log(rate))
    return {seed: sum(of) / len(of) for seed, of in logs.items()}


def _of_pairs(differences: NDArray[np.float64]) -> Comparison:
    count = len(differences)
    variance = float(differences.var(ddof=1)) / count
    return _interval(float(differences.mean()), variance, count - 1, How.SEEDS)


def _of_blocks(
    a: Sequence[Row], b: Sequence[Row], rounds: Mapping[str, Rounds]
) -> Comparison | None:
    """None unless there is one row each, of the same draws, and the rounds of both."""
    if len(a) != 1 or len(b) != 1 or not shares_draws(a[0], b[0]):
        return None
    runs = [rounds.get(str(row.get("run_id"))) for row in (a[0], b[0])]
    return None if runs[0] is None or runs[1] is None else compare_blocks(runs[0], runs[1])


def shares_draws(a: Row, b: Row) -> bool:
    """Whether both runs draft, and draw by the same seed from the same laws."""
    drafts = "ar" not in (a.get("mode"), b.get("mode")) and a.get("acceptance") is not None
    return drafts and all(a.get(key) == b.get(key) for key in _LAW)


def _of_independent(a: Sequence[Row], b: Sequence[Row], rounds: Mapping[str, Rounds]) -> Comparison:
    if not a or not b:
        raise ConfigError("compare: no row on one side: allowed: rows of both")
    rates = [
        Rate.of_repeats([rate_of(row, rounds.get(str(row.get("run_id")))) for row in side])
        for side in (a, b)
    ]
    return compare_rates(rates[0], rates[1])


def _seconds_at(run: Rounds, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds until so many tokens were emitted; a round's tokens come evenly in it."""
    tokens, seconds = (np.concatenate([[0.0], np.cumsum(of)]) for of in (run.tokens, run.seconds))
    return np.asarray(np.interp(edges, tokens, seconds), np.float64)


def _interval(middle: float, variance: float, freedom: int, how: How) -> Comparison:
    half = student_t(freedom) * math.sqrt(variance)
    return Comparison(math.exp(middle), math.exp(middle - half), math.exp(middle + half), how)
