"""Which of a profile's host costs hold for a job: those of the way to decode that is most alike."""

from __future__ import annotations

import math

from mpissd.backend.profile import Profile
from mpissd.backend.profile_tables import HostEntry
from mpissd.job import Job
from mpissd.predict.costs import HostCosts

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
    return costs_of(entry_of(profile, job))


def costs_of(entry: HostEntry | None) -> HostCosts:
    """An entry's costs; none without one. ConfigError for a field that is missing or unknown."""
    return HostCosts() if entry is None else HostCosts.from_dict(entry.seconds)


def is_derived(profile: Profile, job: Job) -> bool:
    """Whether a profile's host costs of a job stand on another T or on a stated rule, and not on a
    measurement; False where it has no host costs at all."""
    entry = entry_of(profile, job)
    if entry is None:
        return bool(profile.hosts)
    return entry.tp != job.tp or entry.source.startswith("derived")
