"""Finds a job's durations (forwards, host work) in a device profile, or derives them from others.

docs/profile.md has the rules for numbers of target ranks T that were not measured, and the errors
of these rules. Host work is taken from the most similar mode. If that was measured at several batch
sizes, each duration is interpolated linearly over the batch size. Only `keys`, the choice of
bonus-token candidates, is interpolated over the number of branches of the whole batch.
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

DERIVED = "derived"  # first word of the text that says how a duration was derived
BY_LAYERS = "beyond its floor as much a layer as"  # in texts on times derived from another model
METHODS = (("ar", 0), ("sd", 0), ("sd", 1), ("ssd", 1))  # (mode, number of draft ranks D)


def with_models(profile: Profile, job: Job) -> Profile:
    """Returns the profile with the forwards of a job's target and draft added, as far as they were
    not measured and can be derived."""
    for need in job.needs:
        profile = with_derived(profile, need.shard, job.config.batch_size, need.options)
    return profile


def with_derived(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> Profile:
    """Returns the profile with the forwards of one model shard added, or unchanged if they were
    measured or cannot be derived. The rules, in this order: interpolate between measured contexts
    and batch sizes; add all-reduces to the share that one rank measured alone; scale the same model
    at another T; scale another transformer. sequences: batch size. Raises ConfigError if a rule
    needs the time of all-reduces over T ranks, but it is unknown."""
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
    """Returns forwards derived from one rank's share of the model, which was measured alone, plus
    the time of the all-reduces; empty if no such share was measured."""
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
    """Returns forwards derived from the same model at the nearest measured T; empty if the model
    was measured at no T."""
    others = []
    for tp in sorted({measured.tp for measured in profile.forwards}):
        with suppress(ConfigError):  # raised if the model cannot be divided over so many ranks
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
    """Returns a transformer's forwards derived from another transformer, the one measured at the
    nearest T and nearest in size. The floor of a forward is the time to read its bytes or compute
    its flops. The other model's time beyond its floor is scaled: by the number of layers for one
    row, by the size of a rank's weights for further rows. Empty for models of bare matrix products,
    and if no other transformer or no rate is known."""
    others = []
    for key, (kernel, *_) in (*profile.forwards.items(), *profile.shards.items()):
        if key.sequences and not kernel.seconds.source.startswith(DERIVED):
            with suppress(ConfigError):  # raised if the model's files are not here any more
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
    """Returns the forwards of `shard`, for each kernel, derived from the measured forwards of
    `near`, the same model at another T:

        derived = kept + (measured − kept − near's all-reduces) · bytes / near's bytes + all-reduces

    bytes: weights and KV that one rank reads. kept: the time that does not depend on T. If each
    matrix product is a kernel launch of its own, kept is what the smallest measured forward takes
    beyond reading its bytes. If one kernel computes all products, kept is one launch.
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
        if kernel.most_rows is not None:  # Only the kernel that runs all products has a row limit.
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
    """Returns the profile that gives the time of all-reduces: `profile` itself, or the built-in
    profile of the same device if only that one has them."""
    if ranks == 1 or profile.all_reduce_latency_s is not None:
        return profile
    other = shipped_profiles().get(profile.kind)
    return profile if other is None or not other.all_reduce_latency_s else other


def is_datasheet(profile: Profile) -> bool:
    """Returns whether a profile comes from a datasheet, so that nothing in it was measured."""
    return profile.sources["read_bytes_per_s"].startswith("datasheet")


@lru_cache(maxsize=1)
def shipped_profiles() -> dict[str, Profile]:
    """Returns {kind of device: its built-in profile}."""
    return {profile.kind: profile for profile in map(load_profile, known_profiles())}


def with_hosts(profile: Profile) -> Profile:
    """Returns the profile with host costs (durations of host work) added for modes that it lacks,
    from the built-in profile of the same device; added entries are labelled "derived". A profile
    without any host costs is returned unchanged: host work is then free."""
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
    """Returns the profile's host costs of a mode, with the draft on ranks of its own (drafts > 0)
    or on the target's."""
    return [e for e in profile.hosts if (e.mode, e.num_drafts > 0) == (mode, drafts > 0)]


def entry_of(profile: Profile, job: Job) -> HostEntry | None:
    """Returns the host costs in `profile` that are most similar to the job: of the same mode, with
    the nearest T, then batch size, then K; or None. A transformer uses a transformer's costs only
    at the same T, or at any T without a draft rank, because a GPU runs such rounds without the
    host. Without such costs a transformer uses those of bare matrix products, and vice versa."""
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
    """Returns a job's host costs by the profile, or by the built-in profile of its device; all
    costs are 0 if they are unknown."""
    profile = with_hosts(profile)
    context = job.options.context if job.config.is_transformer else 0
    return costs_at(profile, entry_of(profile, job), job.config.batch_size, context)


def costs_at(
    profile: Profile, entry: HostEntry | None, batch_size: int, context: int = 0
) -> HostCosts:
    """Returns a round's host costs at this batch size and context, interpolated between the
    profile's entries that differ from `entry` only in these two: first over the batch size, then
    over the context. If `entry` is None, all costs are 0. Raises ConfigError for wrong fields."""
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
        if branches:  # A line through two entries gives the fixed cost `keys` and that of a branch.
            slope = max(0.0, last.seconds["keys"] - first.seconds["keys"]) / branches
            without = first.seconds["keys"] - slope * first.lanes * first.batch_size
            costs |= {"keys": max(0.0, without), "keys_lane": slope}
        by_context[length] = vars(HostCosts.from_dict(costs))
    points = tuple(length + 1 for length in by_context)  # + 1, since a curve may not begin at 0
    costs = {
        name: Curve(points, tuple(of[name] for of in by_context.values()))(context + 1)
        for name in vars(HostCosts())
    }
    return HostCosts(**costs)


def check_device(profile: Profile, job: Job, draft_profile: Profile | None = None) -> None:
    """Raises ConfigError if a profile made by `probe` lacks the forwards of the job's models. A
    built-in profile (h100, h200, …) models any pair. draft_profile: the profile of the draft ranks'
    device, if it is another one."""
    batch = job.config.batch_size
    for device, need in zip((profile, draft_profile or profile), job.needs, strict=False):
        if device.forwards and not device.models_others:
            key = need.shard.key(batch, need.options)
            device.require(key, need.shard.num_params(need.options))


def covered(profile: Profile, forward: str | None = None) -> dict[str, Any]:
    """Returns {flag: value} that a profile implies where the user sets no flag, so that it covers
    the run: `pair`, and either `fuse` and `lm_head`, or `forward`. A flag is included if all
    measured forwards agree on it, and `pair` only if the profile does not model every pair.
    forward: "gemm" or "transformer", if only forwards of that kind count."""
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
    """Returns a text that begins with "derived" and says how a job's durations were derived; None
    if all were measured. profile: of the target's device and the hosts. drafts: the profile of the
    draft's device. A forward counts as derived if the profile says so, if fewer rows were measured
    than the job has, or if the profile lacks it. Host costs count as derived if they come from
    another T, another kind of model or another profile."""
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
    """Yields a text on how the duration of a model's largest forward was derived, if it was."""
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
