"""Durations of forwards in series, and in the order of a rehearsed pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpissd.engine.job import Job
from mpissd.lab.measure.rehearsal import Table, Took
from mpissd.lab.predict.costs import DeviceCosts


@dataclass(frozen=True)
class ForwardTimes:
    """Median device seconds of a forward by row count, and the host time that it adds.

    host_s: seconds that launching and waiting take beyond the forward itself. rehearsed: whether
    passes run the real forwards (measure.rehearsal), and no pauses. lists: `seconds` of glues
    (scoring forwards), which read out `candidates` of each row; empty without any.
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
    """Forward times of a rehearsed pass on this rank; its ledgers exclude them.

    None if this rank runs no such forward. whole: the draft's ledger with forwards.
    """

    verify: Took | None = None
    backup: Took | None = None  # all steps of a round's backup
    grow: Took | None = None  # one growth step
    whole: Table | None = None


def in_sequence(
    job: Job, lead: Rehearsed, drafts: Rehearsed, target: ForwardTimes, draft: ForwardTimes | None
) -> DeviceCosts:
    """Returns the costs of forwards, rehearsed ones without their `beyond`.

    The host costs contain that part: both together give the rehearsed time.
    """
    verify = _rehearsed(target, job.verify_rows, lead.verify)
    if draft is None:
        return DeviceCosts.from_points(verify)
    steps, lists = job.num_forwards(job.backup_lookahead), {}
    if draft.lists:
        lists = {draft.candidates: draft.lists}
    if drafts.grow is not None:
        lanes = job.config.batch_size * job.num_lanes
        return DeviceCosts.from_points(verify, _rehearsed(draft, lanes, drafts.grow), lists)
    points = _rehearsed(draft, draft_rows(job), drafts.backup, steps)
    return DeviceCosts.from_points(verify, points, lists)


def draft_rows(job: Job) -> int:
    """Returns the rows of a backup's step."""
    return job.config.batch_size


def _rehearsed(
    times: ForwardTimes, rows: int, took: Took | None, forwards: int = 1
) -> dict[int, float]:
    """Returns the points of `times`, with the point of `rows` rows taken from the rehearsal."""
    if took is None:
        return times.seconds
    own = took.seconds - beyond(took, forwards * times(rows))
    return {**times.seconds, times.bucket(rows): own / forwards}


def beyond(took: Took | None, in_a_row: float) -> float:
    """Returns the seconds that forwards take beyond those in a row, at least 0.

    Those in a row are their repetitions, or take `in_a_row` seconds where there were none.
    """
    if took is None:
        return 0.0
    return max(0.0, took.seconds - in_a_row if took.beyond is None else took.beyond)
