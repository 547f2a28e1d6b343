"""Checks that a profile covers a job: a prediction or advice beyond it is refused in one line."""

from __future__ import annotations

from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.presets import PAIRS
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard
from mpissd.lab.predict.costs import DeviceCosts


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


def check_job(name: str, job: Job, measured: Job, device: DeviceCosts) -> None:
    """Raises ConfigError if a job's own profile does not cover the wanted job.

    name: the profile's, for the message. measured: the job as it ran.
    """
    drafted = measured if job.draft else job
    pairs = (
        ("tp", job.tp, measured.tp),
        ("target", job.target.name, measured.target.name),
        ("fuse, lm_head, context", job.options, measured.options),
        ("batch_size", job.config.batch_size, measured.config.batch_size),
        ("draft_device", job.config.draft_device, drafted.config.draft_device),
    )
    for what, asked, known in pairs:
        if asked != known:
            raise ConfigError(f"profile {name!r} covers {what}={known}, not {asked}")
    if job.draft is None:
        return
    if measured.draft is None or device.draft is None:
        raise ConfigError(f"profile {name!r} covers no draft: allowed: mode=ar")
    if job.draft != measured.draft or job.inline != measured.inline:
        raise ConfigError(f"profile {name!r} covers the draft {measured.draft.name} as it ran")
    if job.fan_out and not measured.fan_out:
        raise ConfigError(f"profile {name!r} is of a run that grew nothing: allowed: mode=ar, sd")
    for what, rows, table in (
        ("target", job.target_buckets(), device.verify),
        ("draft", job.draft_buckets(), device.draft),
    ):
        if rows[-1] > table.rows[-1]:
            raise ConfigError(
                f"profile {name!r} covers {what} forwards of at most {table.rows[-1]} rows, "
                f"not {rows[-1]}"
            )
