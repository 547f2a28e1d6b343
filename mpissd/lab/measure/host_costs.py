"""Computes HostCosts from the ledgers of the warm-up rounds.

Each cost is the median of a phase. A phase that waits for a forward counts with what it takes
beyond that forward as it was timed in series (calibrate). No measured round enters, so that a row's
prediction rests on nothing that it is compared with. What the draft's own phases do not explain of
the lead's wait is spent on the link, naps of both ranks included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Source
from mpissd.common.trace import DraftPhase, LeadPhase
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.round import TargetLoop
from mpissd.engine.job import Job
from mpissd.engine.session.rank import Rank
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts, RowTable

WARM_ID = 1 << 30  # first request id of the warm-up's sequences
_SKIPPED = 6  # one of so many warm-up rounds, the first ones, does not count


@dataclass(frozen=True)
class WarmUp:
    """The warm-up rounds that count, on the lead or on the draft: its ledger [n, 2 + phases].

    num_rows: on the lead, the rows of each verification [n]. rounds: on the draft, its rows
    [n, Drafter.COLUMNS]. grow_s: its median growth step; None if no branch grew.
    """

    ledger: NDArray[np.int64]
    num_rows: NDArray[np.int64] | None = None
    rounds: NDArray[Any] | None = None
    grow_s: float | None = None

    @classmethod
    def of_draft(cls, drafter: Drafter, count: int) -> WarmUp:
        """Returns a draft's warm-up; count: its rounds, the first ones of the pass."""
        span = count // _SKIPPED, count
        slices = drafter.ledger.slices(*span)
        steps = np.diff(slices[slices[:, 1] == DraftPhase.GROW, 2:]) * 1e-9
        grow_s = float(np.median(steps)) if len(steps) else None
        return cls(drafter.ledger.table(*span), None, drafter.table(*span), grow_s)

    def seconds(self, phase: int) -> Floats:
        """Returns the seconds of a phase in each round, [n]."""
        return np.asarray(self.ledger[:, 2 + phase] * 1e-9, np.float64)

    def column(self, name: str) -> NDArray[Any]:
        """Returns the column of `rounds` that has this name in Drafter.COLUMNS."""
        assert self.rounds is not None, "a warm-up without a draft"
        values: NDArray[Any] = self.rounds[:, Drafter.COLUMNS.index(name)]
        return values


def warm_up(loop: TargetLoop, rank: Rank, count: int) -> WarmUp:
    """Runs `count` rounds on sequences that are thrown away; returns those that count.

    For a lead whose loop has run no round yet.
    """
    requests = rank.session.workload.requests(WARM_ID, rank.session.job.config.batch_size)
    loop.admit(requests)
    loop.ledger.restart()
    num_rows = []
    for _ in range(count):
        num_rows.append(loop.step().num_rows)
        loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
    loop.finish([request.request_id for request in requests])
    skipped = count // _SKIPPED
    ledger = loop.ledger.table(skipped, count)
    return WarmUp(ledger, np.array(num_rows[skipped:], np.int64))


def host_costs(job: Job, device: DeviceCosts, lead: WarmUp, draft: WarmUp | None) -> HostCosts:
    """Computes a job's HostCosts; draft: None in AR, or if the draft was lost."""
    costs: dict[str, Any] = {
        f"lead_{phase.name.lower()}": np.median(lead.seconds(phase))
        for phase in (
            *(LeadPhase.SEND, LeadPhase.COMMIT, LeadPhase.BROADCAST),
            *(LeadPhase.UPLOAD, LeadPhase.SAMPLE, LeadPhase.RECORD),
        )
    }
    assert lead.num_rows is not None, "a warm-up without a lead"
    launch, wait = lead.seconds(LeadPhase.LAUNCH), lead.seconds(LeadPhase.DEVICE_WAIT)
    beyond = np.median(launch + wait - _forward_s(device.verify, lead.num_rows))
    costs["lead_launch"] = min(np.median(launch), max(0.0, beyond))  # NumPy computes in the launch
    costs["wake"] = beyond - costs["lead_launch"]
    if draft is not None:
        costs |= _draft_costs(job, device, draft)
        if not job.inline:
            costs |= _link_costs(lead, draft)
    return HostCosts(**{name: max(0.0, float(value)) for name, value in costs.items()})


def _forward_s(table: RowTable, rows: Any) -> Floats:
    """Returns the seconds of the smallest forwards that have room for these rows."""
    places = np.searchsorted(table.rows, rows)
    last = len(table.rows) - 1
    return np.asarray(np.asarray(table.seconds)[np.minimum(places, last)], np.float64)


def _draft_costs(job: Job, device: DeviceCosts, draft: WarmUp) -> dict[str, Any]:
    """Returns the costs of the draft's host by their field names in HostCosts."""
    costs: dict[str, Any] = {
        f"draft_{phase.name.lower()}": np.median(draft.seconds(phase))
        for phase in (DraftPhase.COMMIT, DraftPhase.LOOKUP, DraftPhase.SEND, DraftPhase.RECORD)
    }
    answers, num_jit = draft.seconds(DraftPhase.SPECULATE), draft.column("num_jit")
    steps_ready = draft.column("steps_ready")
    is_ready = (num_jit == 0) & (steps_ready >= job.lookahead)  # answered without a draft step
    if job.config.backup == Source.FAST.name.lower():
        is_ready |= (num_jit == 0) & (steps_ready == 0)
    assemble = answers[is_ready].min() if is_ready.any() else 0.0
    costs["draft_assemble"] = assemble
    if device.draft is None:
        return costs
    batch, lanes = job.config.batch_size, job.config.batch_size * job.num_lanes
    backup, missed = job.num_forwards(job.backup_lookahead), answers[num_jit == batch]
    if len(missed) and backup:
        step_s = (np.median(missed) - assemble) / backup
        costs["step"] = step_s - _forward_s(device.draft, batch)
    elif draft.grow_s is not None:
        costs["step"] = draft.grow_s - _forward_s(device.draft, lanes)
    if (is_grown := draft.seconds(DraftPhase.GLUE) > 0).any():
        glue = device.lists[-1][1] if device.lists else device.draft
        glue_s = np.median(draft.seconds(DraftPhase.GLUE)[is_grown])
        costs["glue"] = glue_s - _forward_s(glue, job.verify_rows)
        costs["keys"] = np.median(draft.seconds(DraftPhase.KEYS)[is_grown])
    return costs


def _link_costs(lead: WarmUp, draft: WarmUp) -> dict[str, Any]:
    """Returns one way of the link, and the time to read an OUTCOME that has already arrived.

    The draft reads such an OUTCOME in rounds after growth that was cut short. There the lead also
    waits for the growth step that was running; so the other rounds show the link, or the fastest
    one if growth was always cut short.
    """
    is_cut = np.isnan(draft.column("t_growth_s")[:-1]) & (draft.seconds(DraftPhase.GLUE)[:-1] > 0)
    reads = draft.seconds(DraftPhase.WAIT)[1:][is_cut]
    read = np.median(reads) if len(reads) else 0.0
    own = (DraftPhase.COMMIT, DraftPhase.LOOKUP, DraftPhase.SPECULATE, DraftPhase.SEND)
    waited = lead.seconds(LeadPhase.DRAFT_WAIT) + lead.seconds(LeadPhase.COMMIT)
    between = waited - sum(draft.seconds(phase) for phase in own)
    if is_cut.all() and len(is_cut):
        both_ways = between.min()
    else:
        both_ways = np.median(between[1:][~is_cut]) if len(is_cut) else between[0]
    return {"link": (both_ways - read) / 2, "draft_read": read}
