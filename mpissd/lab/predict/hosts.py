"""Chooses a profile's host costs for a job, from the most similar method.

If a method was measured at several batch sizes b, each cost is interpolated linearly over b as a
Curve. It is constant before the first point and continues after the last point with the last slope
if that slope is positive. `keys` is interpolated over the lanes of all sequences instead, because
the fan-out determines them, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mpissd.engine.backend.profile import Curve, HostEntry, Profile
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.derive import DERIVED, same_device

METHODS = (("ar", 0), ("sd", 0), ("sd", 1), ("ssd", 1))  # (mode, D)


def with_hosts(profile: Profile) -> Profile:
    """Returns the profile with host costs for every method that has been measured on its device.

    Methods missing from this profile are taken from the built-in profile of the same device and
    labelled "derived". A profile without any host costs is returned unchanged: it treats the host's
    work as free.
    """
    if not profile.hosts:
        return profile
    added = [
        replace(entry, source=f"{DERIVED} from profile {other.name}: {entry.source}")
        for mode, drafts in METHODS
        if not any(_is_way(entry, mode, drafts) for entry in profile.hosts)
        for other in same_device(profile)[:1]
        for entry in other.hosts
        if _is_way(entry, mode, drafts)
    ]
    return replace(profile, hosts=(*profile.hosts, *added)) if added else profile


def _is_way(entry: HostEntry, mode: str, num_drafts: int) -> bool:
    return (entry.mode, entry.num_drafts > 0) == (mode, num_drafts > 0)


def host_entry(
    profile: Profile,
    mode: str,
    tp: int,
    num_drafts: int,
    batch_size: int,
    lookahead: int,
    forward: str = "gemm",
) -> HostEntry | None:
    """Returns the entry of this mode whose T, then b, then K are nearest, or None.

    Only entries with the draft in the same place (D > 0 or not) are considered; a transformer's
    only at the same T, because a GPU chains the rounds of one rank without the host. Without one of
    its own, a transformer uses the entries of products, and products use a transformer's.
    """
    alike = [entry for entry in profile.hosts if _is_way(entry, mode, num_drafts)]
    whole = [entry for entry in alike if entry.forward == "transformer"]
    products = [entry for entry in alike if entry.forward == "gemm"]
    own = [entry for entry in whole if entry.tp == tp] if forward == "transformer" else products

    def distance(entry: HostEntry) -> tuple[int, float, int]:
        ratio = abs(math.log2(entry.batch_size / batch_size))
        return abs(entry.tp - tp), ratio, abs(entry.lookahead - lookahead)

    return min(own or products or whole, key=distance, default=None)


def entry_of(profile: Profile, job: Job) -> HostEntry | None:
    """Returns the entry of host costs that holds for a job, or None."""
    config, forward = job.config, "transformer" if job.config.is_transformer else "gemm"
    where = job.tp, config.drafts, config.batch_size, job.lookahead, forward
    return host_entry(profile, config.mode, *where)


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

    def way(each: HostEntry) -> tuple[str | int, ...]:
        return each.mode, each.tp, each.num_drafts, each.lookahead, each.lanes, each.forward

    alike: dict[int, dict[int, HostEntry]] = {}
    for each in profile.hosts:
        if way(each) == way(entry):
            alike.setdefault(each.context, {})[each.batch_size] = each
    costs = {past: _at_batch(alike[past], batch_size).to_dict() for past in sorted(alike)}
    points, names = tuple(past + 1 for past in costs), next(iter(costs.values()))
    return HostCosts.from_dict(
        {n: Curve(points, tuple(c[n] for c in costs.values()))(context + 1) for n in names}
    )


def _at_batch(alike: Mapping[int, HostEntry], batch_size: int) -> HostCosts:
    """Returns the costs at a batch size, of entries that differ only in it."""
    every = [alike[batch] for batch in sorted(alike)]
    batches = tuple(e.batch_size for e in every)
    costs = {
        name: Curve(batches, tuple(e.seconds[name] for e in every))(batch_size)
        for name in every[0].seconds
        if all(name in e.seconds for e in every)
    }
    least, most = every[0], every[-1]
    lanes = most.lanes * (most.batch_size - least.batch_size)
    if lanes:  # a line through two entries: the host's seconds for `keys`, and those of a lane
        slope = max(0.0, most.seconds["keys"] - least.seconds["keys"]) / lanes
        none = least.seconds["keys"] - slope * least.lanes * least.batch_size
        costs |= {"keys": max(0.0, none), "keys_lane": slope}
    return HostCosts.from_dict(costs)


def derived_from(profile: Profile, job: Job) -> str | None:
    """Returns the origin of a job's derived host costs, as text beginning with "derived", or None.

    They are derived from another T or by a stated rule, or are not known at all. None means that
    they were measured or that the profile has no host costs.
    """
    entry = entry_of(with_hosts(profile), job)
    if entry is None and profile.hosts:
        return f"{DERIVED}: host costs of {job.config.mode} are not known"
    if entry is None:
        return None
    if entry.source.startswith(DERIVED):
        return entry.source
    if entry.tp != job.tp:
        return f"{DERIVED}: host costs of T={entry.tp}"
    is_whole = job.config.is_transformer
    if is_whole != (entry.forward == "transformer"):
        return f"{DERIVED}: host costs of products for whole transformers"
    return None
