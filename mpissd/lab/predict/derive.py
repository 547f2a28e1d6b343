"""Derives a job's forwards and host costs from a profile that measured similar ones.

docs/profile.md has the rules for a T that was not measured, and their errors against rows. Host
costs come from the most similar method. If a method was measured at several batch sizes b, each
cost is interpolated linearly over b, except `keys`: it is interpolated over the branches of all
sequences, because the fan-out determines them, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.presets import PAIRS
from mpissd.engine.backend.base import Cost
from mpissd.engine.backend.profile import (
    Curve,
    Forward,
    HostEntry,
    Profile,
    known_profiles,
    load_profile,
)
from mpissd.engine.job import Job, Need
from mpissd.engine.model.shard import ForwardOptions, TransformerShard
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.transformer.sources import config_of
from mpissd.lab.predict.costs import EMULATED_ITEMSIZE, HostCosts

DERIVED = "derived"  # first word in the source of derived times
BY_LAYERS = "beyond its floor as much a layer as"  # in the source of times of another model
METHODS = (("ar", 0), ("sd", 0), ("sd", 1), ("ssd", 1))  # (mode, D)


def with_models(profile: Profile, job: Job) -> Profile:
    """Returns the profile with the derived forwards of a job's target and draft."""
    for need in job.needs:
        profile = with_derived(profile, need.shard, job.config.batch_size, need.options)
    return profile


def with_derived(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> Profile:
    """Returns the profile with this forward added, unless it has it or nothing to derive it from.
    It is interpolated; or it is one rank's measured share with the all-reduces added; or derived
    from the same model at another T; or, of a transformer, from another model. Raises ConfigError
    if no all-reduce over T ranks is known."""
    key = shard.key(sequences, options)
    if key in profile.forwards:
        return profile
    added = (
        profile.kernels(key, shard.num_params(options))
        or _of_shares(profile, shard, sequences, options)
        or _of_other_ranks(profile, shard, sequences, options)
        or _of_other_models(profile, shard, sequences, options)
    )
    return replace(profile, forwards={**profile.forwards, key: tuple(added)}) if added else profile


def _of_shares(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> list[Forward]:
    """Derives forwards from one rank's share of the model, measured without all-reduces."""
    derived = []
    key = shard.key(sequences, options)
    for alone in profile.kernels(key, shard.num_params(options), alone=True):
        reduces = _all_reduces_of(profile, shard.tp)
        share = alone.seconds
        seconds = tuple(
            time + _all_reduces_s(reduces, shard.cost(rows, sequences, EMULATED_ITEMSIZE, options))
            for rows, time in zip(share.points, share.seconds, strict=True)
        )
        source = f"{DERIVED}: one rank's share ({share.source}) and the all-reduces of "
        derived.append(replace(alone, seconds=Curve(share.points, seconds, source + reduces.name)))
    return derived


def _of_other_ranks(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> list[Forward]:
    """Derives forwards from the same model at the measured T that is nearest."""
    others = []
    for tp in sorted({measured.tp for measured in profile.forwards}):
        with suppress(ConfigError):  # the model cannot be divided among so many ranks
            other = replace(shard, tp=tp)
            cost = other.cost(1, sequences, EMULATED_ITEMSIZE, options)
            if profile.measured(cost) is not None:
                others.append(other)
    if not others:
        return []
    near = min(others, key=lambda other: abs(math.log(other.tp / shard.tp)))
    return derive(profile, near, shard, sequences, options)


def _of_other_models(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> list[Forward]:
    """Derives a transformer's forward from its floor, and what another one takes beyond its own.
    One row takes as much more for each layer, and further rows by the bytes of a rank. The other
    model is the one measured at the nearest T, and of those the nearest in size. The result is
    empty for products, and if no other transformer or no rate is known."""
    others = []
    for key, (kernel, *_) in (*profile.forwards.items(), *profile.shards.items()):
        if key.sequences and not kernel.seconds.source.startswith(DERIVED):
            with suppress(ConfigError):  # a model that is not here any more
                others.append(TransformerShard(config_of(key.model), key.tp))
    if not isinstance(shard, TransformerShard) or not others:
        return []
    size = shard.num_params(options)

    def distance(other: TransformerShard) -> tuple[float, float]:
        return abs(math.log(other.tp / shard.tp)), abs(math.log(other.num_params(options) / size))

    other = min(others, key=distance)
    measured = with_derived(profile, other, sequences, options)

    def reduces_s(cost: Cost) -> float:
        return _all_reduces_s(_all_reduces_of(profile, cost.tp), cost)

    deeper = shard.shape.num_layers / other.shape.num_layers
    larger = size / other.num_params(options)
    times: dict[int, float] = {}
    first = math.nan
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        there = other.cost(rows, sequences, EMULATED_ITEMSIZE, options)
        here = shard.cost(rows, sequences, EMULATED_ITEMSIZE, options)
        curve = measured.measured(there)
        seconds = math.inf if curve is None else curve(rows)
        beyond = seconds - (profile.floor_s(there) or math.inf) - reduces_s(there)
        first = beyond if rows == 1 else first
        further = max(0.0, deeper * first + larger * (beyond - first))
        times[rows] = (profile.floor_s(here) or math.inf) + further + reduces_s(here)
    if not all(map(math.isfinite, times.values())):
        return []
    source = f"{DERIVED}: {shard.shape.name} was not measured; it takes {BY_LAYERS} "
    source += f"{other.shape.name} at T={other.tp}"
    return [Forward(size, Curve(tuple(times), tuple(times.values()), source), "whole")]


def derive(
    profile: Profile, near: AnyShard, shard: AnyShard, sequences: int, options: ForwardOptions
) -> list[Forward]:
    """Derives the forwards of `shard`, by kernel, from those of `near`, its model at another T:

        derived = kept + (measured − kept − near's all-reduces) · bytes / near's bytes + all-reduces

    bytes: weights and KV that one rank reads. kept: seconds that T does not change. If each product
    is a launch of its own, kept is the time of the smallest measured forward beyond its floor. If
    one kernel runs them all, its overhead scales with the bytes, and kept is one launch.
    """
    reduces = _all_reduces_of(profile, shard.tp)
    source = f"{DERIVED} from T={near.tp} by the bytes of a rank"
    if shard.tp > 1:
        source += f"; all-reduces of profile {reduces.name}: {reduces.sources['all_reduce']}"
    derived = []
    for kernel in profile.kernels(near.key(sequences, options), near.num_params(options)):
        curve = kernel.seconds
        first = near.cost(curve.points[0], sequences, EMULATED_ITEMSIZE, options)
        floor = profile.floor_s(first)
        if kernel.most_rows is not None:  # only the chain kernel, for few rows, has a limit
            unchanged = profile.launch_s
        elif floor is None:
            unchanged = first.num_products * profile.product_overhead_s + profile.launch_s
        else:
            unchanged = max(0.0, curve.seconds[0] - _all_reduces_s(reduces, first) - floor)
        times = []
        for rows, measured_s in zip(curve.points, curve.seconds, strict=True):
            there = near.cost(rows, sequences, EMULATED_ITEMSIZE, options)
            here = shard.cost(rows, sequences, EMULATED_ITEMSIZE, options)
            alone_s = measured_s - _all_reduces_s(reduces, there)
            kept = min(alone_s, unchanged)
            share = (here.weight_bytes + here.kv_bytes) / (there.weight_bytes + there.kv_bytes)
            times.append(kept + (alone_s - kept) * share + _all_reduces_s(reduces, here))
        seconds = Curve(curve.points, tuple(times), source)
        derived.append(replace(kernel, params=shard.num_params(options), seconds=seconds))
    return derived


def _all_reduces_s(profile: Profile, cost: Cost) -> float:
    return cost.num_all_reduces * profile.all_reduce_s(cost.tp, cost.all_reduce_bytes)


def _all_reduces_of(profile: Profile, ranks: int) -> Profile:
    """Returns this profile if it has all-reduces, or a built-in one of its device that has."""
    if ranks == 1 or profile.all_reduce_latency_s is not None:
        return profile
    other = shipped_profiles().get(profile.kind)
    return profile if other is None or not other.all_reduce_latency_s else other


def is_datasheet(profile: Profile) -> bool:
    """Returns whether nothing of a profile was measured."""
    return profile.sources["read_bytes_per_s"].startswith("datasheet")


@lru_cache(maxsize=1)
def shipped_profiles() -> dict[str, Profile]:
    """Returns the built-in profile of each kind of device."""
    return {profile.kind: profile for profile in map(load_profile, known_profiles())}


def with_hosts(profile: Profile) -> Profile:
    """Returns the profile with host costs for every method that has been measured on its device.
    Methods missing from this profile are taken from the built-in profile of the same device and
    labelled "derived". A profile without any host costs is returned as it is: the host's work is
    free."""
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
    """Returns the entry of the job's mode whose T, then b, then K are nearest, or None. A
    transformer's entries hold for a transformer only at the same T, and without a draft rank at
    any: a GPU runs such rounds without the host. Without such an entry a transformer uses those of
    products, and products use a transformer's."""
    config = job.config
    alike = _entries(profile, config.mode, config.drafts)
    transformers = [entry for entry in alike if entry.forward == "transformer"]
    products = [entry for entry in alike if entry.forward == "gemm"]
    same = products
    if config.is_transformer:
        same = [entry for entry in transformers if entry.tp == job.tp or not config.drafts]

    def distance(entry: HostEntry) -> tuple[int, float, int]:
        ratio = abs(math.log2(entry.batch_size / config.batch_size))
        return abs(entry.tp - job.tp), ratio, abs(entry.lookahead - job.lookahead)

    return min(same or products or transformers, key=distance, default=None)


def host_of(profile: Profile, job: Job) -> HostCosts:
    """Returns a job's host costs from the profile, or its device's built-in one; 0 if unknown."""
    profile = with_hosts(profile)
    context = job.options.context if job.config.is_transformer else 0
    return costs_at(profile, entry_of(profile, job), job.config.batch_size, context)


def costs_at(
    profile: Profile, entry: HostEntry | None, batch_size: int, context: int = 0
) -> HostCosts:
    """Returns a round's host costs at a batch of b sequences, interpolated between profile entries.
    Uses the entries that differ from `entry` only in b and in a transformer's context; interpolates
    over b first, then over the context. Without an entry all costs are zero. Raises ConfigError for
    wrong fields."""
    if entry is None:
        return HostCosts()

    alike: dict[int, dict[int, HostEntry]] = {}
    for other in profile.hosts:
        like = replace(entry, batch_size=other.batch_size, context=other.context)
        if replace(like, seconds=other.seconds, source=other.source) == other:
            alike.setdefault(other.context, {})[other.batch_size] = other
    by_context: dict[int, dict[str, float]] = {}
    for length, by_batch in sorted(alike.items()):
        batches = tuple(sorted(by_batch))
        first = by_batch[batches[0]]
        last = by_batch[batches[-1]]
        seconds = [by_batch[batch].seconds for batch in batches]
        costs = {
            name: Curve(batches, tuple(measured[name] for measured in seconds))(batch_size)
            for name in first.seconds
            if all(name in measured for measured in seconds)
        }
        branches = last.lanes * (last.batch_size - first.batch_size)
        if branches:  # a line through two entries: the host's seconds for `keys`, and for a branch
            slope = max(0.0, last.seconds["keys"] - first.seconds["keys"]) / branches
            without = first.seconds["keys"] - slope * first.lanes * first.batch_size
            costs |= {"keys": max(0.0, without), "keys_lane": slope}
        by_context[length] = vars(HostCosts.from_dict(costs))
    points = tuple(length + 1 for length in by_context)  # a curve has no point 0
    costs = {
        name: Curve(points, tuple(of[name] for of in by_context.values()))(context + 1)
        for name in vars(HostCosts())
    }
    return HostCosts(**costs)


def check_device(profile: Profile, job: Job, draft_profile: Profile | None = None) -> None:
    """Raises ConfigError if a probed profile has no forwards of the job's models. A built-in
    profile (h100, h200, …) models any pair. draft_profile: of the draft ranks, if it differs."""
    batch = job.config.batch_size
    for device, need in zip((profile, draft_profile or profile), job.needs, strict=False):
        if device.forwards and not device.models_others:
            key = need.shard.key(batch, need.options)
            device.require(key, need.shard.num_params(need.options))


def covered(profile: Profile, forward: str | None = None) -> dict[str, Any]:
    """Returns the flags that a probed profile implies if the user sets none. These are pair, and
    fuse and lm_head, or forward. Each is included if all measured forwards agree on it; pair only
    if the profile does not model every pair. forward: if set, only forwards of that kind count."""
    measured = [
        key
        for key, kernels in profile.forwards.items()
        if not any(kernel.seconds.source.startswith(DERIVED) for kernel in kernels)
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
    profile: of the target's device, with its forward, and of the hosts. drafts: of the draft's
    device. A forward is derived if its table is marked so, if its table ends before the job's rows,
    or if the profile was measured but lacks this forward. On a modelled device it is derived if the
    all-reduces are. Host costs are derived from another T or by a stated rule, or are not known at
    all, unless the profile has none."""
    batch = job.config.batch_size
    needs = job.needs[:1] if job.config.is_lookup else job.needs
    models = zip((profile, drafts), needs, strict=False)
    sources = [source for device, need in models for source in _forward(device, need, batch)]
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


def _forward(profile: Profile, need: Need, sequences: int) -> Iterator[str]:
    """Yields the origin of a model's largest forward if it is derived."""
    shard = need.shard
    rows = need.buckets[-1]
    cost = shard.cost(rows, sequences, EMULATED_ITEMSIZE, need.options)
    curve = profile.measured(cost)
    lists = max(profile.candidates(cost), default=1)
    source = profile.sources["all_reduce"] if curve is None else curve.source
    if source.startswith(DERIVED):
        yield source
    elif curve is not None and rows > curve.points[-1]:
        beyond = f"{rows} rows of {shard.shape.name}, measured up to {curve.points[-1]}"
        yield f"{DERIVED}: {beyond}"
    elif curve is not None and need.options.top_k > lists:
        beyond = f"{need.options.top_k} candidates a row of {shard.shape.name}, measured with"
        yield f"{DERIVED}: {beyond} {lists}, which takes less time"
    elif curve is None and profile.forwards:
        key = shard.key(sequences, need.options)
        yield f"{DERIVED}: {key} not measured, by the profile's numbers"
