"""What forwards take in a row, and in the order of a rehearsed pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpissd.engine.job import Job
from mpissd.lab.measure.rehearsal import Table
from mpissd.lab.predict.costs import DeviceCosts


@dataclass(frozen=True)
class ForwardTimes:
    """Median device seconds of a forward by row count, and the host time that it adds.

    host_s: seconds that launching and waiting take beyond the forward itself. rehearsed: whether
    passes run the real forwards (measure.rehearsal), and no pauses. lists: likewise of the forwards
    that read out `candidates` of each row, at a glue's row counts; empty if none does.
    """

    seconds: dict[int, float]
    host_s: float
    rehearsed: bool = False
    candidates: int = 1
    lists: dict[int, float] = field(default_factory=dict)

    def __call__(self, rows: int, lists: bool = False) -> float:
        """Returns the seconds of the smallest forward that has room for `rows` rows.

        lists: whether it reads out `candidates` of each row.
        """
        if lists and self.lists:
            return self.lists[next((n for n in sorted(self.lists) if n >= rows), max(self.lists))]
        return self.seconds[self.bucket(rows)]

    def bucket(self, rows: int) -> int:
        """Returns the row count of that forward."""
        return next((n for n in sorted(self.seconds) if n >= rows), max(self.seconds))


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsed pass adds on this rank, whose ledgers leave the forwards out.

    In seconds; None where this rank runs no such forward. whole: the draft's ledger with forwards.
    """

    verify_s: float | None = None
    backup_s: float | None = None  # all steps of a round's backup
    grow_s: float | None = None  # one growth step
    whole: Table | None = None


def in_sequence(
    job: Job, lead: Rehearsed, drafts: Rehearsed, target: ForwardTimes, draft: ForwardTimes | None
) -> DeviceCosts:
    """Returns the costs of forwards in a row, or of rehearsed ones where those were faster.

    What rehearsed ones took longer is in the host costs: both together are what was rehearsed.
    """
    verify = _at_most(target, job.verify_rows, lead.verify_s)
    if draft is None:
        return DeviceCosts.from_points(verify)
    steps = job.num_forwards(job.backup_lookahead)
    backup = drafts.backup_s if drafts.backup_s is None else drafts.backup_s / steps
    lists = {draft.candidates: draft.lists} if draft.lists else {}
    if drafts.grow_s is not None:
        lanes = job.config.batch_size * job.num_lanes
        return DeviceCosts.from_points(verify, _at_most(draft, lanes, drafts.grow_s), lists)
    return DeviceCosts.from_points(verify, _at_most(draft, draft_rows(job), backup), lists)


def draft_rows(job: Job) -> int:
    """Returns the rows of a backup's step on one draft."""
    return -(-job.config.batch_size // max(1, job.config.drafts))


def _at_most(times: ForwardTimes, rows: int, took: float | None) -> dict[int, float]:
    """Returns the points of `times`, of which that of `rows` rows is at most `took`."""
    if took is None:
        return times.seconds
    bucket = times.bucket(rows)
    return {**times.seconds, bucket: min(took, times.seconds[bucket])}


def beyond(took: float | None, in_a_row: float) -> float:
    """Returns the seconds beyond those of forwards in a row, at least 0; 0 if none was taken."""
    return 0.0 if took is None else max(0.0, took - in_a_row)
