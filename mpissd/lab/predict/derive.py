"""Derives a job's forwards and host costs from a profile that measured similar ones.

Forwards at a T that was not measured are derived from the same model at a measured T':

    derived(T) = kept + (measured(T') − kept − reduces(T')) · bytes(T) / bytes(T') + reduces(T)

bytes: weights and KV that one rank reads. reduces: seconds of a forward's all-reduces. kept:
seconds that T does not change. If each product is a launch of its own, kept is the time of the
smallest measured forward beyond its floor. If one kernel runs them as a chain, its overhead scales
with the bytes, and kept is one launch. T' is the measured number of ranks nearest to T. For H200
forwards that were measured at two T, the rule is within 2% at one row (docs/profile.md).

If one rank's share of the model at T was measured without all-reduces, that is used instead:

    derived(T) = share(T) + reduces(T)

A transformer of which no T was measured takes its floor, and what a measured transformer takes
beyond its own floor at the nearest T: for each layer at one row, and by the bytes of a rank what
more rows add. The H200's 8B, 70B and 1B, each by another one, are so within 18% up to 16 rows, and
within 45% up to 128.

Host costs come from the most similar method. If a method was measured at several batch sizes b,
each cost is interpolated linearly over b as a Curve, except `keys`: it is interpolated over the
lanes of all sequences, because the fan-out determines them, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.presets import PAIRS
from mpissd.engine.backend.base import Cost, ForwardKey
from mpissd.engine.backend.profile import (
    Curve,
    Forward,
    HostEntry,
    Profile,
    known_profiles,
    load_profile,
)
from mpissd.engine.job import Job
from mpissd.engine.model.shard import ForwardOptions, TransformerShard
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.transformer.sources import config_of
from mpissd.lab.predict.costs import EMULATED_ITEMSIZE, HostCosts

DERIVED = "derived"  # first word in the source of derived times
BY_LAYERS = "beyond its floor as much a layer as"  # in the source of times of another model
METHODS = (("ar", 0), ("sd", 0), ("sd", 1), ("ssd", 1))  # (mode, D)


def with_derived(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> Profile:
    """Returns the profile with this forward added: interpolated, or derived.

    It is derived if it was measured only at other T, or, of a transformer, if only others were. The
    profile is returned unchanged if it has the forward already, or nothing to derive it from.
    Raises ConfigError if no all-reduce over T ranks is known.
    """
    key = shard.key(sequences, options)
    params = shard.num_params(options)
    if key in profile.forwards:
        return profile
    if kernels := profile.kernels(key, params):
        return _with(profile, key, kernels)
    derived = []
    for alone in profile.kernels(key, params, alone=True):
        reduces, share = _all_reduces_of(profile, shard.tp), alone.seconds
        seconds = tuple(
            time + _all_reduces_s(reduces, shard.cost(rows, sequences, EMULATED_ITEMSIZE, options))
            for rows, time in zip(share.points, share.seconds, strict=True)
        )
        source = f"{DERIVED}: one rank's share ({share.source}) and the all-reduces of "
        curve = Curve(share.points, seconds, source + reduces.name)
        derived.append(replace(alone, seconds=curve))
    if not derived:
        others = []  # the model on the numbers of ranks that were measured
        for tp in sorted({measured.tp for measured in profile.forwards}):
            try:
                other = replace(shard, tp=tp)
            except ConfigError:  # the model cannot be divided among so many ranks
                continue
            if profile.measured(other.cost(1, sequences, EMULATED_ITEMSIZE, options)) is not None:
                others.append(other)
        if not others:
            alike = _by_layers(profile, shard, sequences, options)
            return profile if alike is None else _with(profile, key, [alike])
        near = min(others, key=lambda other: abs(math.log(other.tp / shard.tp)))
        derived = derive(profile, near, shard, sequences, options)
    return _with(profile, key, derived)


def _with(profile: Profile, key: ForwardKey, forwards: Iterable[Forward]) -> Profile:
    return replace(profile, forwards={**profile.forwards, key: tuple(forwards)})


def _by_layers(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> Forward | None:
    """Derives a transformer's forward from its floor, and what another one takes beyond its own.

    The other model is the one measured at the nearest T, and of those the nearest in size. Returns
    None for products, and if no other transformer or no rate is known.
    """
    others, size = [], shard.num_params(options)
    for key, (kernel, *_) in (*profile.forwards.items(), *profile.shards.items()):
        if key.sequences and not kernel.seconds.source.startswith(DERIVED):
            with suppress(ConfigError):  # a model that is not here any more
                others.append(TransformerShard(config_of(key.model), key.tp))
    if not isinstance(shard, TransformerShard) or not others:
        return None

    def distance(other: TransformerShard) -> tuple[float, float]:
        return abs(math.log(other.tp / shard.tp)), abs(math.log(other.num_params(options) / size))

    def parts_s(each: AnyShard, rows: int) -> tuple[float, float, float]:
        cost = each.cost(rows, sequences, EMULATED_ITEMSIZE, options)
        curve, reduces = known.measured(cost), _all_reduces_of(profile, each.tp)
        seconds = math.inf if curve is None else curve(rows)
        return seconds, profile.floor_s(cost) or math.inf, _all_reduces_s(reduces, cost)

    other = min(others, key=distance)
    known = with_derived(profile, other, sequences, options)
    deeper = shard.shape.num_layers / other.shape.num_layers
    larger = size / other.num_params(options)
    times, first = dict[int, float](), math.nan
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        seconds, floor, reduces = parts_s(other, rows)
        beyond = seconds - floor - reduces
        first = beyond if rows == 1 else first
        _, floor, reduces = parts_s(shard, rows)
        times[rows] = floor + max(0.0, deeper * first + larger * (beyond - first)) + reduces
    if not all(map(math.isfinite, times.values())):
        return None
    source = f"{DERIVED}: {shard.shape.name} was not measured; it takes {BY_LAYERS} "
    source += f"{other.shape.name} at T={other.tp}"
    return Forward(size, Curve(tuple(times), tuple(times.values()), source), "whole")


def derive(
    profile: Profile, near: AnyShard, shard: AnyShard, sequences: int, options: ForwardOptions
) -> list[Forward]:
    """Derives the forwards of `shard` from `near`'s, the same model on other ranks.

    There is one for each kernel that `near` was measured with, at the same row counts. Their
    sources begin with "derived" and name their origin. Raises ConfigError as with_derived does.
    """
    reduces, derived = _all_reduces_of(profile, shard.tp), []
    source = f"{DERIVED} from T={near.tp} by the bytes of a rank"
    if shard.tp > 1:
        source += f"; all-reduces of profile {reduces.name}: {reduces.sources['all_reduce']}"
    for known in profile.kernels(near.key(sequences, options), near.num_params(options)):
        points, times = known.seconds.points, list[float]()
        first = near.cost(points[0], sequences, EMULATED_ITEMSIZE, options)
        floor = profile.floor_s(first)
        if known.most_rows is not None:  # only the chain kernel, for few rows, has a limit
            unchanged = profile.launch_s
        elif floor is None:
            unchanged = first.num_products * profile.product_overhead_s + profile.launch_s
        else:
            unchanged = max(0.0, known.seconds.seconds[0] - _all_reduces_s(reduces, first) - floor)
        for rows, measured_s in zip(points, known.seconds.seconds, strict=True):
            there = near.cost(rows, sequences, EMULATED_ITEMSIZE, options)
            here = shard.cost(rows, sequences, EMULATED_ITEMSIZE, options)
            alone_s = measured_s - _all_reduces_s(reduces, there)
            kept = min(alone_s, unchanged)
            share = (here.weight_bytes + here.kv_bytes) / (there.weight_bytes + there.kv_bytes)
            times.append(kept + (alone_s - kept) * share + _all_reduces_s(reduces, here))
        curve = Curve(points, tuple(times), source)
        derived.append(replace(known, params=shard.num_params(options), seconds=curve))
    return derived


def _all_reduces_s(profile: Profile, cost: Cost) -> float:
    return cost.num_all_reduces * profile.all_reduce_s(cost.tp, cost.all_reduce_bytes)


def _all_reduces_of(profile: Profile, ranks: int) -> Profile:
    """Returns this profile if it has all-reduces, or a built-in one of its device that has."""
    if ranks == 1 or profile.all_reduce_latency_s is not None:
        return profile
    other = shipped_profiles().get(profile.kind)
    return profile if other is None or not other.all_reduce_latency_s else other


@lru_cache(maxsize=1)
def shipped_profiles() -> dict[str, Profile]:
    """Returns the built-in profile of each kind of device."""
    return {profile.kind: profile for profile in map(load_profile, known_profiles())}


def with_hosts(profile: Profile) -> Profile:
    """Returns the profile with host costs for every method that has been measured on its device.

    Methods missing from this profile are taken from the built-in profile of the same device and
    labelled "derived". A profile without any host costs is returned unchanged: it treats the host's
    work as free.
    """
    other = shipped_profiles().get(profile.kind)
    if not profile.hosts or other is None:
        return profile
    added = [
        replace(entry, source=f"{DERIVED} from profile {other.name}: {entry.source}")
        for mode, drafts in METHODS
        if not _entries(profile, mode, drafts)
        for entry in _entries(other, mode, drafts)
    ]
    return replace(profile, hosts=(*profile.hosts, *added)) if added else profile


def _entries(profile: Profile, mode: str, drafts: int) -> list[HostEntry]:
    """Returns the host costs of a mode with the draft in the same place (D > 0 or not)."""
    return [e for e in profile.hosts if (e.mode, e.num_drafts > 0) == (mode, drafts > 0)]


def entry_of(profile: Profile, job: Job) -> HostEntry | None:
    """Returns the entry of the job's mode whose T, then b, then K are nearest, or None.

    A transformer's own entries hold only at the same T, and without a draft rank at any: a GPU
    chains such rounds without the host. Without one, a transformer uses the entries of products,
    and products use a transformer's.
    """
    config = job.config
    alike = _entries(profile, config.mode, config.drafts)
    whole = [entry for entry in alike if entry.forward == "transformer"]
    products = [entry for entry in alike if entry.forward == "gemm"]
    own = [entry for entry in whole if entry.tp == job.tp or not config.drafts]
    own = own if config.is_transformer else products

    def distance(entry: HostEntry) -> tuple[int, float, int]:
        ratio = abs(math.log2(entry.batch_size / config.batch_size))
        return abs(entry.tp - job.tp), ratio, abs(entry.lookahead - job.lookahead)

    return min(own or products or whole, key=distance, default=None)


def host_of(profile: Profile, job: Job) -> HostCosts:
    """Returns a job's host costs from the profile (with_hosts); zero costs if none are known."""
    profile = with_hosts(profile)
    context = job.options.context if job.config.is_transformer else 0
    return costs_at(profile, entry_of(profile, job), job.config.batch_size, context)


def costs_at(
    profile: Profile, entry: HostEntry | None, batch_size: int, context: int = 0
) -> HostCosts:
    """Returns a round's host costs at a batch of b sequences, interpolated between profile entries.

    Uses the entries that differ from `entry` only in b and in a transformer's context; interpolates
    over b first, then over the context. Without an entry all costs are zero. Raises ConfigError
    for a missing or unknown field.
    """
    if entry is None:
        return HostCosts()

    def method(each: HostEntry) -> tuple[str | int, ...]:
        return each.mode, each.tp, each.num_drafts, each.lookahead, each.lanes, each.forward

    alike: dict[int, dict[int, HostEntry]] = {}
    for each in profile.hosts:
        if method(each) == method(entry):
            alike.setdefault(each.context, {})[each.batch_size] = each
    by_context: dict[int, dict[str, float]] = {}
    for past, by_batch in sorted(alike.items()):
        entries = [by_batch[batch] for batch in sorted(by_batch)]
        batches = tuple(each.batch_size for each in entries)
        costs = {
            name: Curve(batches, tuple(each.seconds[name] for each in entries))(batch_size)
            for name in entries[0].seconds
            if all(name in each.seconds for each in entries)
        }
        least, most = entries[0], entries[-1]
        lanes = most.lanes * (most.batch_size - least.batch_size)
        if lanes:  # a line through two entries: the host's seconds for `keys`, and for a lane
            slope = max(0.0, most.seconds["keys"] - least.seconds["keys"]) / lanes
            none = least.seconds["keys"] - slope * least.lanes * least.batch_size
            costs |= {"keys": max(0.0, none), "keys_lane": slope}
        by_context[past] = HostCosts.from_dict(costs).to_dict()
    points, names = tuple(past + 1 for past in by_context), next(iter(by_context.values()))
    return HostCosts.from_dict(
        {n: Curve(points, tuple(c[n] for c in by_context.values()))(context + 1) for n in names}
    )


def check_device(profile: Profile, job: Job, draft_profile: Profile | None = None) -> None:
    """Raises ConfigError if a probed profile has no forwards of the job's models.

    A built-in profile (h100, h200, …) models any pair. draft_profile: the profile of the draft
    ranks' devices, if they differ.
    """
    batch = job.config.batch_size
    for known, need in zip((profile, draft_profile or profile), job.needs, strict=False):
        if known.forwards and not known.models_others:
            known.require(need.shard.key(batch, need.options), need.shard.num_params(need.options))


def covered(profile: Profile, forward: str | None = None) -> dict[str, Any]:
    """Returns the flags that a probed profile implies if the user sets none.

    These are pair, and fuse and lm_head, or forward. Each is included if all measured forwards
    agree on it; pair only if the profile does not model every pair. forward: if the user set it,
    only forwards of that kind count.
    """
    measured = [
        key
        for key, kinds in profile.forwards.items()
        if not any(known.seconds.source.startswith(DERIVED) for known in kinds)
        and forward in (None, "transformer" if key.sequences else "gemm")
    ]
    if forward is None and not all(key.sequences for key in measured):
        measured = [key for key in measured if not key.sequences]  # runs are of products by default
    models = {key.model for key in measured}
    pairs = [pair for pair, names in PAIRS.items() if set(names) <= models]
    flags: dict[str, Any] = {"pair": pairs[0]} if pairs and not profile.models_others else {}
    if any(key.sequences for key in measured):
        return {**flags, "forward": "transformer"}
    for name in ("fuse", "lm_head"):
        values = {getattr(key, name) for key in measured}
        if len(values) == 1:
            flags[name] = values.pop()
    return flags


def derived_from(profile: Profile, drafts: Profile, job: Job) -> str | None:
    """Returns the origin of a job's derived times, as text beginning with "derived", or None.

    profile: the target's, including its forward (with_derived), and the hosts'. drafts: the draft
    device's. A forward is derived if its table is marked so, if its table ends before the job's
    rows, or if the profile was measured but lacks this forward. On a modelled device it is derived
    if the all-reduces are. Host costs are derived from another T or by a stated rule, or are not
    known at all, unless the profile has none.
    """
    sources = [*_forward(profile, job.target_shard, job.options, job.target_buckets()[-1], job)]
    if job.draft_shard is not None and not job.config.is_lookup:
        rows = job.draft_buckets()[-1]
        sources += _forward(drafts, job.draft_shard, job.draft_options, rows, job)
    forwards = "; ".join(dict.fromkeys(sources))
    entry = entry_of(with_hosts(profile), job) if profile.hosts else None
    host = ""
    if entry is not None:
        if entry.source.startswith(DERIVED):
            host = entry.source
        elif entry.tp != job.tp:
            host = f"{DERIVED}: host costs of T={entry.tp}"
        elif job.config.is_transformer != (entry.forward == "transformer"):
            host = f"{DERIVED}: host costs of products for whole transformers"
    elif profile.hosts:
        host = f"{DERIVED}: host costs of {job.config.mode} are not known"
    return "; ".join(filter(None, (forwards, host))) or None


def _forward(
    known: Profile, shard: AnyShard, options: ForwardOptions, rows: int, job: Job
) -> Iterator[str]:
    """Yields a forward's origin if it is derived, neither measured nor modelled."""
    batch = job.config.batch_size
    cost = shard.cost(rows, batch, EMULATED_ITEMSIZE, options)
    curve, lists = known.measured(cost), max(known.candidates(cost), default=1)
    source = known.sources["all_reduce"] if curve is None else curve.source
    if source.startswith(DERIVED):
        yield source
    elif curve is not None and rows > curve.points[-1]:
        beyond = f"{rows} rows of {shard.shape.name}, measured up to {curve.points[-1]}"
        yield f"{DERIVED}: {beyond}"
    elif curve is not None and options.top_k > lists:
        beyond = f"{options.top_k} candidates a row of {shard.shape.name}, measured with"
        yield f"{DERIVED}: {beyond} {lists}, which takes less time"
    elif curve is None and known.forwards:
        yield f"{DERIVED}: {shard.key(batch, options)} not measured, by the profile's numbers"
