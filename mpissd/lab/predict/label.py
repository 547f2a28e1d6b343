"""Labels predictions that rest on derived instead of measured times, with the rule used.

An advice and the errors of rows (`plan --rows`) share these labels.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard
from mpissd.lab.predict import hosts
from mpissd.lab.predict.costs import EMULATED_ITEMSIZE
from mpissd.lab.predict.derive import DERIVED


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
