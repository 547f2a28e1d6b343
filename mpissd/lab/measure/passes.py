"""Passes of the decoding loops for calibration: over pauses, or over the forwards themselves."""

from __future__ import annotations

import numpy as np

from mpissd.common.trace import DraftPhase, LeadPhase
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.target import TargetLoop
from mpissd.engine.job import Job
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.session.rank import Rank
from mpissd.engine.workload.workers import Worker
from mpissd.lab.measure.forward_times import ForwardTimes, Rehearsed, draft_rows
from mpissd.lab.measure.host_costs import LONGEST_PAUSE_S, PassLedgers, paused_twin
from mpissd.lab.measure.naps import measure_nap
from mpissd.lab.measure.rehearsal import (
    RehearsedForwards,
    Table,
    Taken,
    host_slices,
    host_table,
    of_a_round,
)

WARM_ID = 1 << 30  # first request id of the sequences used only for calibration
_PAUSED_ROUNDS = 18
_REHEARSED_ROUNDS, _REHEARSED_S = 60, 1.0  # at most, but never fewer than paused ones
_SKIPPED = 6  # one of so many rounds, the first ones, is dropped as warm-up


def paused_pass(
    rank: Rank, target: ForwardTimes | None, draft: ForwardTimes | None, *, ahead: bool
) -> PassLedgers:
    """Runs the loops with pauses for forwards; `ahead` grows branches. Returns their ledgers.

    Rehearsed forwards really run; the returned ledgers leave them out.
    """
    session, rounds = rank.session, _num_rounds(rank.session.job, target, draft)
    measured = rounds // _SKIPPED, rounds
    worker = drafter = drafting = None
    if rank.target is not None:
        worker = paused_twin(rank.target, target, session, drafts=False, again=not ahead)
    if rank.draft is not None:
        drafting = paused_twin(rank.draft, draft, session, drafts=True, again=not ahead)
        drafter = rank.drafter(drafting, ahead=ahead)

    def drive(loop: TargetLoop) -> Table:
        loop.admit(session.requests(WARM_ID, session.job.config.batch_size))
        loop.ledger.restart()
        for _ in range(rounds):
            loop.step()
            loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
        return host_table(loop.ledger, _taken(worker), *measured)

    lead = rank.run_pass(worker, drafter, drive)
    rehearsed = _rehearsed(session.job, worker, drafting, drafter, measured, ahead=ahead)
    for each in (worker, drafting):
        if each is not None:
            each.stepper.close()
    if drafter is None:
        return PassLedgers(lead, rehearsed=rehearsed)
    taken = _taken(drafting)
    slices = host_slices(drafter.ledger, taken, *measured)
    steps = np.diff(slices[slices[:, 1] == DraftPhase.GROW, 2:]) * 1e-9
    grow_s = float(np.median(steps)) if len(steps) else None
    table = host_table(drafter.ledger, taken, *measured)
    return PassLedgers(lead, table, drafter.table(*measured), grow_s, rehearsed)


def _num_rounds(job: Job, target: ForwardTimes | None, draft: ForwardTimes | None) -> int:
    assert target is not None, "a pass without a measured forward"
    if not target.rehearsed:
        return _PAUSED_ROUNDS
    steps = job.num_forwards(job.lookahead) if draft is not None else 0
    drafting = 0.0 if draft is None else steps * draft(draft_rows(job))
    within = int(_REHEARSED_S / (2 * (target(job.verify_rows) + drafting)))
    return max(_PAUSED_ROUNDS, min(_REHEARSED_ROUNDS, within))


def _taken(worker: Worker | None) -> Taken:
    """Returns a worker's forwards, if it rehearsed them."""
    forwards: Forwards | None = None if worker is None else worker.stepper
    return forwards.taken if isinstance(forwards, RehearsedForwards) else ()


def _rehearsed(
    job: Job,
    target: Worker | None,
    draft: Worker | None,
    drafter: Drafter | None,
    measured: tuple[int, int],
    *,
    ahead: bool,
) -> Rehearsed:
    """Returns the time of this rank's rehearsed forwards in a round."""
    taken, skip, steps = _taken(draft), measured[0], job.num_forwards(job.backup_lookahead)
    verify = of_a_round(_taken(target), 1, skip)
    if drafter is None or not taken:
        return Rehearsed(verify)
    whole = drafter.ledger.table(*measured)
    if ahead:
        lanes = job.config.batch_size * job.num_lanes
        return Rehearsed(verify, grow=of_a_round(taken, 1, skip, lanes), whole=whole)
    return Rehearsed(verify, of_a_round(taken, steps, skip), whole=whole)


def nap_of(rank: Rank, target: ForwardTimes | None, draft: ForwardTimes | None) -> float:
    """Returns how many seconds late a napping rank notices a message.

    The ranks wait for as long as they do in a round in which no branches are grown.
    """
    job, session = rank.session.job, rank.session
    if draft is None:
        return 0.0
    assert target is not None, "a nap without a measured forward"
    step, verify = draft(job.config.batch_size), min(target(job.verify_rows), LONGEST_PAUSE_S)
    drafting = job.num_forwards(job.backup_lookahead) * min(step, LONGEST_PAUSE_S)
    return measure_nap(session.topology, session.waiter, drafting, verify)
