"""Fan-out: how many bonus candidates F_k the draft keeps for each outcome "k accepted", k = 0..K.

uniform:F      F_k = F
geometric:B    the whole numbers with ΣF_k ≤ B that miss least under the power law; without
               rounding it is the geometric series of SSD's theorem 12
adaptive:B     likewise, but from what was committed so far, again every few rounds (spec.adaptive)
list:a,b,…     as given, K+1 of them
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError, unknown
from mpissd.common.rounds import Source
from mpissd.common.theory import accept_probabilities, each_k, power_law_miss

Ints = NDArray[np.int32]

MAX_BRANCHES = 4096  # ΣF_k a sequence: far above any use, and still 0.1 s of planning
_TIE = 1e-12  # costs closer than this are equal, so that rounding never picks the plan


def resolve_fan_out(
    text: str,
    lookahead: int,
    alpha_rates: Sequence[float],
    hit_a: float | Sequence[float],
    hit_r: float | Sequence[float],
    *,
    minimum: int = 0,
) -> tuple[int, ...]:
    """F_0..F_K, K+1 whole numbers, of `uniform:F`, `geometric:B` or `list:a,b,…`.

    alpha_rates: K hazards of acceptance. hit_a, hit_r: miss_k(F) = min(1, A_k·F^{−r_k}), one of
    each or K+1. minimum: what geometric gives every k at least (1 where F_k = 0 is not allowed).
    ConfigError names the value and what is allowed.
    """
    assert len(alpha_rates) == lookahead, (len(alpha_rates), lookahead)
    kind, _, values = text.strip().partition(":")
    width = lookahead + 1
    if kind == "list":
        return _listed(text, values, width)
    if kind == "uniform":
        return (_count(text, values, MAX_BRANCHES // width),) * width
    if kind in ("geometric", "adaptive"):  # adaptive begins where geometric stays
        budget = _count(text, values, MAX_BRANCHES)
        weights = accept_probabilities(alpha_rates)
        return _geometric(text, budget, weights, each_k(hit_a, width), hit_r, minimum)
    known = unknown("fan_out", kind, ("uniform", "geometric", "list", "adaptive", "tail"))
    raise ConfigError(f"{known}, as in uniform:3, geometric:24, list:4,3,3 or adaptive:24")


def adaptive_budget(text: str) -> int | None:
    """B of `adaptive:B`; None for lists that stay as they are."""
    kind, _, value = text.strip().partition(":")
    return _count(text, value, MAX_BRANCHES) if kind == "adaptive" else None


def optimal_fan_out(
    weights: Sequence[float],
    budget: int,
    hit_a: Sequence[float],
    hit_r: float | Sequence[float],
    minimum: int = 0,
) -> tuple[int, ...]:
    """argmin Σ_k w_k·miss_k(F_k) over whole F_k ≥ minimum with ΣF_k ≤ B; of equals, the least ΣF_k.

    Dynamic programming over k, O(K·B²). A greedy search fails: with A = 1 the first candidate at k
    gains nothing, so it never buys the second (B = 24: [24, 0, …], hit .19 against .68).
    """
    slopes = each_k(hit_r, len(weights))
    assert len(weights) == len(hit_a) and min(slopes) > 0, (len(weights), len(hit_a), hit_r)
    spare = budget - minimum * len(weights)
    assert spare >= 0, (budget, minimum, len(weights))
    best = np.zeros(spare + 1)  # [spare+1] least Σ over the k so far, by candidates spent
    choices: list[NDArray[np.intp]] = []
    for weight, a, r in zip(weights, hit_a, slopes, strict=True):
        misses = [power_law_miss(minimum + extra, a, r) for extra in range(spare + 1)]
        best, chosen = _add_position(best, weight * np.array(misses))
        choices.append(chosen)
    left = int(np.flatnonzero(best <= best.min() + _TIE)[0])
    fan_out = []
    for chosen in reversed(choices):
        fan_out.append(minimum + int(chosen[left]))
        left -= int(chosen[left])
    return tuple(reversed(fan_out))


def _add_position(
    best: NDArray[np.float64], cost: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """One more k: total[s] = min_e best[s−e] + cost[e] for s spent, and the e that attains it."""
    total = best + cost[0]
    chosen = np.zeros(len(best), np.intp)
    for extra in range(1, len(best)):
        candidate = best[:-extra] + cost[extra]
        better = candidate < total[extra:] - _TIE
        total[extra:][better] = candidate[better]
        chosen[extra:][better] = extra
    return total, chosen


def _geometric(
    text: str,
    budget: int,
    weights: Sequence[float],
    hit_a: Sequence[float],
    hit_r: float | Sequence[float],
    minimum: int,
) -> tuple[int, ...]:
    """The optimum, or a ConfigError where it keeps no candidate or the budget can't hold it."""
    if budget < minimum * len(weights):
        least = minimum * len(weights)
        raise ConfigError(f"fan_out {text!r}: allowed with these hits: a budget of {least} or more")
    fan_out = optimal_fan_out(weights, budget, hit_a, hit_r, minimum)
    if not any(fan_out):
        raise ConfigError(f"fan_out {text!r}: no candidate hits under this power law: allow more")
    return fan_out


def _listed(text: str, values: str, width: int) -> tuple[int, ...]:
    fan_out = tuple(_whole(text, value) for value in values.split(","))
    if len(fan_out) != width:
        raise ConfigError(
            f"fan_out {text!r} has {len(fan_out)} values: allowed: lookahead + 1 = {width}"
        )
    if not 1 <= sum(fan_out) <= MAX_BRANCHES:
        raise ConfigError(f"fan_out {text!r}: allowed: a sum from 1 to {MAX_BRANCHES}")
    return fan_out


def _count(text: str, value: str, most: int) -> int:
    """A whole number from 1 to `most`."""
    count = _whole(text, value)
    if not 1 <= count <= most:
        raise ConfigError(f"fan_out {text!r}: {count}: allowed: 1 to {most}")
    return count


def _whole(text: str, value: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        raise ConfigError(f"fan_out {text!r}: {value!r}: allowed: whole numbers from 0")
    return int(value)


@dataclass(frozen=True)
class FanOuts:
    """F_0 … F_K for a trunk that was pre-speculated, and for one that a backup drafted; both empty:
    nothing is grown. after_fast: behind FAST tokens, where the backup may be either (auto)."""

    after_hit: tuple[int, ...] = ()
    after_miss: tuple[int, ...] = ()
    after_fast: tuple[int, ...] | None = None

    def behind(self, source: int) -> tuple[int, ...]:
        """The list behind a trunk that this Source drafted."""
        if source == Source.CACHE:
            return self.after_hit
        if source == Source.FAST and self.after_fast is not None:
            return self.after_fast
        return self.after_miss

    @property
    def lists(self) -> tuple[tuple[int, ...], ...]:
        """Those that there are."""
        found = self.after_hit, self.after_miss
        return found if self.after_fast is None else (*found, self.after_fast)

    @cached_property
    def is_one(self) -> bool:
        """Whether all trunks have the same list."""
        return len(set(self.lists)) == 1

    @property
    def widest(self) -> int:
        """The largest F_k of all."""
        return max((0, *(f for fan_out in self.lists for f in fan_out)))

    @property
    def branches(self) -> int:
        """ΣF_k, of the longest list."""
        return max(sum(fan_out) for fan_out in self.lists)


def lanes_of(fan_out: Sequence[int]) -> tuple[Ints, Ints]:
    """(k of each lane, its place within k's candidates) of F_0 … F_K, each [ΣF]."""
    counts = np.asarray(fan_out, np.int64)
    starts = np.cumsum(counts) - counts
    k_of = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return k_of, (np.arange(len(k_of)) - starts[k_of]).astype(np.int32)


def owners_of(
    fan_out: Sequence[int],
    num_drafts: int,
    weights: Sequence[float],
    hit_a: Sequence[float],
    hit_r: float | Sequence[float],
) -> Ints:
    """Which of D drafts grows each lane, [ΣF]: dealt in turn, the likeliest outcome first.

    A lane's value is the chance that its outcome comes true, w_k·(miss_k(F − 1) − miss_k(F)) for
    the F-th candidate at k; so every draft holds its share of the hits.
    """
    k_of, place = lanes_of(fan_out)
    miss, r = power_law_miss, each_k(hit_r, len(weights))
    value = [
        weights[k] * (miss(p, hit_a[k], r[k]) - miss(p + 1, hit_a[k], r[k]))
        for k, p in zip(k_of.tolist(), place.tolist(), strict=True)
    ]
    # Places of one k are worth less and less, whatever the law says (A = 1: the first is worth 0).
    order = np.lexsort((k_of, place, -np.array(value)))
    owners = np.empty(len(order), np.int32)
    owners[order] = np.arange(len(order)) % num_drafts
    return owners
