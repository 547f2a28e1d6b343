"""Which of a profile's host costs hold for a job: those of the way to decode that is most alike.

Where that was measured at several batches each cost goes along straight lines over b, as a Curve:
flat before the first, and behind the last with the last slope, if that rises. `keys` does so over
the lanes of all sequences, which the fan-out decides, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpissd.engine.backend.profile import Profile
from mpissd.engine.backend.profile_tables import Curve, HostEntry
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import HostCosts

METHODS = (("ar", 0), ("sd", 0), ("sd", 1), ("ssd", 1))  # (mode, D)


def host_entry(
    profile: Profile, mode: str, tp: int, num_drafts: int, batch_size: int, lookahead: int
) -> HostEntry | None:
    """The entry of this mode, with the draft in the same place (D > 0 or not), whose T, then b,
    then K are nearest; None where the profile has none of that mode and place."""
    alike = [e for e in profile.hosts if (e.mode, e.num_drafts > 0) == (mode, num_drafts > 0)]

    def distance(entry: HostEntry) -> tuple[int, float, int]:
        ratio = abs(math.log2(entry.batch_size / batch_size))
        return abs(entry.tp - tp), ratio, abs(entry.lookahead - lookahead)

    return min(alike, key=distance, default=None)


def entry_of(profile: Profile, job: Job) -> HostEntry | None:
    """The entry that holds for a job."""
    config = job.config
    return host_entry(profile, config.mode, job.tp, config.drafts, config.batch_size, job.lookahead)


def host_of(profile: Profile, job: Job) -> HostCosts:
    """A job's host costs by the profile; no costs where it has none."""
    return costs_at(profile, entry_of(profile, job), job.config.batch_size)


def costs_at(profile: Profile, entry: HostEntry | None, batch_size: int) -> HostCosts:
    """The costs of b sequences by an entry and those that differ from it in b alone; none without
    one. ConfigError for a field that is missing or unknown."""
    if entry is None:
        return HostCosts()
    alike = {e.batch_size: e for e in profile.hosts if _way(e) == _way(entry)}
    every = [alike[batch] for batch in sorted(alike)]
    batches = tuple(e.batch_size for e in every)
    found = {
        name: Curve(batches, tuple(e.seconds[name] for e in every))(batch_size)
        for name in entry.seconds
        if all(name in e.seconds for e in every)
    }
    return HostCosts.from_dict({**found, **_keys(every)})


def _way(entry: HostEntry) -> tuple[str, int, int, int, int]:
    return entry.mode, entry.tp, entry.num_drafts, entry.lookahead, entry.lanes


def _keys(every: Sequence[HostEntry]) -> dict[str, float]:
    """What keys take, and each lane of them, by the batches with the fewest and the most lanes."""
    least, most = every[0], every[-1]
    lanes = most.lanes * (most.batch_size - least.batch_size)
    if not lanes:
        return {}
    slope = max(0.0, most.seconds["keys"] - least.seconds["keys"]) / lanes
    none = least.seconds["keys"] - slope * least.lanes * least.batch_size
    return {"keys": max(0.0, none), "keys_lane": slope}


def is_derived(profile: Profile, job: Job) -> bool:
    """Whether a profile's host costs of a job stand on another T or on a stated rule, and not on a
    measurement; False where it has no host costs at all."""
    entry = entry_of(profile, job)
    if entry is None:
        return bool(profile.hosts)
    return entry.tp != job.tp or entry.source.startswith("derived")
