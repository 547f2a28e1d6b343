"""Compares two configurations: a speedup with its 95% interval, and the level of its evidence.

Rows are compared within one *visit*: the same commit on the same GPUs, begun within half a day.
Machines drift from visit to visit, by 1.3 to 3.6% in our rows, which no interval contains; DRIFT
bounds it. Rows that share no visit are compared too, but the result is labelled "few visits" and
claims nothing.

The first level that the rows allow is used (How); docs/definitions.md describes them all. In level
"seeds" several pairs of one seed count once, by the mean of their logarithms; if rows of 400 rounds
share three seeds, shorter rows are left out. Level "blocks" cuts both runs at the same token
positions, so that runs of one seed with different K are compared on the same coins. Single rounds
are no independent sample: on H200s they correlate with their neighbours (.4 to .7 at lag 1, none
after 10). Level "rows" does not remove shared luck, so its intervals are too wide.

tests/common/test_compare_levels.py simulates each level: 95% intervals cover the truth 93 to 97
times in 100. The comparison draws no random numbers: the same rows give the same text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.row import Row

NUM_BLOCKS = 20  # the most blocks into which a run is cut
_PER_BLOCK = 5  # the fewest rounds in a block
FEWEST_ROUNDS = 4 * _PER_BLOCK
NORMAL_Z = 1.959964  # The 97.5% quantile of a standard normal.
# Percentiles, and their standard normal quantiles.
_SPREADS = (("p90", 1.281552), ("p99", 2.326348))
_T = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582}

SEVERAL = 3  # The number of seeds from which level "seeds" applies.
HEADLINE_SEEDS, HEADLINE_ROUNDS = 5, 400
FEW_SEEDS = f"few seeds (a speedup is claimed from {HEADLINE_SEEDS} × {HEADLINE_ROUNDS} rounds on)"
FEW_VISITS = "few visits: the two sides share no machine and commit"
DRIFT = 0.04  # The most by which one use's medians differ between visits.
_VISIT_S = 12 * 3600  # Two runs of one visit begin within so many seconds.
_LEAST_SHARE = 0.5  # Both runs must have emitted at least this share of the longer run's tokens.


@dataclass(frozen=True)
class Rounds:
    """The measured rounds of a run, [n]: their seconds, and the tokens of all sequences in each."""

    seconds: NDArray[np.float64]
    tokens: NDArray[np.float64]

    @classmethod
    def read(cls, path: Path, row: Row) -> Rounds:
        """Reads rounds/RUN_ID.npz.

        Raises ConfigError if its arrays are missing, or if their number of rounds differs from the
        row's.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                seconds = np.asarray(arrays["round_s"], np.float64)
                sequences = np.asarray(arrays["sequences"], np.int64)
                tokens = _tokens(sequences, len(seconds), row.token_limit)
        except (OSError, ValueError, KeyError, IndexError, EOFError, BadZipFile) as error:
            raise ConfigError(f"{path}: no rounds of a run: {error}") from error
        if len(seconds) != row.num_rounds:
            counts = f"{len(seconds)} rounds, the row has {row.get('num_rounds')}"
            raise ConfigError(f"{path}: {counts}")
        return cls(seconds, tokens)


def _tokens(
    sequences: NDArray[np.int64], num_rounds: int, limit: int | None
) -> NDArray[np.float64]:
    """Returns the tokens of each round; tokens that a sequence emits beyond `limit` do not
    count."""
    made = np.zeros(num_rounds)
    for request_id in np.unique(sequences[:, 1]):
        own = sequences[sequences[:, 1] == request_id]
        total = np.cumsum(own[:, 3] + 1)
        counted = total if limit is None else np.minimum(total, limit)
        np.add.at(made, own[:, 0], np.diff(counted, prepend=0))
    return made


@dataclass(frozen=True)
class Rate:
    """Tokens a second, the variance of its logarithm, and that variance's degrees of freedom."""

    value: float
    variance: float
    freedom: int

    @classmethod
    def of_row(cls, row: Row) -> Rate:
        """Estimates a rate from a result row, adding the variances of its draws and its rounds.

        Draws: sampling_sd, which the predictor computes from the job's token models, or the
        standard error of accept_histogram's mean. Rounds: (p90 − p50)/1.28 or (p99 − p50)/2.33,
        whichever is larger, over √n; correlation between neighbouring rounds is not included.
        Raises ConfigError if a row lacks these, or has fewer than 20 rounds.
        """
        try:
            count, rate = int(row.num_rounds), float(row.tok_per_s)
            times, luck = row.round_us, row.sampling_sd
            spread = max(0.0, *((times[name] - times["p50"]) / z for name, z in _SPREADS))
            mean = float(times["mean"])
            clock = spread / (mean * math.sqrt(count)) if mean > 0 else 0.0
            if luck is None or math.isnan(luck):  # In a table NaN means null.
                counts = np.asarray(row.accept_histogram, np.float64)
                lengths, total = np.arange(len(counts)) + 1.0, float(counts.sum())
                if not total > 0:
                    raise ValueError("accept_histogram is empty")
                length = float(lengths @ counts) / total
                variance = float((lengths - length) ** 2 @ counts) / total
                luck = math.sqrt(variance / total) / length
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"row {row.get('run_id')!r}: no interval: {error!r}") from error
        if count < FEWEST_ROUNDS or not 0 < rate < math.inf:
            values = f"row {row.get('run_id')!r}: {count} rounds, {rate:g} tok/s"
            raise ConfigError(f"{values}: allowed: {FEWEST_ROUNDS} or more, above 0")
        return cls(rate, luck**2 + clock**2, count - 1)

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> Rate:
        """Returns the median of the rows' rates with their largest variance.

        It is not divided by the number of rows, because equal seeds are not independent. Raises
        ConfigError as of_row does.
        """
        rates = [cls.of_row(row) for row in rows]
        return cls(
            value=statistics.median(rate.value for rate in rates),
            variance=max(rate.variance for rate in rates),
            freedom=min(rate.freedom for rate in rates),
        )


def num_blocks(num_rounds: int) -> int:
    """Returns the number of blocks into which a run with this number of rounds is cut."""
    return min(NUM_BLOCKS, num_rounds // _PER_BLOCK)


def ratio_variance(above: NDArray[np.float64], below: NDArray[np.float64]) -> float:
    """Returns the variance of log(Σ above / Σ below) over blocks [n], by the delta method."""
    left = above / above.mean() - below / below.mean()
    return float(left @ left) / (len(left) * (len(left) - 1))


def student_t(freedom: int) -> float:
    """Returns the 97.5% quantile of Student's t.

    Up to 5 degrees of freedom it is read from a table; above, Cornish and Fisher's expansion is
    at most .055% low.
    """
    if freedom in _T:
        return _T[freedom]
    z, v = NORMAL_Z, float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def jackknife(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the half-width of a number's 95% interval, by its values without each of G groups.

    values: [G, …], G at least 2. Delete-a-group jackknife with Student's t of G − 1.
    """
    groups = len(values)
    spread = np.sqrt((groups - 1) / groups * ((values - values.mean(axis=0)) ** 2).sum(axis=0))
    return np.asarray(student_t(groups - 1) * spread)


def student_p(t: float, freedom: int) -> float:
    """Returns Student's P(|T| >= |t|), the two-sided p-value (Abramowitz, Stegun, 26.7.3-4)."""
    angle = math.atan2(abs(t), math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, inside = (cosine if odd else 1.0), 0.0
    for n in range(1 + odd, freedom, 2):
        inside += term
        term *= cosine**2 * n / (n + 1)
    inside *= sine
    return max(0.0, 1.0 - (2 / math.pi * (angle + inside) if odd else inside))


class How(str, Enum):
    """The level of an interval's evidence, best first."""

    SEEDS = "seeds"
    BLOCKS = "blocks"
    ROWS = "rows"


@dataclass(frozen=True)
class Comparison:
    """The rate of b over the rate of a, with its 95% interval.

    num_seeds: seeds that both share; num_rounds: rounds of the shortest run. one_visit: whether the
    rows that were compared share a visit. p_value: two-sided, of a ratio of 1.
    """

    speedup: float
    low: float
    high: float
    how: How = How.ROWS
    num_seeds: int = 1
    num_rounds: int = 0
    one_visit: bool = True
    p_value: float = 1.0

    @property
    def is_real(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1.0 <= self.high

    @property
    def is_headline(self) -> bool:
        """Whether one visit has enough seeds and rounds to claim a speedup."""
        enough = self.num_seeds >= HEADLINE_SEEDS and self.num_rounds >= HEADLINE_ROUNDS
        return self.how is How.SEEDS and enough and self.one_visit

    def scaled(self, factor: float) -> Comparison:
        """Returns the comparison times an exact factor, such as a ratio of GPUs."""
        speedup, low, high = (factor * value for value in (self.speedup, self.low, self.high))
        return replace(self, speedup=speedup, low=low, high=high)

    def __str__(self) -> str:
        """Returns the speedup, or "no difference", with the interval."""
        digits = 2 if self.high - self.low > 0.02 else 3
        interval = f"95% interval {bound(self.low, digits)} to {bound(self.high, digits)}"
        if not self.is_real:
            return f"no difference ({interval})"
        return f"{self.speedup:.{digits}f}× ({interval})"

    @property
    def brief(self) -> str:
        """The text for a table: the speedup or "no difference", the interval, and + for a claim."""
        gain = f"{self.speedup:.2f}" if self.is_real else "no difference"
        mark = "+" * (self.is_headline and self.is_real)
        return f"{gain} ({self.interval}){mark}"

    @property
    def interval(self) -> str:
        """The two bounds as text."""
        return f"{bound(self.low)}–{bound(self.high)}"

    @property
    def claim(self) -> str:
        """The text for a sentence: the speedup if there are enough seeds, or only the interval."""
        if not self.one_visit:
            return f"{self.interval} (few visits)"
        if not self.is_real:
            return f"no difference ({self.interval})"
        gain = f"{self.speedup:.2f}× ({self.interval})"
        return gain if self.is_headline else f"{self.interval} (few seeds)"


def bound(value: float, digits: int = 2) -> str:
    """Returns a bound as text with 2 decimals, or up to 6 where fewer would round it to 1."""
    shown = (f"{value:.{more}f}" for more in range(digits, 7))
    return next((text for text in shown if value == 1 or float(text) != 1), f"{value:.{digits}f}")


def compare_rows(
    a: Sequence[Row], b: Sequence[Row], rounds: Mapping[str, Rounds] | None = None
) -> Comparison:
    """Compares rows of b's configuration with rows of a's at the best level that they allow.

    rounds: by run_id, for the runs whose rounds were kept. Raises ConfigError without rows on a
    side, and for independent runs with fewer than 20 rounds or a row that lacks a key that `run`
    writes.
    """
    kept = rounds or {}
    near = [
        [row for row in own if any(same_visit(row, other) for other in others)]
        for own, others in ((a, b), (b, a))
    ]
    one_visit = all(near)
    if one_visit:
        a, b = near
    # Where rows with enough rounds for a headline share three seeds, shorter ones only add noise.
    long = [[row for row in of if (row.num_rounds or 0) >= HEADLINE_ROUNDS] for of in (a, b)]
    for sides in (long, [a, b]):
        logs: dict[int, list[float]] = {}  # log(b/a) for every seed that both have
        rated = [
            [row for row in of if row.seed is not None and 0 < (row.tok_per_s or 0) < math.inf]
            for of in sides
        ]
        for x in rated[0]:
            for y in rated[1]:
                if x.seed == y.seed and (not one_visit or same_visit(x, y)):
                    logs.setdefault(int(x.seed), []).append(math.log(y.tok_per_s / x.tok_per_s))
        ratios = np.array([sum(logs[seed]) / len(logs[seed]) for seed in sorted(logs)])
        if len(ratios) >= SEVERAL:
            variance = float(ratios.var(ddof=1)) / len(ratios)
            comparison = _interval(float(ratios.mean()), variance, len(ratios) - 1, How.SEEDS)
            break
    else:
        if not a or not b:
            raise ConfigError("compare: no row on one side: allowed: rows of both")
        runs = [kept.get(str(of[0].run_id)) if len(of) == 1 else None for of in (a, b)]
        result = None
        if runs[0] is not None and runs[1] is not None:
            result = compare_blocks(runs[0], runs[1])
        comparison = result or compare_rates(*(Rate.of_rows(of) for of in (a, b)))
    fewest = min(int(row.num_rounds or 0) for of in sides for row in of)
    return replace(comparison, num_seeds=len(ratios), num_rounds=fewest, one_visit=one_visit)


def same_visit(a: Row, b: Row) -> bool:
    """Returns whether two rows are of one visit: one commit, a GPU in common, begun within 12 h.

    Rows whose ranks name no GPU (CPUs, emulated devices) need a host in common.
    """
    if a.provenance is b.provenance:
        return True
    (commit, devices, began), (other_commit, other_devices, other_began) = _origin(a), _origin(b)
    if commit != other_commit or bool(devices) != bool(other_devices):
        return False
    near = began is None or other_began is None or abs(began - other_began) <= _VISIT_S
    return near and (not devices or bool(devices & other_devices))


def _origin(row: Row) -> tuple[object, frozenset[str], float | None]:
    """Returns a row's commit, its GPUs (or its hosts), and when it began, in seconds."""
    origin = row.provenance or {}
    ranks = origin.get("ranks") or []
    devices = {str(rank["uuid"]) for rank in ranks if rank.get("uuid")}
    devices = devices or {str(host) for host in origin.get("hosts") or []}
    began = origin.get("started_at")
    seconds = datetime.fromisoformat(str(began)).timestamp() if began else None
    return origin.get("commit"), frozenset(devices), seconds


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns the p-values after Holm's correction for testing all of them, in the same order."""
    values, count = np.array(p_values), len(p_values)
    order = np.argsort(values, kind="stable")
    values[order] = np.maximum.accumulate((count - np.arange(count)) * values[order])
    return [min(1.0, float(value)) for value in values]


def compare_rates(a: Rate, b: Rate) -> Comparison:
    """Compares b with a as independent runs: adds the variances of both logarithms, with Student's
    t."""
    freedom = min(a.freedom, b.freedom)
    return _interval(math.log(b.value / a.value), a.variance + b.variance, freedom, How.ROWS)


def compare_blocks(a: Rounds, b: Rounds) -> Comparison | None:
    """Compares b with a over the tokens that both emitted; returns None if those are too few."""
    ends = a.tokens.sum(), b.tokens.sum()
    edge = min(ends)
    fewest = min(int(np.searchsorted(np.cumsum(run.tokens), edge)) + 1 for run in (a, b))
    blocks = num_blocks(fewest)
    if blocks < 4 or edge < _LEAST_SHARE * max(ends):
        return None
    edges, spent = np.linspace(0, edge, blocks + 1), []
    for run in (a, b):  # seconds until so many tokens; a round's tokens are spread evenly
        tokens, took = (np.append(0.0, np.cumsum(of)) for of in (run.tokens, run.seconds))
        spent.append(np.diff(np.interp(edges, tokens, took)))
    a_s, b_s = spent
    middle = math.log(a_s.sum() / b_s.sum())
    return _interval(middle, ratio_variance(a_s, b_s), blocks - 1, How.BLOCKS)


def _interval(middle: float, variance: float, freedom: int, how: How) -> Comparison:
    error = math.sqrt(variance)
    half = student_t(freedom) * error
    p_value = student_p(middle / error, freedom) if error > 0 else float(middle == 0)
    low, high = math.exp(middle - half), math.exp(middle + half)
    return Comparison(math.exp(middle), low, high, how, p_value=p_value)
