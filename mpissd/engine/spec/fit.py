"""Fits the power law of a bonus token's rank to ranks that are observed only up to the fan-out.

P(rank > F) = min(1, A·F^{−r}) [Kumar, Dao, May 2026, definition 11, with a factor A]. A rank f that
was kept has probability miss(f−1) − miss(f), with miss(0) = 1. A rank that was not kept has
probability miss(F), F being the number of candidates kept. F may depend on earlier outcomes: such
censoring does not change the likelihood.

The fit works relative to the smallest rank seen, m. A law that gives rank m a probability has z =
P(rank > m) = A·m^{−r} < 1, and the likelihood splits into B(z)·G(r): how many ranks are above m,
and how those are spread. So the best z is a share of counts (for m = 1, z is A itself), and log G
is concave. Only the bound z ≥ (1 − 1/m)^r couples the two; it matters if ranks below m are likely
although none was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError

Floats = NDArray[np.float64]
Ranks = NDArray[np.integer]
Group = tuple[Ranks, Ranks]  # (ranks, limits), both [n]

LEAST_COUNT = 10  # The least number of observations for a fit.
# Drop of the log-likelihood at the ends of a 95% interval: half of χ² with one degree of freedom.
_DROP = 3.841458820694124 / 2
_LOG_R = (math.log(1e-4), math.log(1e3))
_GRID = 33
# Standard deviations of the priors of a shrunken fit: log A and log r about their prior means, and
# log A between kinds of outcome (two kinds that hit .80 and .68 differ by log .32/.20 = .47).
_SPREAD_A = 1.0
_SPREAD_R = 0.5
_SPREAD_GROUP = 0.2
_LOG_Z_SHRUNK = (math.log(1e-4), 0.0)
_LOG_R_SHRUNK = (math.log(0.02), math.log(20.0))


@dataclass(frozen=True)
class PowerLawFit:
    """The fitted law miss(F) = min(1, A·F^{−r}), with 95% profile-likelihood intervals.

    `count` is the number of ranks it was fitted to.
    """

    hit_a: float
    hit_r: float
    a_low: float
    a_high: float
    r_low: float
    r_high: float
    count: int


def fit_power_law(ranks: Ranks, limits: Ranks) -> PowerLawFit | None:
    """Returns the maximum-likelihood law, or None if the observations do not determine A and r.

    ranks: [n], from 1; 0 if the true token was not among the candidates. limits: [n], the number of
    candidates kept, F; entries with F = 0 are ignored. The result is None with fewer than
    LEAST_COUNT observations, if no rank above the smallest was seen (r could be 0), or if none
    could lie further above it (r could be infinite).

    Raises ConfigError for a rank above its limit or below 0.
    """
    likelihood = _Likelihood(ranks, limits)
    if (best := likelihood.highest()) is None:
        return None
    log_a, log_r = best
    r = math.exp(log_r)
    least = float(likelihood.value(np.array(log_a), np.array(r))) - _DROP
    r_low, r_high = _ends(likelihood.profile_of_log_r, log_r, least)
    # For every A inside its interval, the best r lies inside the interval of r.
    some_r = np.append(np.geomspace(r_low, r_high, 65), r)
    a_low, a_high = _ends(lambda x: likelihood.value(x, some_r).max(), log_a, least)
    return PowerLawFit(math.exp(log_a), r, a_low, a_high, r_low, r_high, likelihood.count)


def most_likely(ranks: Ranks, limits: Ranks) -> tuple[float, float] | None:
    """Returns (A, r) of `fit_power_law` without their intervals, in a tenth of its time."""
    best = _Likelihood(ranks, limits).highest()
    return None if best is None else (math.exp(best[0]), math.exp(best[1]))


def shrunk_power_laws(
    groups: Sequence[Group], prior_a: float, prior_r: float
) -> tuple[tuple[float, ...], float]:
    """Returns (A of each group, the common r), drawn towards a prior.

    First all groups are fitted together, with log A ~ N(log prior_a, 1) and log r ~ N(log prior_r,
    .5²); then each group gets its own log A ~ N(the common one, .2²). The result is the posterior's
    mode, so it always exists; without observations it is the prior. Ranks above 1 determine r
    whatever A is, so groups with different A can share it. Time: O(distinct ranks).
    """
    log_a, r = _pooled(groups, math.log(prior_a), math.log(prior_r))
    return tuple(math.exp(_group_log_a(group, log_a, r)) for group in groups), r


def _pooled(groups: Sequence[Group], prior_log_a: float, prior_log_r: float) -> tuple[float, float]:
    together = _Likelihood(*(np.concatenate(column) for column in zip(*groups, strict=True)))
    if not together.count:
        return prior_log_a, math.exp(prior_log_r)
    (low_z, high_z), (low_r, high_r) = _LOG_Z_SHRUNK, _LOG_R_SHRUNK
    for _ in range(7):  # Each grid is 5 times as fine as the one before.
        log_z, log_r = np.linspace(low_z, high_z, 21)[:, None], np.linspace(low_r, high_r, 21)
        r = np.exp(log_r)
        log_a = log_z + r * together.log_first
        score = together.value(log_a, r)
        score -= ((log_a - prior_log_a) / _SPREAD_A) ** 2 / 2
        score -= ((log_r - prior_log_r) / _SPREAD_R) ** 2 / 2
        i, j = np.unravel_index(int(np.argmax(score)), score.shape)
        low_z, high_z = float(log_z[max(i - 2, 0), 0]), float(log_z[min(i + 2, 20), 0])
        low_r, high_r = float(log_r[max(j - 2, 0)]), float(log_r[min(j + 2, 20)])
    return float(log_a[i, j]), float(r[j])


def _group_log_a(group: Group, log_a: float, r: float) -> float:
    own = _Likelihood(*group)
    if not own.count:
        return log_a

    def score(log_z: Floats) -> Floats:
        tried = log_z + r * own.log_first
        return own.value(tried, np.array(r)) - ((tried - log_a) / _SPREAD_GROUP) ** 2 / 2

    return _highest(score, *_LOG_Z_SHRUNK, levels=4) + r * own.log_first


class _Likelihood:
    """The function log P(ranks | A, r), from how often each rank hit and each limit held none."""

    def __init__(self, ranks: Ranks, limits: Ranks) -> None:
        if len(ranks) and (ranks.min() < 0 or (ranks > limits).any()):
            worst = int(np.argmax((ranks < 0) | (ranks > limits)))
            raise ConfigError(f"rank {ranks[worst]}: allowed: 0 to its limit, {limits[worst]}")
        self.count = int(np.count_nonzero(limits))
        self._rank, self._hits = _tally(ranks)
        self._limit, self._misses = _tally(limits[ranks == 0])
        seen, kept = self._rank, self._limit
        self._first = first = (
            int(seen[0]) if len(seen) else max(int(kept[-1]) if len(kept) else 1, 1)
        )
        behind = float(self._hits[seen > first].sum() + self._misses[kept >= first].sum())
        at = float(self._hits[0]) if len(seen) else 0.0
        self._share_behind = behind / (at + behind) if at + behind else 1.0
        self.log_first = math.log(first)  # log m, m being the smallest rank seen
        with np.errstate(divide="ignore"):
            self._log_before, self._log_rank = np.log(seen - 1.0), np.log(seen)
        self._log_limit = np.log(kept)

    @property
    def identified(self) -> bool:
        """Whether the likelihood has a maximum at a finite A > 0 and a finite r > 0."""
        further = (self._rank > self._first + 1).any() or (self._limit > self._first).any()
        return bool(further and (self._rank > self._first).any())

    def highest(self) -> tuple[float, float] | None:
        """Returns (log A, log r) of the maximum, or None if there is none."""
        if self.count < LEAST_COUNT or not self.identified:
            return None
        log_r = _highest(self.profile_of_log_r, *_LOG_R)
        return float(self.best_log_a(np.array(math.exp(log_r)))), log_r

    def value(self, log_a: Floats, r: Floats) -> Floats:
        """Returns the log-likelihood; log_a and r are broadcast against each other."""
        log_a, r = log_a[..., None], r[..., None]
        # miss(0) = 1: log 0 = −∞ gives log 1 here
        before = np.minimum(0.0, log_a - r * self._log_before)
        behind = np.minimum(0.0, log_a - r * self._log_rank)
        kept = np.minimum(0.0, log_a - r * self._log_limit)
        with np.errstate(divide="ignore"):
            hit = before + np.log(-np.expm1(behind - before))
        return np.asarray(hit @ self._hits + kept @ self._misses)

    def best_log_a(self, r: Floats) -> Floats:
        """Returns the log A that maximises the likelihood for each given r."""
        least = 0.0 if self._first == 1 else (1.0 - 1.0 / self._first) ** r
        return np.asarray(np.log(np.maximum(self._share_behind, least)) + r * self.log_first)

    def profile_of_log_r(self, log_r: Floats) -> Floats:
        """Returns the log-likelihood maximised over A."""
        r = np.exp(log_r)
        return self.value(self.best_log_a(r), r)


def _tally(values: Ranks) -> tuple[Floats, Floats]:
    """Returns (distinct values above 0 in ascending order, how often each occurs), as floats."""
    counts = np.bincount(values)
    counts[:1] = 0
    distinct = np.flatnonzero(counts)
    return distinct.astype(np.float64), counts[distinct].astype(np.float64)


def _highest(
    function: Callable[[Floats], Floats], low: float, high: float, levels: int = 9
) -> float:
    """Returns the argmax of a unimodal function, by grids that are each 16 times as fine as the
    last."""
    for _ in range(levels):
        grid = np.linspace(low, high, _GRID)
        top = int(np.argmax(function(grid)))
        low, high = float(grid[max(top - 1, 0)]), float(grid[min(top + 1, _GRID - 1)])
    return float(grid[top])


def _ends(
    function: Callable[[Floats], Floats], log_top: float, least: float
) -> tuple[float, float]:
    """Returns exp of the two points, left and right of the maximum, where the function equals
    `least`."""
    low, high = (_crossing(function, log_top, step, least) for step in (-0.1, 0.1))
    return math.exp(low), math.exp(high)


def _crossing(
    function: Callable[[Floats], Floats], inside: float, step: float, least: float
) -> float:
    """Returns the point where the function falls to `least`, searching from `inside` by `step`."""
    outside = inside + step
    while function(np.array(outside)) > least:
        inside, step = outside, 2 * step
        outside = inside + step
    for _ in range(40):
        middle = (inside + outside) / 2
        above = function(np.array(middle)) > least
        inside, outside = (middle, outside) if above else (inside, middle)
    return outside
