"""Schedules: names for points in the space that the flags span; docs/schedules.md tells them apart.

    sd-inline   SD with the draft on the lead's own device
    pearl       PEARL [2408.11850], gamma = K + 1: the draft goes on behind x_K as if all were
                accepted; after a miss the target goes on alone, and the draft's first token has to
                be the one that it finds
    amusd       AMUSD [2410.17375]: the draft never stops; what it has is served, and a rejection
                rolls it back to the token that was found
    lookup      prompt lookup: no draft model at all

A schedule sets the flags that the user did not give, and refuses others.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpissd.common.errors import ConfigError, unknown

SCHEDULES: dict[str, dict[str, str]] = {
    "sd-inline": {"mode": "sd", "num_drafts": "0", "backup": "jit"},
    "pearl": {
        "mode": "ssd",
        "num_drafts": "1",
        "fan_out": "tail:1",
        "backup": "jit",
        "backup_lookahead": "0",
        "on_late": "finish",
    },
    "amusd": {
        "mode": "ssd",
        "num_drafts": "1",
        "fan_out": "tail:1",
        "backup": "jit",
        "backup_lookahead": "1",
        "on_late": "serve",
    },
    "lookup": {"mode": "sd", "num_drafts": "0", "backup": "fast"},
}


def with_schedule(flags: Mapping[str, str]) -> dict[str, str]:
    """Flags as text, with those that their `schedule` sets.

    Raises ConfigError: no such schedule, or a flag that says something else.
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


def is_tail(fan_out: str) -> bool:
    """Whether a fan-out keeps its candidates behind the last served token alone, tail:F."""
    return fan_out.strip().partition(":")[0] == "tail"


def tail_list(fan_out: str, lookahead: int, served: int) -> str:
    """tail:F as the list F_0 … F_K that it is behind `served` tokens; any other text as it is."""
    if not is_tail(fan_out):
        return fan_out
    count = fan_out.partition(":")[2]
    return "list:" + ",".join(count if k == served else "0" for k in range(lookahead + 1))
