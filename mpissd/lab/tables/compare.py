"""Compares two configurations: a speedup with its 95% interval, and whether it may be claimed.

A *visit* is a stay on one machine: rows of one commit on the same GPUs, begun within 12 hours. A
machine's speed drifts from visit to visit (by 1.3 to 3.6% in our rows; DRIFT is the bound), which
the interval does not include. docs/definitions.md has the rules; in tests/lab/test_compare.py, 93
to 97% of the intervals contain the true ratio.

Rows are paired by their seeds. Several pairs of one seed count as one, by the mean of the
logarithms of their ratios. If rows of at least 400 rounds share three seeds, shorter rows are left
out.
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

NORMAL_Z = 1.959964  # the 97.5% quantile of the standard normal distribution
_T = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582}

SEVERAL = 3  # number of common seeds from which a speedup has an interval
HEADLINE_SEEDS, HEADLINE_ROUNDS = 5, 400
FEW_SEEDS = f"few seeds (a speedup is claimed from {HEADLINE_SEEDS} × {HEADLINE_ROUNDS} rounds on)"
FEW_VISITS = "few visits: the two sides share no machine and commit"
DRIFT = 0.04  # share by which a configuration's median rate may differ between days or machines
_VISIT_S = 12 * 3600  # Runs that begin within this time (s) on one machine are compared directly.


def student_t(freedom: int) -> float:
    """Returns the 97.5% quantile of Student's t with `freedom` degrees of freedom. Values up to 5
    are tabulated; above, the Cornish-Fisher expansion is at most .055% too low."""
    if freedom in _T:
        return _T[freedom]
    z = NORMAL_Z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / float(freedom) ** 2 + third / float(freedom) ** 3


def jackknife(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the half-widths of estimates' 95% intervals by the delete-a-group jackknife, in the
    shape of one estimate. values: [G, …] with G ≥ 2; element g has the estimates computed without
    group g of the data. Student's t has G − 1 degrees of freedom."""
    groups = len(values)
    spread = np.sqrt((groups - 1) / groups * ((values - values.mean(axis=0)) ** 2).sum(axis=0))
    return np.asarray(student_t(groups - 1) * spread)


def student_p(t: float, freedom: int) -> float:
    """Returns the two-sided p-value P(|T| >= |t|) of Student's t with `freedom` degrees of freedom
    (Abramowitz and Stegun, 26.7.3-4)."""
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
    """The speedup of configuration b over configuration a (ratio of tokens/s) with its 95%
    interval. low, high: ends of the interval (NaN: unknown). num_seeds: number of seeds in common.
    num_rounds: rounds of the shortest run. one_visit: whether the rows have the same commit and GPU
    and began within 12 hours. p_value: two-sided, of the hypothesis that the ratio is 1."""

    speedup: float
    low: float = math.nan
    high: float = math.nan
    num_seeds: int = 1
    num_rounds: int = 0
    one_visit: bool = True
    p_value: float = 1.0

    @property
    def has_interval(self) -> bool:
        """Whether the two configurations share enough seeds (3) for an interval of the speedup."""
        return self.num_seeds >= SEVERAL

    @property
    def is_real(self) -> bool:
        """Whether the speedup's interval excludes 1, so that the configurations surely differ."""
        return self.low > 1.0 or self.high < 1.0

    @property
    def is_headline(self) -> bool:
        """Whether a speedup may be claimed. That takes all of these: at least 5 common seeds; at
        least 400 rounds in each run; rows of one commit and GPU, begun within 12 hours."""
        enough = self.num_seeds >= HEADLINE_SEEDS and self.num_rounds >= HEADLINE_ROUNDS
        return enough and self.one_visit

    def scaled(self, factor: float) -> Comparison:
        """Returns the comparison with the speedup and its interval multiplied by `factor`, which
        has no error of its own: for example a ratio of GPU counts."""
        speedup, low, high = (factor * value for value in (self.speedup, self.low, self.high))
        return replace(self, speedup=speedup, low=low, high=high)

    def __str__(self) -> str:
        """Returns the speedup (or "no difference") and its interval as text."""
        if not self.has_interval:
            return f"{self.speedup:.2f}× ({self.interval})"
        digits = 2 if self.high - self.low > 0.02 else 3
        interval = f"95% interval {bound(self.low, digits)} to {bound(self.high, digits)}"
        gain = f"{self.speedup:.{digits}f}×" if self.is_real else "no difference"
        return f"{gain} ({interval})"

    @property
    def brief(self) -> str:
        """Text for a table's cell: the speedup, its interval, and a "+" if it may be claimed."""
        gain = f"{self.speedup:.2f}" if self.is_real or not self.has_interval else "no difference"
        mark = "+" * (self.is_headline and self.is_real)
        return f"{gain} ({self.interval}){mark}"

    @property
    def interval(self) -> str:
        """The two ends of the interval as text, or the number of seeds if there is no interval."""
        if not self.has_interval:
            return f"no interval: {self.num_seeds} seed{'s' * (self.num_seeds > 1)}"
        return f"{bound(self.low)}–{bound(self.high)}"

    @property
    def claim(self) -> str:
        """Text for use in a sentence: the speedup if it may be claimed, else only its interval."""
        if not self.one_visit:
            return f"{self.interval} (few visits)"
        if not self.is_real:
            return f"no difference ({self.interval})" if self.has_interval else self.interval
        gain = f"{self.speedup:.2f}× ({self.interval})"
        return gain if self.is_headline else f"{self.interval} (few seeds)"


def bound(value: float, digits: int = 2) -> str:
    """Returns an end of an interval as text with `digits` decimals. If that would round the number
    to exactly 1, up to 6 decimals are shown."""
    texts = (f"{value:.{count}f}" for count in range(digits, 7))
    return next((text for text in texts if value == 1 or float(text) != 1), f"{value:.{digits}f}")


def compare_rows(a: Sequence[Row], b: Sequence[Row]) -> Comparison:
    """Returns the speedup of configuration b over configuration a, from result rows of each, paired
    by seed. Rows without tok_per_s are ignored. Raises ConfigError if the two share no seed."""
    near_a = [row for row in a if any(same_visit(row, other) for other in b)]
    near_b = [row for row in b if any(same_visit(row, other) for other in a)]
    one_visit = bool(near_a and near_b)
    if one_visit:
        a, b = near_a, near_b
    # If rows of at least 400 rounds share three seeds, shorter rows would only add noise.
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
    """Returns the speedup of configuration b's rows over those of a; None if they share no seed."""
    try:
        return compare_rows(a, b)
    except ConfigError:
        return None


def claim_or_ratio(b: Sequence[Row], a: Sequence[Row]) -> Comparison:
    """Returns the speedup of configuration b over a if it may be claimed; otherwise the ratio of
    the median tokens/s of their rows, without an interval."""
    gain = gain_of(b, a)
    if gain is not None and gain.is_headline:
        return gain
    rates = [median(float(row.tok_per_s) for row in rows) for rows in (b, a)]
    return Comparison(rates[0] / rates[1])


def _log_ratios(a: Sequence[Row], b: Sequence[Row], one_visit: bool) -> dict[int, list[float]]:
    """Returns {seed: log(tokens/s of b / tokens/s of a) for each pair of rows with that seed}.
    one_visit: whether only pairs of one commit and GPU, begun within 12 hours, count."""
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
    """Returns whether two rows have the same commit, share a GPU, and began within 12 hours. Rows
    without GPUs (CPUs, emulated devices) must share a host instead."""
    if a.provenance is b.provenance:
        return True
    (commit, devices, start), (other_commit, other_devices, other_start) = _origin(a), _origin(b)
    if commit != other_commit or bool(devices) != bool(other_devices):
        return False
    near = start is None or other_start is None or abs(start - other_start) <= _VISIT_S
    return near and (not devices or bool(devices & other_devices))


def _origin(row: Row) -> tuple[object, frozenset[str], float | None]:
    """Returns where and when a row was measured: its commit, the ids of its GPUs (host names if it
    used no GPU), and its start in seconds since 1970 (None: unknown)."""
    origin = row.provenance or {}
    devices = {str(rank["uuid"]) for rank in origin.get("ranks") or () if rank.get("uuid")}
    devices = devices or {str(host) for host in origin.get("hosts") or ()}
    start = origin.get("started_at")
    seconds = datetime.fromisoformat(str(start)).timestamp() if start else None
    return origin.get("commit"), frozenset(devices), seconds


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values after Holm's correction for multiple tests, in the order of `p_values`."""
    values = np.array(p_values)
    count = len(values)
    order = np.argsort(values, kind="stable")
    values[order] = np.maximum.accumulate((count - np.arange(count)) * values[order])
    return [min(1.0, float(value)) for value in values]
