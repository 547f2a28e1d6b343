"""Checks what a profile covers: a job beyond it is refused in one line, or labelled as derived.

An advice and the errors of rows (`plan --rows`) share the labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpissd.common.presets import PAIRS
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard
from mpissd.lab.predict import hosts
from mpissd.lab.predict.costs import EMULATED_ITEMSIZE
from mpissd.lab.predict.derive import DERIVED


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


def derived_from(profile: Profile, drafts: Profile, job: Job) -> str | None:
    """Returns the origin of the job's derived forwards, as text beginning with "derived", or None.

    profile: the target's, including its forward (derive.with_derived). drafts: the draft device's.
    A forward is derived if its table is marked so, if its table ends before the job's rows, or if
    the profile was measured but lacks this forward. On a modelled device it is derived if the
    all-reduces are.
    """
    return "; ".join(dict.fromkeys(_forwards(profile, drafts, job))) or None


def all_derived_from(profile: Profile, drafts: Profile, job: Job) -> str | None:
    """Returns the origin of the job's derived forwards and host costs, or None if none is derived.

    The host costs come from `profile`, the target's.
    """
    sources = derived_from(profile, drafts, job), hosts.derived_from(profile, job)
    return "; ".join(filter(None, sources)) or None


def _forwards(profile: Profile, drafts: Profile, job: Job) -> Iterator[str]:
    target = job.target_shard
    yield from _forward(profile, target, job.options, job.target_buckets()[-1], job)
    if (draft := job.draft_shard) is not None and not job.config.is_lookup:
        rows = job.draft_buckets()[-1]
        yield from _forward(drafts, draft, job.draft_options, rows, job)


def _forward(
    known: Profile, shard: AnyShard, options: ForwardOptions, rows: int, job: Job
) -> Iterator[str]:
    """Yields a forward's origin if it is derived, neither measured nor modelled."""
    batch = job.config.batch_size
    cost = shard.cost(rows, batch, EMULATED_ITEMSIZE, options)
    curve, timed = known.tables.forward(cost), known.tables.candidates(cost)
    lists = max(timed, default=1)
    source = known.sources["all_reduce"] if curve is None else curve.source
    if source.startswith(DERIVED):
        yield source
    elif curve is not None and rows > curve.points[-1]:
        beyond = f"{rows} rows of {shard.shape.name}, measured up to {curve.points[-1]}"
        yield f"{DERIVED}: {beyond}"
    elif curve is not None and options.top_k > lists:
        beyond = f"{options.top_k} candidates a row of {shard.shape.name}, measured with"
        yield f"{DERIVED}: {beyond} {lists}, which takes less time"
    elif curve is None and known.tables.forwards:
        yield f"{DERIVED}: {shard.key(batch, options)} not measured, by the profile's numbers"
