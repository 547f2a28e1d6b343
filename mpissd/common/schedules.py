"""Schedules: names for combinations of flags; docs/schedules.md describes each.

sd-inline   SD with the draft on the lead's own device
pearl       PEARL [2408.11850], gamma = K + 1: the draft continues after x_K as if all was accepted;
            after a miss the target runs alone, and the bonus token that it finds must equal the
            draft's first token
amusd       AMUSD [2410.17375]: the draft never stops; its tokens so far are served, and a rejection
            rolls it back to the bonus token
lookup      prompt lookup: no draft model at all
suffix      likewise, by a suffix automaton: whatever the longest repeated suffix was followed by

A schedule sets flags that the user did not give, and refuses other values of them.
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
    "suffix": {"mode": "sd", "num_drafts": "0", "backup": "fast", "lookup": "suffix"},
}


def with_schedule(flags: Mapping[str, str]) -> dict[str, str]:
    """Adds the flags that --schedule stands for; all values are text.

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


def is_tail(fan_out: str) -> bool:
    """Returns whether a fan-out is tail:F, which keeps candidates only after the last served
    token."""
    return fan_out.strip().partition(":")[0] == "tail"


def tail_list(fan_out: str, lookahead: int, served: int) -> str:
    """Returns tail:F as the list F_0..F_K for `served` tokens; any other text unchanged."""
    if not is_tail(fan_out):
        return fan_out
    count = fan_out.partition(":")[2]
    return "list:" + ",".join(count if k == served else "0" for k in range(lookahead + 1))
