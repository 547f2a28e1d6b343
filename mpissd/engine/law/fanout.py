"""Fan-out: how many bonus candidates F_k the draft keeps for each outcome "k accepted", k = 0..K.

uniform:F      F_k = F
geometric:B    the whole numbers with ΣF_k ≤ B that miss least under the hit model (without
               rounding: the geometric series of SSD's theorem 12)
list:a,b,…     K+1 given numbers

Of a tree (`--tree`) k is the node where the accepted path ends, and ΣF_k is spread over its nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError, unknown
from mpissd.common.rounds import Source
from mpissd.common.theory import accept_probabilities, each_k, power_law_miss
from mpissd.engine.law.acceptance import HitLaw
from mpissd.engine.law.tree import Tree, positional

Ints = NDArray[np.int32]

# The largest ΣF_k of a sequence: more than any run uses, and planned within 0.1 s.
MAX_BRANCHES = 4096
MOST_CANDIDATES = 64  # candidates that an LM head reads out for a row
# Costs that differ by less count as equal, so that rounding errors do not pick the plan.
_TIE = 1e-12


def resolve_fan_out(
    text: str,
    lookahead: int,
    alpha_rates: Sequence[float],
    hit_a: float | Sequence[float],
    hit_r: float | Sequence[float],
    floor: float | Sequence[float] = 0.0,
    *,
    minimum: int = 0,
) -> tuple[int, ...]:
    """Returns F_0..F_K, K+1 whole numbers, for `uniform:F`, `geometric:B` or `list:a,b,…`.

    alpha_rates: K acceptance rates by place. hit_a, hit_r, floor: one value each, or K+1, of the
    hit model miss_k(F) = min(1, floor_k + A_k·F^{−r_k}). minimum: the least F_k that geometric
    gives (1 if F_k = 0 is not allowed). Raises ConfigError, naming the value and the allowed ones.
    """
    assert len(alpha_rates) == lookahead, (len(alpha_rates), lookahead)
    kind, _, values = text.strip().partition(":")
    what, width = f"fan_out {text!r}", lookahead + 1
    if kind not in ("uniform", "geometric", "list"):
        known = unknown("fan_out", kind, ("uniform", "geometric", "list"))
        raise ConfigError(f"{known}, as in uniform:3, geometric:24 or list:4,3,3")
    numbers = values.split(",") if kind == "list" else [values]
    for value in numbers:
        if not re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
            raise ConfigError(f"{what}: {value!r}: allowed: whole numbers from 0")
    fan_out = tuple(map(int, numbers))
    if kind == "list":
        if len(fan_out) != width:
            raise ConfigError(f"{what} has {len(fan_out)} values: allowed: lookahead + 1 = {width}")
        if not 1 <= sum(fan_out) <= MAX_BRANCHES:
            raise ConfigError(f"{what}: allowed: a sum from 1 to {MAX_BRANCHES}")
        return fan_out
    (budget,), most = fan_out, MAX_BRANCHES // (width if kind == "uniform" else 1)
    if not 1 <= budget <= most:
        raise ConfigError(f"{what}: {budget}: allowed: 1 to {most}")
    if kind == "uniform":
        return fan_out * width
    if budget < minimum * width:
        raise ConfigError(f"{what}: allowed with these hits: a budget of {minimum * width} or more")
    weights = accept_probabilities(alpha_rates)
    best = optimal_fan_out(weights, budget, each_k(hit_a, width), hit_r, minimum, floor)
    if not any(best):
        raise ConfigError(f"{what}: no candidate hits under this power law: allow more")
    return best


def optimal_fan_out(
    weights: Sequence[float],
    budget: int,
    hit_a: Sequence[float],
    hit_r: float | Sequence[float],
    minimum: int = 0,
    floor: float | Sequence[float] = 0.0,
) -> tuple[int, ...]:
    """Minimises Σ_k w_k·miss_k(F_k) over whole F_k ≥ minimum with ΣF_k ≤ B; of ties, the least
    ΣF_k.

    It is a dynamic program over k, O(K·B²). A greedy search fails: with A = 1 the first candidate
    at k gains nothing, so it would never take the second (B = 24: [24, 0, …], hit rate .19 instead
    of .68).
    """
    slopes, floors = each_k(hit_r, len(weights)), each_k(floor, len(weights))
    assert len(weights) == len(hit_a) and min(slopes) > 0, (len(weights), len(hit_a), hit_r)
    spare = budget - minimum * len(weights)
    assert spare >= 0, (budget, minimum, len(weights))
    costs = []
    for weight, *law in zip(weights, hit_a, slopes, floors, strict=True):
        misses = [power_law_miss(minimum + extra, *law) for extra in range(spare + 1)]
        costs.append(weight * np.array(misses))
    return tuple(minimum + extra for extra in _cheapest(costs, spare))


def tree_fan_out(
    tree: Tree, hazards: Sequence[float], hit_law: HitLaw, budget: int
) -> tuple[int, ...]:
    """Returns F_n by node: the whole numbers with ΣF_n ≤ B for which most outcomes are keys.

    Raises ConfigError if no candidate ever hits.
    """
    most = min(budget, MOST_CANDIDATES - 1)
    best = _cheapest([-each for each in key_chances(tree, hazards, hit_law, most)], budget)
    if not any(best):
        raise ConfigError(f"fan_out of {budget} branches: no candidate of the tree's nodes hits")
    return best


def key_chances(
    tree: Tree, hazards: Sequence[float], hit_law: HitLaw, most: int
) -> list[NDArray[np.float64]]:
    """Returns P(the outcome is node n and one of F bonus candidates) by n and F = 0 … most.

    A path ends at node n, of depth d, before the draft's r-th candidate with P(n is reached) ·
    law[d, r]; r counts from the number of n's children on.
    """
    law = positional(hazards, hit_law, tree.width + most)
    law = np.vstack([law, np.diff(hit_law.hit_probabilities(tree.width + most)[1])])
    chances = []
    for chance, depth, children in zip(tree.chances(law), tree.levels, tree.children, strict=True):
        ahead = law[depth, len(children) : len(children) + most]
        chances.append(chance * np.array([0.0, *np.cumsum(ahead)]))
    return chances


def _cheapest(costs: Sequence[NDArray[np.float64]], budget: int) -> tuple[int, ...]:
    """Returns the whole n_k with Σn_k ≤ budget that minimise Σ costs[k][n_k]."""
    best = np.zeros(budget + 1)  # the least sum over the k so far, by candidates spent
    choices: list[NDArray[np.intp]] = []
    for cost in costs:
        # total[s] = min_e best[s−e] + cost[e], and the e that attains it
        total, chosen = best + cost[0], np.zeros(len(best), np.intp)
        for extra in range(1, len(cost)):
            candidate = best[:-extra] + cost[extra]
            better = candidate < total[extra:] - _TIE
            total[extra:][better] = candidate[better]
            chosen[extra:][better] = extra
        best = total
        choices.append(chosen)
    left = int(np.flatnonzero(best <= best.min() + _TIE)[0])
    fan_out = []
    for chosen in reversed(choices):
        fan_out.append(int(chosen[left]))
        left -= int(chosen[left])
    return tuple(reversed(fan_out))


@dataclass(frozen=True)
class FanOuts:
    """The fan-outs F_0..F_K after each source of a trunk; empty lists mean that nothing is grown.

    after_hit: for a trunk from the cache. after_miss: for a trunk that a backup drafted.
    """

    after_hit: tuple[int, ...] = ()
    after_miss: tuple[int, ...] = ()

    def behind(self, source: int) -> tuple[int, ...]:
        """Returns the list to use after a trunk that this Source drafted."""
        return self.after_hit if source == Source.CACHE else self.after_miss

    @property
    def lists(self) -> tuple[tuple[int, ...], ...]:
        """Both lists, after_hit first."""
        return self.after_hit, self.after_miss

    @cached_property
    def is_one(self) -> bool:
        """Whether the same fan-out list applies after every source of a trunk."""
        return len(set(self.lists)) == 1

    def within(self, width: int | None, served: int | None = None) -> FanOuts:
        """Returns the lists with at most `width` candidates for a row (None: as they are), and with
        none after more than `served` tokens (None: K)."""
        return self if width is served is None else _within(self, width, served)

    @property
    def widest_each(self) -> tuple[int, ...]:
        """The larger F_k of both lists, by k."""
        return tuple(map(max, zip(*self.lists, strict=True)))

    @property
    def widest(self) -> int:
        """The largest F_k of all lists."""
        return max(self.widest_each, default=0)

    @property
    def branches(self) -> int:
        """ΣF_k of the longest list."""
        return max(sum(fan_out) for fan_out in self.lists)


@lru_cache(maxsize=256)
def _within(fan_outs: FanOuts, width: int | None, served: int | None) -> FanOuts:
    most, last = (MAX_BRANCHES if n is None else n for n in (width, served))
    lists = [
        tuple(min(f, most) * (k <= last) for k, f in enumerate(each)) for each in fan_outs.lists
    ]
    return FanOuts(*lists)


def lanes_of(fan_out: Sequence[int]) -> tuple[Ints, Ints]:
    """Returns (k of each lane, its place among k's candidates) for F_0..F_K, both [ΣF]."""
    counts = np.asarray(fan_out, np.int64)
    starts = np.cumsum(counts) - counts
    k_of = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return k_of, (np.arange(len(k_of)) - starts[k_of]).astype(np.int32)
