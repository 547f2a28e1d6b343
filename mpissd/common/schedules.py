"""Schedules: names for combinations of flags; docs/schedules.md describes each.

sd-inline   SD with the draft on the lead's own device
lookup      prompt lookup: no draft model at all
suffix      the same by a suffix automaton: the continuation of the longest repeated suffix

A schedule sets flags that the user did not give, and refuses other values of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpissd.common.errors import ConfigError, unknown

SCHEDULES: dict[str, dict[str, str]] = {
    "sd-inline": {"mode": "sd", "num_drafts": "0", "backup": "jit"},
    "lookup": {"mode": "sd", "num_drafts": "0", "backup": "fast"},
    "suffix": {"mode": "sd", "num_drafts": "0", "backup": "fast", "lookup": "suffix"},
}


def with_schedule(flags: Mapping[str, str]) -> dict[str, str]:
    """Adds the flags that --schedule sets; all values are text.

    Raises ConfigError for an unknown schedule, or a flag with another value than the schedule's.
    """
    name = flags.get("schedule")
    if name is None:
        return dict(flags)
    if name not in SCHEDULES:
        raise unknown("schedule", str(name), SCHEDULES)
    for flag, value in SCHEDULES[name].items():
        if str(flags.get(flag, value)) != value:
            raise ConfigError(f"{flag}={flags[flag]} with schedule={name}: allowed: {value}")
    return {**SCHEDULES[name], **flags}
