"""Compares two configurations: a speedup with its 95% interval, and the level of its evidence.

Rows are compared within one *visit*: the same commit on the same GPUs, begun within half a day.
Machines drift from visit to visit, by 1.3 to 3.6% in our rows, which no interval contains; DRIFT
bounds this. Rows that share no visit are compared too, but the result is labelled "few visits" and
claims nothing.

Rows are paired by their seeds, which fix the draws. Several pairs of one seed count once, by the
mean of their logarithms; if rows of 400 rounds share three seeds, shorter rows are left out.
Fewer than three common seeds give a ratio without an interval. docs/definitions.md has the rules.

tests/lab/test_compare.py simulates pairs: 95% intervals cover the truth 93 to 97 times in 100. The
comparison draws no random numbers: the same rows give the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.row import Row

NORMAL_Z = 1.959964  # the 97.5% quantile of a standard normal
_T = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582}

SEVERAL = 3  # the number of common seeds from which there is an interval
HEADLINE_SEEDS, HEADLINE_ROUNDS = 5, 400
FEW_SEEDS = f"few seeds (a speedup is claimed from {HEADLINE_SEEDS} × {HEADLINE_ROUNDS} rounds on)"
FEW_VISITS = "few visits: the two sides share no machine and commit"
DRIFT = 0.04  # the most by which one use's medians differ between visits
_VISIT_S = 12 * 3600  # two runs of one visit begin within so many seconds


def student_t(freedom: int) -> float:
    """Returns the 97.5% quantile of Student's t for the degrees of freedom.

    Up to 5 it is read from a table; above, Cornish and Fisher's expansion is at most .055% low.
    """
    if freedom in _T:
        return _T[freedom]
    z = NORMAL_Z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / float(freedom) ** 2 + third / float(freedom) ** 3


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
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    inside = 0.0
    for n in range(1 + odd, freedom, 2):
        inside += term
        term *= math.cos(angle) ** 2 * n / (n + 1)
    inside *= math.sin(angle)
    return max(0.0, 1.0 - (2 / math.pi * (angle + inside) if odd else inside))


@dataclass(frozen=True)
class Comparison:
    """The rate of b over the rate of a, with its 95% interval (NaN: not known).

    num_seeds: seeds that both share; num_rounds: rounds of the shortest run. one_visit: whether the
    rows that were compared share a visit. p_value: two-sided, of a ratio of 1.
    """

    speedup: float
    low: float = math.nan
    high: float = math.nan
    num_seeds: int = 1
    num_rounds: int = 0
    one_visit: bool = True
    p_value: float = 1.0

    @property
    def has_interval(self) -> bool:
        """Whether enough seeds were compared for an interval."""
        return self.num_seeds >= SEVERAL

    @property
    def is_real(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low > 1.0 or self.high < 1.0

    @property
    def is_headline(self) -> bool:
        """Whether one visit has enough seeds and rounds to claim a speedup."""
        enough = self.num_seeds >= HEADLINE_SEEDS and self.num_rounds >= HEADLINE_ROUNDS
        return enough and self.one_visit

    def scaled(self, factor: float) -> Comparison:
        """Returns the comparison times an exact factor, such as a ratio of GPUs."""
        speedup, low, high = (factor * value for value in (self.speedup, self.low, self.high))
        return replace(self, speedup=speedup, low=low, high=high)

    def __str__(self) -> str:
        """Returns the speedup, or "no difference", with the interval."""
        if not self.has_interval:
            return f"{self.speedup:.2f}× ({self.interval})"
        digits = 2 if self.high - self.low > 0.02 else 3
        interval = f"95% interval {bound(self.low, digits)} to {bound(self.high, digits)}"
        gain = f"{self.speedup:.{digits}f}×" if self.is_real else "no difference"
        return f"{gain} ({interval})"

    @property
    def brief(self) -> str:
        """The text for a table: the speedup or "no difference", the interval, and + for a claim."""
        gain = f"{self.speedup:.2f}" if self.is_real or not self.has_interval else "no difference"
        mark = "+" * (self.is_headline and self.is_real)
        return f"{gain} ({self.interval}){mark}"

    @property
    def interval(self) -> str:
        """The two bounds as text."""
        if not self.has_interval:
            return f"no interval: {self.num_seeds} seed{'s' * (self.num_seeds > 1)}"
        return f"{bound(self.low)}–{bound(self.high)}"

    @property
    def claim(self) -> str:
        """The text for a sentence: the speedup if there are enough seeds, or only the interval."""
        if not self.one_visit:
            return f"{self.interval} (few visits)"
        if not self.is_real:
            return f"no difference ({self.interval})" if self.has_interval else self.interval
        gain = f"{self.speedup:.2f}× ({self.interval})"
        return gain if self.is_headline else f"{self.interval} (few seeds)"


def bound(value: float, digits: int = 2) -> str:
    """Returns a bound as text with 2 decimals, or up to 6 where fewer would round it to 1."""
    texts = (f"{value:.{count}f}" for count in range(digits, 7))
    return next((text for text in texts if value == 1 or float(text) != 1), f"{value:.{digits}f}")


def compare_rows(a: Sequence[Row], b: Sequence[Row]) -> Comparison:
    """Compares rows of b's configuration with rows of a's, paired by seed.

    Raises ConfigError if no two rows with a rate have a common seed.
    """
    near_a = [row for row in a if any(same_visit(row, other) for other in b)]
    near_b = [row for row in b if any(same_visit(row, other) for other in a)]
    one_visit = bool(near_a and near_b)
    if one_visit:
        a, b = near_a, near_b
    # Where rows with enough rounds for a headline share three seeds, shorter ones only add noise.
    long_a, long_b = ([x for x in y if (x.num_rounds or 0) >= HEADLINE_ROUNDS] for y in (a, b))
    logs = _log_ratios(long_a, long_b, one_visit)
    if len(logs) >= SEVERAL:
        a, b = long_a, long_b
    else:
        logs = _log_ratios(a, b, one_visit)
    if not logs:
        raise ConfigError("compare: no seed in common: allowed: rows of both under one seed")
    num_rounds = min(int(row.num_rounds or 0) for row in (*a, *b))
    ratios = np.array([sum(logs[seed]) / len(logs[seed]) for seed in sorted(logs)])
    count = len(ratios)
    middle = float(ratios.mean())
    comparison = Comparison(
        math.exp(middle), num_seeds=count, num_rounds=num_rounds, one_visit=one_visit
    )
    if not comparison.has_interval:
        return comparison
    error = math.sqrt(float(ratios.var(ddof=1)) / count)
    half = student_t(count - 1) * error
    p_value = student_p(middle / error, count - 1) if error > 0 else float(middle == 0)
    low, high = math.exp(middle - half), math.exp(middle + half)
    return replace(comparison, low=low, high=high, p_value=p_value)


def gain_of(b: Sequence[Row], a: Sequence[Row]) -> Comparison | None:
    """Compares rows of b's configuration with rows of a's; None if they share no seed."""
    try:
        return compare_rows(a, b)
    except ConfigError:
        return None


def claim_or_ratio(b: Sequence[Row], a: Sequence[Row]) -> Comparison:
    """Returns the gain of b over a if it may be claimed, else the ratio of their medians alone."""
    gain = gain_of(b, a)
    if gain is not None and gain.is_headline:
        return gain
    rates = [median(float(row.tok_per_s) for row in rows) for rows in (b, a)]
    return Comparison(rates[0] / rates[1])


def _log_ratios(a: Sequence[Row], b: Sequence[Row], one_visit: bool) -> dict[int, list[float]]:
    """Returns log(b/a) of the pairs of rows with a rate, by their common seed."""
    logs: dict[int, list[float]] = {}
    rated_a, rated_b = (
        [x for x in rows if x.seed is not None and 0 < (x.tok_per_s or 0) < math.inf]
        for rows in (a, b)
    )
    for x in rated_a:
        for y in rated_b:
            if x.seed == y.seed and (not one_visit or same_visit(x, y)):
                logs.setdefault(int(x.seed), []).append(math.log(y.tok_per_s / x.tok_per_s))
    return logs


def same_visit(a: Row, b: Row) -> bool:
    """Returns whether two rows are of one visit: one commit, a GPU in common, begun within 12 h.

    Rows whose ranks name no GPU (CPUs, emulated devices) need a host in common.
    """
    if a.provenance is b.provenance:
        return True
    (commit, devices, start), (other_commit, other_devices, other_start) = _origin(a), _origin(b)
    if commit != other_commit or bool(devices) != bool(other_devices):
        return False
    near = start is None or other_start is None or abs(start - other_start) <= _VISIT_S
    return near and (not devices or bool(devices & other_devices))


def _origin(row: Row) -> tuple[object, frozenset[str], float | None]:
    """Returns a row's commit, its GPUs (or its hosts), and when it began, in seconds."""
    origin = row.provenance or {}
    devices = {str(rank["uuid"]) for rank in origin.get("ranks") or () if rank.get("uuid")}
    devices = devices or {str(host) for host in origin.get("hosts") or ()}
    start = origin.get("started_at")
    seconds = datetime.fromisoformat(str(start)).timestamp() if start else None
    return origin.get("commit"), frozenset(devices), seconds


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns the p-values after Holm's correction for testing all of them, in the same order."""
    values = np.array(p_values)
    count = len(values)
    order = np.argsort(values, kind="stable")
    values[order] = np.maximum.accumulate((count - np.arange(count)) * values[order])
    return [min(1.0, float(value)) for value in values]
