"""Finds a job's durations of forwards and host work in a profile, or derives them from others.

Forwards on a number of target ranks T that was not measured follow the rules in docs/profile.md,
which has their errors. Host work is taken from the most similar mode. If that was measured at
several batch sizes, each duration is interpolated linearly over the batch size; but the time to
choose candidates for the next token (`keys`) depends on the branches of the whole batch.
"""

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

DERIVED = "derived"  # A text on how a duration was derived begins with this word.
BY_LAYERS = "beyond its floor as much a layer as"  # in texts on times that another model gave
# Up to so many rows are one kernel (whole.cu), whose all-reduces take 1.2 us less (H200, T = 2).
_ONE_KERNEL_ROWS = 24
_WITHIN_S = 1.2e-6
METHODS = (("ar", 0), ("sd", 0), ("sd", 1), ("ssd", 1))  # (mode, draft ranks) with host costs


def with_models(profile: Profile, job: Job) -> Profile:
    """Returns the profile with the forwards of a job's target and draft model added, where they
    were not measured but can be derived from measured ones."""
    for need in job.needs:
        profile = with_derived(profile, need.shard, job.config.batch_size, need.options)
    return profile


def with_derived(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> Profile:
    """Returns the profile with the forwards of one model shard added; unchanged if these were
    measured or cannot be derived. The first rule that applies is taken: interpolate between
    measured contexts and batch sizes; add all-reduces to the share that one rank measured alone;
    scale the same model on another number of ranks; scale another transformer. sequences: batch
    size. Raises ConfigError if a rule needs the duration of all-reduces, but that is unknown."""
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
    """Returns the forwards of a model shard, derived from measurements in which one rank computed
    such a share alone, by adding the duration of the all-reduces; [] if it was not measured. Within
    one kernel, one-shot all-reduces of any rows are taken to last their latency less _WITHIN_S."""
    derived = []
    key = shard.key(sequences, options)
    for alone in profile.kernels(key, shard.num_params(options), alone=True):
        reduces = all_reduces_of(profile, shard.tp)
        share = alone.seconds
        is_one = alone.kernel == "whole" and "oneshot" in reduces.sources["all_reduce"]
        seconds = list[float]()
        for rows, time in zip(share.points, share.seconds, strict=True):
            cost = shard.cost(rows, sequences, EMULATED_ITEMSIZE, options)
            within = 2 * shard.shape.num_layers if is_one and rows <= _ONE_KERNEL_ROWS else 0
            beside = replace(cost, num_all_reduces=cost.num_all_reduces - within)
            least_s = max(0.0, reduces.all_reduce_s(shard.tp, 0) - _WITHIN_S)
            seconds.append(time + within * least_s + _all_reduces_s(reduces, beside))
        parts = f"one rank's share ({share.source}) and the all-reduces of {reduces.name}"
        curve = Curve(share.points, tuple(seconds), f"{DERIVED}: {parts}")
        derived.append(replace(alone, seconds=curve))
    return derived


def _of_other_ranks(
    profile: Profile, shard: AnyShard, sequences: int, options: ForwardOptions
) -> list[Forward]:
    """Returns the forwards of a model shard, derived from those of the same model on the nearest
    number of ranks that was measured; [] if there is none."""
    others = []
    for tp in sorted({measured.tp for measured in profile.forwards}):
        with suppress(ConfigError):  # The model may be too small for so many ranks.
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
    """Returns a transformer's forwards derived from another transformer, measured on the nearest
    number of ranks and, among those, nearest in size. A forward lasts at least the time to read its
    bytes or compute its flops (its floor). The time that the other model takes beyond its floor is
    scaled: for one row by the number of layers, for further rows by the size of a rank's weights.
    Returns [] for bare matrix products, or if no other transformer was measured."""
    others = []
    for key, (kernel, *_) in (*profile.forwards.items(), *profile.shards.items()):
        if key.sequences and not kernel.seconds.source.startswith(DERIVED):
            with suppress(ConfigError):  # The other model's files may have been removed.
                others.append(TransformerShard(config_of(key.model), key.tp))
    if not isinstance(shard, TransformerShard) or not others:
        return []
    size = shard.num_params(options)

    def distance(other: TransformerShard) -> tuple[float, float]:
        return abs(math.log(other.tp / shard.tp)), abs(math.log(other.num_params(options) / size))

    other = min(others, key=distance)
    measured = with_derived(profile, other, sequences, options)

    def reduces_s(cost: Cost) -> float:
        return _all_reduces_s(all_reduces_of(profile, cost.tp), cost)

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
    """Returns the forwards of `shard`, one for each kernel, derived from the measured forwards of
    `near`, which is the same model on another number of target ranks. The rule for each duration:

        derived = kept + (measured − kept − near's all-reduces) · bytes / near's bytes + all-reduces

    Here `bytes` is the size of the weights and KV that one rank reads, and `kept` is the time that
    does not depend on the number of ranks. If each matrix product is a kernel launch of its own,
    `kept` is the time that the smallest measured forward takes beyond reading its bytes. If one
    kernel computes all products, `kept` is the time of one launch.
    """
    reduces = all_reduces_of(profile, shard.tp)
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


def all_reduces_of(profile: Profile, ranks: int) -> Profile:
    """Returns the profile that has the durations of all-reduces: `profile` itself, or the built-in
    profile of the same kind of device if only that one has them."""
    if ranks == 1 or profile.all_reduce_latency_s is not None:
        return profile
    other = shipped_profiles().get(profile.kind)
    return profile if other is None or not other.all_reduce_latency_s else other


def is_datasheet(profile: Profile) -> bool:
    """Returns whether a profile's numbers come from a datasheet, so that nothing was measured."""
    return profile.sources["read_bytes_per_s"].startswith("datasheet")


@lru_cache(maxsize=1)
def shipped_profiles() -> dict[str, Profile]:
    """Returns {kind of device: its built-in profile}."""
    return {profile.kind: profile for profile in map(load_profile, known_profiles())}


def with_hosts(profile: Profile) -> Profile:
    """Returns the profile with durations of host work (host costs) for every mode. Modes that it
    lacks are taken from the built-in profile of the same kind of device and labelled "derived". A
    profile without any host costs is returned unchanged; host work then takes no time."""
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
    """Returns the profile's durations of host work in a mode, measured with draft ranks (drafts >
    0) or with the draft model on the target's ranks (drafts = 0)."""
    return [e for e in profile.hosts if (e.mode, e.num_drafts > 0) == (mode, drafts > 0)]


def entry_of(profile: Profile, job: Job) -> HostEntry | None:
    """Returns the measured host costs in `profile` that are most similar to a job: of its mode,
    with the nearest number of target ranks, then batch size, then K. None if the mode was not
    measured. A job of whole transformers takes costs of transformers only if these have as many
    target ranks, or if there is no draft rank; otherwise it takes costs of bare matrix products.
    Either kind replaces the other if only one was measured."""
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
    """Returns a job's host costs by the profile or, for modes that it lacks, by the built-in
    profile of its device; all are 0 if they are unknown."""
    profile = with_hosts(profile)
    context = job.options.context if job.config.is_transformer else 0
    return costs_at(profile, entry_of(profile, job), job.config.batch_size, context)


def costs_at(
    profile: Profile, entry: HostEntry | None, batch_size: int, context: int = 0
) -> HostCosts:
    """Returns a round's host costs at a batch size and context, interpolated linearly between the
    entries of the profile that differ from `entry` only in these two values. If `entry` is None,
    all costs are 0. Raises ConfigError if an entry has wrong fields."""
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
        if branches:  # The time of `keys` is linear in the number of branches.
            slope = max(0.0, last.seconds["keys"] - first.seconds["keys"]) / branches
            without = first.seconds["keys"] - slope * first.lanes * first.batch_size
            costs |= {"keys": max(0.0, without), "keys_lane": slope}
        by_context[length] = vars(HostCosts.from_dict(costs))
    points = tuple(length + 1 for length in by_context)  # A Curve needs positive points.
    costs = {
        name: Curve(points, tuple(of[name] for of in by_context.values()))(context + 1)
        for name in vars(HostCosts())
    }
    return HostCosts(**costs)


def check_device(profile: Profile, job: Job, draft_profile: Profile | None = None) -> None:
    """Raises ConfigError if a profile made by the command `probe` lacks the forwards of a job's
    models. Built-in profiles (h100, h200, …) are valid for any models. draft_profile: the profile
    of the draft ranks' device, if they have another kind of device."""
    batch = job.config.batch_size
    for device, need in zip((profile, draft_profile or profile), job.needs, strict=False):
        if device.forwards and not device.models_others:
            key = need.shard.key(batch, need.options)
            device.require(key, need.shard.num_params(need.options))


def covered(profile: Profile, forward: str | None = None) -> dict[str, Any]:
    """Returns the flags with which a profile covers a run, as {flag: value}: `pair`, and either
    `fuse` and `lm_head`, or `forward`. They apply where the user sets no flag. A flag is included
    if all measured forwards have one value of it, but `pair` not if the profile is valid for any
    models. forward: the kind of forwards that count, "gemm" or "transformer" (None: both)."""
    measured = [
        key
        for key, kernels in profile.forwards.items()
        if not any(kernel.seconds.source.startswith(DERIVED) for kernel in kernels)
        and forward in (None, "transformer" if key.sequences else "gemm")
    ]
    if forward is None and not all(key.sequences for key in measured):
        measured = [key for key in measured if not key.sequences]  # the default of a run
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
    if all were measured. Forwards are derived if the profile says so, if fewer rows were measured
    than the job has, or if the profile lacks them. Host costs are derived if they come from another
    number of ranks, kind of model or profile. profile: of the target's device and all hosts.
    drafts: of the draft's device."""
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
    """Yields a text on how a model's largest forward was derived; nothing if it was measured."""
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
