"""Fan-out: the number F_k of bonus candidates for which the draft drafts ahead, for each possible
number k = 0..K of accepted tokens.

uniform:F      F_k = F
geometric:B    the whole numbers with ΣF_k ≤ B that give most cache hits under the model of misses
               (without rounding: the geometric series of SSD's theorem 12)
list:a,b,…     K+1 given numbers

With a draft tree (`--tree`), k is the tree's node at which the accepted path ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError, unknown
from mpissd.common.rounds import Ints, Source
from mpissd.common.theory import accept_probabilities, each_k, power_law_miss
from mpissd.engine.law.acceptance import HitLaw
from mpissd.engine.law.tree import Shape, positional

# the largest allowed number of branches of a sequence, which is still optimized within 0.1 s
MAX_BRANCHES = 4096
MOST_CANDIDATES = 64  # the most candidates (top-k) that a forward returns for a row of logits
# Miss probabilities that differ by less count as equal, so that rounding errors decide nothing.
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
    """Returns (F_0, …, F_K), where F_k is the number of bonus candidates after k accepted tokens.

    text: `uniform:F`, `geometric:B` or `list:a,b,…`. alpha_rates: the acceptance rates of the K
    drafted tokens. hit_a, hit_r, floor: A, r and floor of the probability of a cache miss,
    miss_k(F) = min(1, floor_k + A_k·F^{−r_k}), one value for all k or K+1 values. minimum: the
    least F_k that geometric gives. Raises ConfigError, which names the value and the allowed ones.
    """
    assert len(alpha_rates) == lookahead, (len(alpha_rates), lookahead)
    kind, _, values = text.strip().partition(":")
    what = f"fan_out {text!r}"
    width = lookahead + 1
    if kind not in ("uniform", "geometric", "list"):
        error = unknown("fan_out", kind, ("uniform", "geometric", "list"))
        raise ConfigError(f"{error}, as in uniform:3, geometric:24 or list:4,3,3")
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
    (budget,) = fan_out
    largest = MAX_BRANCHES // (width if kind == "uniform" else 1)
    if not 1 <= budget <= largest:
        raise ConfigError(f"{what}: {budget}: allowed: 1 to {largest}")
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
    """Returns the numbers F_k of bonus candidates after k accepted tokens that give most cache
    hits: the whole numbers F_k ≥ minimum with ΣF_k ≤ B = budget that minimise Σ_k weights[k] ·
    miss_k(F_k); of several minima the one with the least ΣF_k.

    weights[k]: P(k accepted). hit_a, hit_r, floor: the parameters of miss_k(F) = min(1, floor_k +
    A_k·F^{−r_k}). The dynamic program over k takes O(K·B²). A greedy search fails: with A = 1 the
    first candidate after k tokens gains nothing, so that a second one would never be added.
    """
    slopes, floors = (each_k(value, len(weights)) for value in (hit_r, floor))
    assert len(weights) == len(hit_a) and min(slopes) > 0, (len(weights), len(hit_a), hit_r)
    spare = budget - minimum * len(weights)
    assert spare >= 0, (budget, minimum, len(weights))
    costs = []
    for weight, *law in zip(weights, hit_a, slopes, floors, strict=True):
        misses = [power_law_miss(minimum + extra, *law) for extra in range(spare + 1)]
        costs.append(weight * np.array(misses))
    return tuple(minimum + extra for extra in _cheapest(costs, spare))


def tree_fan_out(
    tree: Shape, hazards: Sequence[float], hit_law: HitLaw, budget: int
) -> tuple[int, ...]:
    """Returns the numbers of bonus candidates after each node of a draft tree that give most cache
    hits, with at most `budget` candidates in all. hazards: the acceptance rates of the drafted
    tokens, by level. Raises ConfigError if no candidate can hit."""
    chances = key_chances(tree, hazards, hit_law, min(budget, MOST_CANDIDATES - 1))
    best = _cheapest([-chance for chance in chances], budget)
    if not any(best):
        raise ConfigError(f"fan_out of {budget} branches: no candidate of the tree's nodes hits")
    return best


def key_chances(
    tree: Shape, hazards: Sequence[float], hit_law: HitLaw, largest: int
) -> list[NDArray[np.float64]]:
    """Returns, for each node of a draft tree, the probabilities of a cache hit there with F = 0 …
    `largest` bonus candidates: P(the accepted path ends at the node, and the bonus token is one of
    the F candidates). The draft's likeliest tokens after a node are its children, and the next
    likeliest ones are the candidates. hazards: the acceptance rates, by level."""
    law = positional(hazards, hit_law, tree.width + largest)
    law = np.vstack([law, np.diff(hit_law.hit_probabilities(tree.width + largest)[1])])
    chances = []
    for chance, depth, children in zip(tree.chances(law), tree.levels, tree.children, strict=True):
        ahead = law[depth, len(children) : len(children) + largest]
        chances.append(chance * np.array([0.0, *np.cumsum(ahead)]))
    return chances


def _cheapest(costs: Sequence[NDArray[np.float64]], budget: int) -> tuple[int, ...]:
    """Returns the whole numbers n_k with Σn_k ≤ budget whose cost Σ_k costs[k][n_k] is least."""
    best = np.zeros(budget + 1)  # best[s]: the least cost of numbers with sum s
    choices: list[NDArray[np.intp]] = []
    for cost in costs:
        # total[s] is the minimum over e of best[s − e] + cost[e]; chosen[s] is the best e.
        total = best + cost[0]
        chosen = np.zeros(len(best), np.intp)
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
    """The fan-outs F_0..F_K: F_k is the number of bonus candidates after k accepted tokens.

    after_hit: the fan-outs if the tokens under verification came from the speculation cache.
    after_miss: the fan-outs if a backup drafted these tokens. Empty if nothing is drafted ahead.
    """

    after_hit: tuple[int, ...] = ()
    after_miss: tuple[int, ...] = ()

    def behind(self, source: int) -> tuple[int, ...]:
        """Returns the fan-outs F_0..F_K for tokens under verification that `source` drafted (a
        Source: the speculation cache or a backup)."""
        return self.after_hit if source == Source.CACHE else self.after_miss

    @property
    def lists(self) -> tuple[tuple[int, ...], ...]:
        """(the fan-outs F_0..F_K after cache hits, those after cache misses)."""
        return self.after_hit, self.after_miss

    @cached_property
    def is_one(self) -> bool:
        """Whether a branch point has as many candidates after cache hits as after misses."""
        return len(set(self.lists)) == 1

    def within(self, width: int | None, served: int | None = None) -> FanOuts:
        """Returns the fan-outs with every F_k limited to `width` bonus candidates (None: no limit),
        and F_k = 0 for k above `served`, the number of tokens under verification (None: K)."""
        return self if width is served is None else _within(self, width, served)

    @property
    def widest_each(self) -> tuple[int, ...]:
        """For k = 0 … K accepted tokens, the most bonus candidates, after cache hits or misses."""
        return tuple(map(max, zip(*self.lists, strict=True)))

    @property
    def widest(self) -> int:
        """The largest number of bonus candidates after any number of accepted tokens."""
        return max(self.widest_each, default=0)

    @property
    def branches(self) -> int:
        """The most branches of a sequence: the larger sum of F_k, after hits or after misses."""
        return max(sum(fan_out) for fan_out in self.lists)


@lru_cache(maxsize=256)
def _within(fan_outs: FanOuts, width: int | None, served: int | None) -> FanOuts:
    limit, last = (MAX_BRANCHES if n is None else n for n in (width, served))
    lists = [
        tuple(min(count, limit) * (k <= last) for k, count in enumerate(fan_out))
        for fan_out in fan_outs.lists
    ]
    return FanOuts(*lists)


def lanes_of(fan_out: Sequence[int]) -> tuple[Ints, Ints]:
    """Returns two int32 arrays over the ΣF_k branches of a sequence: the number k of accepted
    tokens that the branch assumes, and the rank from 0 of its bonus token among the candidates."""
    counts = np.asarray(fan_out, np.int64)
    starts = np.cumsum(counts) - counts
    k_of = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return k_of, (np.arange(len(k_of)) - starts[k_of]).astype(np.int32)
