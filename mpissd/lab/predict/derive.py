"""Derives a forward's time at a T that was not measured from the same model at a measured T.

    derived(T) = kept + (measured(T') − kept − reduces(T')) · bytes(T) / bytes(T') + reduces(T)

bytes: weights and KV that one rank reads. reduces: seconds of a forward's all-reduces. kept:
seconds that T does not change. If each product is a launch of its own, kept is the time of the
smallest measured forward beyond its floor. If one kernel runs them as a chain, its overhead scales
with the bytes, and kept is one launch. T' is the measured number of ranks nearest to T. For H200
forwards that were measured at two T, the rule is within 2% at one row (docs/profile.md).

If one rank's share of the model at T was measured without all-reduces, that is used instead:

    derived(T) = share(T) + reduces(T)
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from mpissd.common.errors import ConfigError
from mpissd.engine.backend.base import Cost
from mpissd.engine.backend.profile import Curve, Forward, Profile, known_profiles, load_profile
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard

DERIVED = "derived"  # first word in the source of a derived forward
_ITEMSIZE = 2  # bytes of a weight and of an all-reduced element


def with_derived(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> Profile:
    """Returns the profile with this forward added, derived, if it was measured only at other T.

    The profile is returned unchanged if it has only rates, has the forward already, or has the
    model at no T. Raises ConfigError if no all-reduce over T ranks is known.
    """
    forwards, key = profile.tables.forwards, shard.key(sequences, options)
    is_known = key in forwards or profile.tables.kernels(key, shard.num_params(options))
    if is_known:
        return profile
    derived = _of_share(profile, shard, sequences, options)
    if not derived:
        near = _nearest(profile, shard, sequences, options)
        if near is None:
            return profile
        derived = derive(profile, near, shard, sequences, options)
    return replace(profile, tables=replace(profile.tables, forwards={**forwards, key: derived}))


def _of_share(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> tuple[Forward, ...]:
    """Returns the forwards of one rank's measured share, with all-reduces; () if there are none."""
    derived = []
    key, params = shard.key(sequences, options), shard.num_params(options)
    for alone in profile.tables.kernels(key, params, alone=True):
        reduces, share = _all_reduces_of(profile, shard.tp), alone.seconds
        costs = (shard.cost(rows, sequences, _ITEMSIZE, options) for rows in share.points)
        added = (_all_reduces_s(reduces, cost) for cost in costs)
        seconds = tuple(map(sum, zip(share.seconds, added, strict=True)))
        source = f"{DERIVED}: one rank's share ({share.source}) and the all-reduces of "
        curve = Curve(share.points, seconds, source + reduces.name)
        derived.append(replace(alone, seconds=curve))
    return tuple(derived)


def derive(
    profile: Profile, near: AnyShard, shard: AnyShard, sequences: int, options: ForwardOptions
) -> tuple[Forward, ...]:
    """Derives the forwards of `shard` from `near`'s, the same model on other ranks.

    There is one for each kernel that `near` was measured with, at the same row counts. Their
    sources begin with "derived" and name their origin. Raises ConfigError as with_derived does.
    """
    reduces, derived = _all_reduces_of(profile, shard.tp), []
    source = f"{DERIVED} from T={near.tp} by the bytes of a rank"
    if shard.tp > 1:
        source += f"; all-reduces of profile {reduces.name}: {reduces.sources['all_reduce']}"
    for known in profile.tables.kernels(near.key(sequences, options), near.num_params(options)):
        points, times = known.seconds.points, list[float]()
        first = near.cost(points[0], sequences, _ITEMSIZE, options)
        unchanged = _kept_s(profile, reduces, known, first)
        for rows, measured_s in zip(points, known.seconds.seconds, strict=True):
            there, here = (s.cost(rows, sequences, _ITEMSIZE, options) for s in (near, shard))
            alone_s = measured_s - _all_reduces_s(reduces, there)
            kept = min(alone_s, unchanged)
            share = (here.weight_bytes + here.kv_bytes) / (there.weight_bytes + there.kv_bytes)
            times.append(kept + (alone_s - kept) * share + _all_reduces_s(reduces, here))
        curve = Curve(points, tuple(times), source)
        derived.append(replace(known, params=shard.num_params(options), seconds=curve))
    return tuple(derived)


def _kept_s(profile: Profile, reduces: Profile, known: Forward, first: Cost) -> float:
    """Returns the seconds of a forward that T does not change.

    first: cost of the forward with the fewest rows measured.
    """
    floor = profile.floor_s(first)
    if known.most_rows is not None:  # only the chain kernel, for few rows, has a limit
        return profile.launch_s
    if floor is None:
        return first.num_products * profile.product_overhead_s + profile.launch_s
    return max(0.0, known.seconds.seconds[0] - _all_reduces_s(reduces, first) - floor)


def _all_reduces_s(profile: Profile, cost: Cost) -> float:
    return cost.num_all_reduces * profile.all_reduce_s(cost.tp, cost.all_reduce_bytes)


def _nearest(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> AnyShard | None:
    """Returns the model on the measured number of ranks that is nearest to T by ratio, or None."""
    others = []
    for tp in sorted({key.tp for key in profile.tables.forwards}):
        try:
            other = replace(shard, tp=tp)
        except ConfigError:  # the model cannot be divided among so many ranks
            continue
        if profile.tables.forward(other.cost(1, sequences, _ITEMSIZE, options)) is not None:
            others.append(other)
    return min(others, key=lambda other: abs(math.log(other.tp / shard.tp)), default=None)


def _all_reduces_of(profile: Profile, ranks: int) -> Profile:
    """Returns the profile whose all-reduces to use for this many ranks.

    It is this profile if it has any, or a built-in profile of the same device that has.
    """
    if ranks == 1 or profile.all_reduce_latency_s is not None:
        return profile
    return next((o for o in same_device(profile) if o.all_reduce_latency_s), profile)


def same_device(profile: Profile) -> tuple[Profile, ...]:
    """Returns the built-in profiles of this profile's device."""
    return tuple(o for o in _built_in() if o.kind == profile.kind)


@lru_cache(maxsize=1)
def _built_in() -> tuple[Profile, ...]:
    return tuple(map(load_profile, known_profiles()))
