"""Forwards at a T that was not measured, derived from the same model's at a T that was.

    derived(T) = kept + (measured(T') − kept − reduces(T')) · bytes(T) / bytes(T') + reduces(T)

bytes: weights and KV that one rank reads. reduces: all all-reduces of a forward. kept: what T does
not change. Where each product is a launch of its own it is all that the forward of fewest rows
loses beyond its floor; where one kernel runs them as a chain, what it loses goes with the bytes,
and a launch is kept alone. T' is the measured number of ranks next to T. Against forwards of H200
that were measured at two T it is within 2% at one row (docs/profile.md).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from mpissd.common.errors import ConfigError
from mpissd.engine.backend.base import Cost
from mpissd.engine.backend.profile import Profile, known_profiles, load_profile
from mpissd.engine.backend.profile_tables import Curve, Forward
from mpissd.engine.model.shard import ForwardOptions, Shard

DERIVED = "derived"  # how the source of such a forward begins
_ITEMSIZE = 2  # bytes of a weight, and of an element that is reduced


def with_derived(
    profile: Profile, shard: Shard, sequences: int, options: ForwardOptions
) -> Profile:
    """The profile with this forward derived, where it was measured at other T alone.

    A profile of rates alone, one that has the forward, and one that has the model at no T stay as
    they are. ConfigError: no all-reduce over T ranks is known.
    """
    forwards, key = profile.tables.forwards, shard.key(sequences, options)
    near = None if key in forwards else _nearest(profile, shard, sequences, options)
    if near is None:
        return profile
    found = derive(profile, near, shard, sequences, options)
    return replace(profile, tables=replace(profile.tables, forwards={**forwards, key: found}))


def derive(
    profile: Profile, near: Shard, shard: Shard, sequences: int, options: ForwardOptions
) -> tuple[Forward, ...]:
    """The forward of `shard`, by every kernel by which that of `near` was measured, at the row
    counts at which it was.

    Sources begin with "derived" and say from what. ConfigError as with_derived.
    """
    params = near.num_params(options)
    measured = profile.tables.forwards[near.key(sequences, options)]
    return tuple(
        _derived(profile, known, near, shard, sequences, options)
        for known in measured
        if known.params == params
    )


def _derived(
    profile: Profile,
    known: Forward,
    near: Shard,
    shard: Shard,
    sequences: int,
    options: ForwardOptions,
) -> Forward:
    """By one kernel."""
    measured = known.seconds
    reduces = _all_reduces_of(profile, shard.tp)
    first = near.cost(measured.points[0], sequences, _ITEMSIZE, options)
    kept = _kept_s(profile, reduces, known, first)
    seconds = tuple(
        _scaled(
            kept,
            reduces,
            near.cost(rows, sequences, _ITEMSIZE, options),
            shard.cost(rows, sequences, _ITEMSIZE, options),
            taken,
        )
        for rows, taken in zip(measured.points, measured.seconds, strict=True)
    )
    source = f"{DERIVED} from T={near.tp} by the bytes of a rank"
    if shard.tp > 1:
        source += f"; all-reduces of profile {reduces.name}: {reduces.sources['all_reduce']}"
    curve = Curve(measured.points, seconds, source)
    return replace(known, params=shard.num_params(options), seconds=curve)


def _kept_s(profile: Profile, reduces: Profile, known: Forward, first: Cost) -> float:
    """Seconds that T does not change; first: of the fewest rows that were measured."""
    floor = profile.floor_s(first)
    if known.most_rows is not None:  # the kernel of few rows is the chain
        return profile.launch_s
    if floor is None:
        return first.num_products * profile.product_overhead_s + profile.launch_s
    return max(0.0, known.seconds.seconds[0] - _all_reduces_s(reduces, first) - floor)


def _scaled(kept: float, reduces: Profile, known: Cost, wanted: Cost, measured_s: float) -> float:
    """The rule of this module, at one row count."""
    alone = measured_s - _all_reduces_s(reduces, known)
    kept = min(alone, kept)
    share = (wanted.weight_bytes + wanted.kv_bytes) / (known.weight_bytes + known.kv_bytes)
    return kept + (alone - kept) * share + _all_reduces_s(reduces, wanted)


def _all_reduces_s(profile: Profile, cost: Cost) -> float:
    return cost.num_all_reduces * profile.all_reduce_s(cost.tp, cost.all_reduce_bytes)


def _nearest(
    profile: Profile, shard: Shard, sequences: int, options: ForwardOptions
) -> Shard | None:
    """The model on the measured number of ranks that is nearest to T by its ratio, if any."""
    found = []
    for tp in sorted({key.tp for key in profile.tables.forwards}):
        try:
            other = replace(shard, tp=tp)
        except ConfigError:  # the model does not divide by it
            continue
        if profile.tables.forward(other.cost(1, sequences, _ITEMSIZE, options)) is not None:
            found.append(other)
    return min(found, key=lambda other: abs(math.log(other.tp / shard.tp)), default=None)


def _all_reduces_of(profile: Profile, ranks: int) -> Profile:
    """Whose all-reduces count: the profile's own, else those of the one that comes along for the
    same device."""
    if ranks == 1 or profile.all_reduce_latency_s is not None:
        return profile
    return next((o for o in same_device(profile) if o.all_reduce_latency_s), profile)


def same_device(profile: Profile) -> tuple[Profile, ...]:
    """The profiles that come along for the device of this one."""
    return tuple(o for o in _built_in() if o.device_name == profile.device_name)


@lru_cache(maxsize=1)
def _built_in() -> tuple[Profile, ...]:
    return tuple(map(load_profile, known_profiles()))
