"""Fits the power distribution of a bonus token's rank to ranks that are observed only up to the
fan-out.

P(rank > F) = min(1, A·F^{−r}) [Kumar, Dao, May 2026, definition 11, with a factor A]. A rank f that
was kept has probability miss(f−1) − miss(f), with miss(0) = 1. A rank that was not kept has
probability miss(F), F being the number of candidates kept. F may depend on earlier outcomes: such
censoring does not change the likelihood.

The fit works relative to the smallest rank seen, m. A distribution that gives rank m a probability
has z = P(rank > m) = A·m^{−r} < 1, and the likelihood splits into B(z)·G(r): how many ranks are
above m, and how those are spread. So the best z is a share of counts (for m = 1, z is A itself),
and log G is concave. Only the bound z ≥ (1 − 1/m)^r couples the two; it matters if ranks below m
are likely although none was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError

Floats = NDArray[np.float64]
Ranks = NDArray[np.integer]

LEAST_COUNT = 10  # The least number of observations for a fit.
_LOG_R = (math.log(1e-4), math.log(1e3))
_GRID, _LEVELS = 33, 9


def most_likely(ranks: Ranks, limits: Ranks) -> tuple[float, float] | None:
    """Returns the maximum-likelihood (A, r), or None if the observations do not determine them.

    ranks: [n], from 1; 0 if the true token was not among the candidates. limits: [n], the number of
    candidates kept, F; entries with F = 0 are ignored. The result is None with fewer than
    LEAST_COUNT observations, if no rank above the smallest was seen (r could be 0), or if none
    could lie further above it (r could be infinite).

    Raises ConfigError for a rank above its limit or below 0.
    """
    best = _Likelihood(ranks, limits).highest()
    return None if best is None else (math.exp(best[0]), math.exp(best[1]))


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


def _highest(function: Callable[[Floats], Floats], low: float, high: float) -> float:
    """Returns the argmax of a unimodal function, by grids that are each 16 times as fine as the
    last."""
    for _ in range(_LEVELS):
        grid = np.linspace(low, high, _GRID)
        top = int(np.argmax(function(grid)))
        low, high = float(grid[max(top - 1, 0)]), float(grid[min(top + 1, _GRID - 1)])
    return float(grid[top])
