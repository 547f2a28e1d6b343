"""Checks that a profile covers a job: a prediction or advice beyond it is refused in one line."""

from __future__ import annotations

from typing import Any

from mpissd.common.presets import PAIRS
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard


def check_device(profile: Profile, job: Job, draft_profile: Profile | None = None) -> None:
    """Raises ConfigError if a probed profile has no forwards of the job's models.

    A built-in profile (h100, h200, …) models any pair. draft_profile: the profile of the draft
    ranks' devices, if they differ.
    """
    _check_forward(profile, job.target_shard, job.options, job.config.batch_size)
    if (draft := job.draft_shard) is not None:
        drafts = draft_profile or profile
        _check_forward(drafts, draft, job.draft_options, job.config.batch_size)


def _check_forward(
    profile: Profile, shard: AnyShard, options: ForwardOptions, sequences: int
) -> None:
    if not profile.tables.forwards or profile.models_others:
        return
    profile.require(shard.key(sequences, options), shard.num_params(options))


def covered(profile: Profile, forward: str | None = None) -> dict[str, Any]:
    """Returns the flags that a probed profile implies if the user sets none.

    These are pair, and fuse and lm_head, or forward. Each is included if all measured forwards
    agree on it; pair only if the profile does not model every pair. forward: if the user set it,
    only forwards of that kind count.
    """
    measured = [
        key
        for key, kinds in profile.tables.forwards.items()
        if not any(known.seconds.source.startswith("derived") for known in kinds)
        and forward in (None, "transformer" if key.sequences else "gemm")
    ]
    if forward is None and not all(key.sequences for key in measured):
        measured = [key for key in measured if not key.sequences]  # runs are of products by default
    models = {key.model for key in measured}
    pairs = [pair for pair, names in PAIRS.items() if set(names) <= models]
    said: dict[str, Any] = {"pair": pairs[0]} if pairs and not profile.models_others else {}
    if any(key.sequences for key in measured):
        return {**said, "forward": "transformer"}
    for name in ("fuse", "lm_head"):
        values = {getattr(key, name) for key in measured}
        if len(values) == 1:
            said[name] = values.pop()
    return said
