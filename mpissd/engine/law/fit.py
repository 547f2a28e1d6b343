"""Fits a power law to the ranks of bonus tokens among a draft's candidates. A rank is observed only
if it is at most F, the number of candidates.

P(rank > F) = miss(F) = min(1, A·F^{−r}) [Kumar, Dao, May 2026, definition 11, with a factor A]. An
observed rank f has probability miss(f−1) − miss(f), with miss(0) = 1. An unobserved rank, beyond
the F candidates, has probability miss(F). F may depend on earlier outcomes, because such censoring
does not change the likelihood.

Let m be the smallest observed rank and z = P(rank > m) = A·m^{−r} < 1. The likelihood is a product
B(z)·G(r): B says how many ranks are above m, and G how these ranks are spread. So the best z is a
share of counts (for m = 1, z is A itself), and log G is concave. Only the bound z ≥ (1 − 1/m)^r
couples z and r; it matters if ranks below m are likely although none was observed.
"""

import math

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError

Floats = NDArray[np.float64]
Ranks = NDArray[np.integer]

LEAST_COUNT = 10  # the least number of observations that are fitted
_LOG_R = (math.log(1e-4), math.log(1e3))
_GRID = 33
_LEVELS = 9


def most_likely(ranks: Ranks, limits: Ranks) -> tuple[float, float] | None:
    """Returns the maximum-likelihood (A, r) of P(rank > F) = min(1, A·F^{−r}), the probability that
    a bonus token is not among F candidates, or None if the observations do not determine (A, r).

    ranks: the rank, from 1, of each observed bonus token among the candidates, [n]; 0 if the token
    was no candidate. limits: the number F of candidates of each observation, [n]; observations with
    F = 0 are ignored. Returns None with fewer than LEAST_COUNT observations, if all observed ranks
    are equal (the best r is 0), or if nothing shows a rank above the smallest one plus 1 (the best
    r is infinite).

    Raises ConfigError for a rank above its limit or below 0.
    """
    if len(ranks) and (ranks.min() < 0 or (ranks > limits).any()):
        worst = int(np.argmax((ranks < 0) | (ranks > limits)))
        raise ConfigError(f"rank {ranks[worst]}: allowed: 0 to its limit, {limits[worst]}")
    rank, hits = _tally(ranks)  # each observed rank, and how often it occurred
    limit, misses = _tally(limits[ranks == 0])  # each F of a miss, how often
    first = int(rank[0]) if len(rank) else 1  # the smallest observed rank
    # If `further` is False, the best r is infinite; if all observed ranks are equal, it is 0.
    further = (rank > first + 1).any() or (limit > first).any()
    if np.count_nonzero(limits) < LEAST_COUNT or not (further and (rank > first).any()):
        return None
    behind = float(hits[rank > first].sum() + misses[limit >= first].sum())
    share_behind = behind / (float(hits[0]) + behind)
    with np.errstate(divide="ignore"):
        log_before, log_rank, log_limit = map(np.log, (rank - 1.0, rank, limit))

    def best_log_a(r: Floats) -> Floats:
        """Returns, for each exponent r, the logarithm of the factor A of most likelihood."""
        least = 0.0 if first == 1 else (1.0 - 1.0 / first) ** r
        return np.asarray(np.log(np.maximum(share_behind, least)) + r * math.log(first))

    def likelihood(r: Floats) -> Floats:
        """Returns, for each exponent r, the ranks' log-likelihood with the best factor A."""
        log_a = best_log_a(r)[:, None]
        slope = r[:, None]
        # For rank 1, log(rank − 1) is −∞, and the minimum 0 is the log of miss(0) = 1.
        before = np.minimum(0.0, log_a - slope * log_before)
        beyond = np.minimum(0.0, log_a - slope * log_rank)
        kept = np.minimum(0.0, log_a - slope * log_limit)
        with np.errstate(divide="ignore"):
            hit = before + np.log(-np.expm1(beyond - before))
        return np.asarray(hit @ hits + kept @ misses)

    low, high = _LOG_R
    for _ in range(_LEVELS):  # Each grid is 16 times as fine as the previous one.
        grid = np.linspace(low, high, _GRID)
        top = int(np.argmax(likelihood(np.exp(grid))))
        low = float(grid[max(top - 1, 0)])
        high = float(grid[min(top + 1, _GRID - 1)])
    r = math.exp(float(grid[top]))
    return math.exp(float(best_log_a(np.array(r)))), r


def _tally(values: Ranks) -> tuple[Floats, Floats]:
    """Returns (distinct values above 0 in ascending order, how often each occurs), as floats."""
    distinct, counts = np.unique(values[values > 0], return_counts=True)
    return distinct.astype(np.float64), counts.astype(np.float64)
