"""Computes HostCosts from ledgers of decoding loops in which pauses replace the forwards.

Each cost is the median of a phase. The first pass grows no branches; SSD adds a second pass that
does. The part of the lead's wait that the draft's own phases do not explain is spent on the link,
in naps (naps), or in reading an OUTCOME that arrived during a growth step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.trace import DraftPhase, LeadPhase
from mpissd.common.wait import Waiter
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.model.paused import PausedForwards
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.session.session import Session
from mpissd.engine.workload.workers import W
from mpissd.lab.measure.forward_times import ForwardTimes, Rehearsed, beyond, draft_rows
from mpissd.lab.measure.rehearsal import RehearsedForwards, Table
from mpissd.lab.predict.costs import HostCosts

LONGEST_PAUSE_S = 8e-3  # keeps a pass short
_OVERSHOOTS = 5
_GLUE = 2 + DraftPhase.GLUE


@dataclass(frozen=True)
class PassLedgers:
    """The ledgers of one paused pass on this rank.

    lead is set on the lead; the other fields are set on the rank that runs the draft.
    """

    lead: Table | None
    draft: Table | None = None
    rounds: NDArray[Any] | None = None  # [n, Drafter.COLUMNS], a row for each draft row
    grow_s: float | None = None  # median growth step; None if no branches were grown
    rehearsed: Rehearsed = field(default_factory=Rehearsed)

    def column(self, name: str) -> NDArray[Any]:
        """Returns the column of `rounds` that has this name in Drafter.COLUMNS."""
        assert self.rounds is not None, "a pass without a draft"
        values: NDArray[Any] = self.rounds[:, Drafter.COLUMNS.index(name)]
        return values


class Pause(Protocol):
    """The length of a pause that replaces a forward."""

    def __call__(self, rows: int, lists: bool = False) -> float:
        """Returns its seconds; lists: as in Forwards.upload."""


def pause_of(times: ForwardTimes | None) -> Pause:
    """Returns the length of a pause by its rows; 0 if none is in the passes' ledgers."""
    assert times is not None, "a pause without a measured forward"

    def pause_s(rows: int, lists: bool = False) -> float:
        return 0.0 if times.rehearsed else min(times(rows, lists), LONGEST_PAUSE_S)

    return pause_s


def paused_twin(
    worker: W, times: ForwardTimes | None, session: Session, *, drafts: bool, again: bool = False
) -> W:
    """Returns a worker like this one over pauses that last as its forwards do, or over those."""
    assert isinstance(worker.stepper, Stepper), "pauses stand for real forwards"
    if times is not None and times.rehearsed:
        forwards: Forwards = RehearsedForwards(
            worker.stepper, session.job.config.batch_size, again=again
        )
    else:
        tokens, sleep = worker.stepper.stack.buffers.tokens, session.backend.info.kind == "emulated"
        forwards = PausedForwards(pause_of(times), tokens, sleep=sleep)
    twin = worker.twin(forwards)
    twin.placement = session.job.placement(drafts=drafts)
    return twin


def host_costs(
    session: Session,
    leads: list[PassLedgers],
    drafts: list[PassLedgers],
    target: ForwardTimes,
    draft: ForwardTimes | None,
    nap: float,
) -> HostCosts:
    """Computes the job's HostCosts from the ledgers of its paused passes.

    leads, drafts: the passes as the lead and the draft recorded them. The first grows no branches;
    the second, which only SSD has, does. nap: seconds that a napping rank is late.
    """
    job = session.job
    lead = _phases(leads[-1].lead, LeadPhase)
    late = _overshoot(session)
    costs = {f"lead_{phase.name.lower()}": lead[phase] for phase in _LEAD_COSTS}
    verify = pause_of(target)(job.verify_rows)
    costs["wake"] = lead[LeadPhase.DEVICE_WAIT] - verify + target.host_s - late
    if target.rehearsed:
        late_s = beyond(leads[-1].rehearsed.verify, target(job.verify_rows))
        costs["wake"] = lead[LeadPhase.DEVICE_WAIT] + late_s
    if draft is not None:
        costs |= _draft_costs(session, drafts, draft, late)
    if session.topology.num_drafts:
        costs |= _link_costs(session.waiter, leads[0], drafts, nap)
    if job.tp > 1 and session.backend.info.kind != "emulated" and not target.rehearsed:
        own = costs["lead_commit"] + costs["lead_upload"] + costs["lead_launch"]
        costs["follower"] = costs.get("link", 0.0) + costs.get("nap", 0.0) + own
    return HostCosts(**{name: max(0.0, float(value)) for name, value in costs.items()})


_LEAD_COSTS = (
    LeadPhase.SEND,
    LeadPhase.COMMIT,
    LeadPhase.BROADCAST,
    LeadPhase.UPLOAD,
    LeadPhase.LAUNCH,
    LeadPhase.SAMPLE,
    LeadPhase.RECORD,
)


def _draft_costs(
    session: Session, drafts: list[PassLedgers], draft: ForwardTimes, late: float
) -> dict[str, float]:
    """Returns the costs of the draft's host by their field names in HostCosts."""
    job = session.job
    plain, pause_s = _phases(drafts[0].draft, DraftPhase), pause_of(draft)
    branches = job.config.batch_size * job.num_lanes
    # host time that a real forward adds to a paused one
    again = 0.0 if draft.rehearsed else draft.host_s - late
    backup = job.num_forwards(job.backup_lookahead) if job.config.backup != "fast" else 0
    costs = {
        "draft_commit": plain[DraftPhase.COMMIT],
        "draft_lookup": plain[DraftPhase.LOOKUP],
        "draft_send": plain[DraftPhase.SEND],
        "draft_record": plain[DraftPhase.RECORD],
        "draft_assemble": 0.0,
    }
    if len(drafts) > 1:
        costs |= _growth_costs(session, drafts[1], pause_s, again, draft(job.config.batch_size))
    steps_s = plain[DraftPhase.SPECULATE] - costs["draft_assemble"]
    if backup:
        rows = draft_rows(job)
        costs["step"] = steps_s / backup - pause_s(rows) + again
        if len(drafts) == 1:
            late_s = beyond(drafts[0].rehearsed.backup, backup * draft(rows))
            costs["draft_assemble"] += late_s
    elif drafts[-1].grow_s is not None:
        costs["step"] = drafts[-1].grow_s - pause_s(branches) + again
    if len(drafts) > 1:
        costs["step"] = costs.get("step", 0.0)
        costs["step"] += beyond(drafts[1].rehearsed.grow, draft(branches))
    return costs


def _growth_costs(
    session: Session,
    grown: PassLedgers,
    pause_s: Pause,
    again: float,
    step: float,
) -> dict[str, float]:
    job = session.job
    phases = _phases(grown.draft, DraftPhase)
    costs = {
        "draft_lookup": phases[DraftPhase.LOOKUP],
        "draft_commit": phases[DraftPhase.COMMIT],
        "glue": phases[DraftPhase.GLUE] - pause_s(job.verify_rows, True) + again,
        "keys": phases[DraftPhase.KEYS],
    }
    assert grown.draft is not None, "a grown pass without a draft"
    hits = grown.draft[grown.column("num_jit") == 0]
    if len(hits):  # the fastest hit: all its branches were already grown
        costs["draft_assemble"] = float(hits[:, 2 + DraftPhase.SPECULATE].min()) * 1e-9
        if costs["draft_assemble"] > step:
            costs["draft_assemble"] = 0.0  # even the fastest hit had to wait for its branches
    return costs


def _link_costs(
    waiter: Waiter, lead: PassLedgers, drafts: list[PassLedgers], nap: float
) -> dict[str, float]:
    """Returns the costs of the link between lead and draft: link, nap, patience and draft_read.

    `lead` and drafts[0] are of the pass without branches. The part of the lead's wait that the
    draft's own phases do not explain is two messages, one read, and a nap for each rank that waited
    for longer than its patience.
    """
    patience, plain = 0.0 if waiter.spin else waiter.spin_s, drafts[0].draft
    plain = plain if drafts[0].rehearsed.whole is None else drafts[0].rehearsed.whole
    assert lead.lead is not None and plain is not None, "a link needs both ends"
    own = (DraftPhase.COMMIT, DraftPhase.LOOKUP, DraftPhase.SPECULATE, DraftPhase.SEND)
    waits = lead.lead[:, 2 + LeadPhase.DRAFT_WAIT] * 1e-9, plain[:, 2 + DraftPhase.WAIT] * 1e-9
    waited = waits[0] + lead.lead[:, 2 + LeadPhase.COMMIT] * 1e-9
    worked = sum(plain[:, 2 + phase] for phase in own) * 1e-9
    read = _read_s(drafts[-1])
    nap = min(nap, max(0.0, float(np.median(waited - worked)) - read) / 2)
    napped = sum(nap * (wait - nap > patience) for wait in waits)
    both_ways = float(np.median(waited - worked - napped)) - read
    return {"link": both_ways / 2, "nap": nap, "patience": patience, "draft_read": read}


def _read_s(grown: PassLedgers) -> float:
    """Returns the median seconds that the draft needs to read an OUTCOME that has already arrived.

    These are the rounds in which the OUTCOME cut growth short. Returns 0 if there were none; the
    link's cost then includes the read.
    """
    assert grown.draft is not None, "a link without a draft"
    cut_short = np.isnan(grown.column("t_growth_s")[:-1]) & (grown.draft[:-1, _GLUE] > 0)
    waits = grown.draft[1:, 2 + DraftPhase.WAIT][cut_short]
    return float(np.median(waits)) * 1e-9 if len(waits) else 0.0


def _phases(table: Table | None, phases: Any) -> dict[Any, float]:
    """Returns the median seconds of each phase of a ledger's table."""
    assert table is not None and len(table), "a pass without rounds"
    medians = np.median(table[:, 2:], axis=0) * 1e-9
    return {phase: float(medians[phase]) for phase in phases}


def _overshoot(session: Session) -> float:
    """Returns the median seconds by which a paused forward exceeds its pause, launch included."""
    waiter = session.waiter
    sleep, tokens = session.backend.info.kind == "emulated", np.zeros(1, np.int32)
    pause = PausedForwards(lambda rows, lists: 1e-3, tokens, sleep=sleep)
    pause.upload(1, tokens)
    late = []
    for _ in range(_OVERSHOOTS):
        start = perf_counter()
        pause.launch()
        pause.wait(waiter)
        late.append(perf_counter() - start - pause.elapsed_s())
    return float(np.median(late))
