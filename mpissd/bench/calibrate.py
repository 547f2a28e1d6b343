"""The job's own profile: what its forwards, its host code and its link take on this machine, now.

Forwards are timed bucket by bucket while the other ranks wait. The host's phases are medians of
passes of the very decoding loops over paused forwards (model/paused), once with nothing grown and,
for SSD, once with growth; what the lead waited beyond the draft's own phases is the link's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.bench.rank import Rank
from mpissd.decode.draft import Drafter
from mpissd.decode.target import TargetLoop
from mpissd.model.paused import PausedForwards
from mpissd.model.stepper import Stepper
from mpissd.predict.costs import DeviceCosts, HostCosts
from mpissd.rounds import Request
from mpissd.trace import DraftPhase, LeadPhase
from mpissd.wait import Waiter

WARM_ID = 1 << 30  # request ids of throw-away sequences begin here
_REPEATS = 5
_PAUSED_ROUNDS = 18
_BUILDING_S = 3600.0
_LONGEST_PAUSE_S = 8e-3
_SKIP = 3  # rounds of a pass that still warm up

Table = NDArray[np.int64]


@dataclass(frozen=True)
class ForwardTimes:
    """Median device seconds of a forward by rows, and what a launch and a wait add on the host."""

    seconds: dict[int, float]
    host_s: float


@dataclass(frozen=True)
class PassLedgers:
    """Ledgers of one pass: lead rows on the lead, draft rows where the draft is."""

    lead: Table | None
    draft: Table | None
    num_jit: NDArray[Any] | None  # [n] misses of each draft row


@dataclass(frozen=True)
class JobProfile:
    """What the predictor needs, measured in this job."""

    device: DeviceCosts
    host: HostCosts
    read_bytes_per_s: float | None


def requests(first_id: int, count: int) -> list[Request]:
    """`count` sequences, numbered from first_id."""
    return [Request(first_id + n, first_token=n) for n in range(count)]


def calibrate(rank: Rank) -> JobProfile | None:
    """Runs on every rank; the profile is made on the lead."""
    session = rank.session
    topology = session.topology
    session.barrier(Waiter(_BUILDING_S, spin=False))  # others may still make their weights
    target = _time_forwards(rank.target.stepper, session.waiter) if rank.target else None
    session.barrier()
    draft = _time_forwards(rank.draft.stepper, session.waiter) if rank.draft else None
    session.barrier()
    read = None
    if topology.is_lead:
        weights, _ = session.job.rank_bytes(session.backend.itemsize)
        read = session.backend.read_bandwidth(weights)
    session.barrier()
    draft = topology.world.bcast(draft, root=topology.tp) if topology.num_drafts else draft
    target = topology.world.bcast(target, root=0)
    passes = [_paused_pass(rank, target, draft, ahead=False)]
    if session.job.fan_out:
        passes.append(_paused_pass(rank, target, draft, ahead=True))
    every = topology.world.gather(passes)
    if every is None or target is None:
        return None
    leads = every[0]
    drafts = every[topology.tp] if topology.num_drafts else every[0]
    host = _host_costs(rank, leads, drafts, target, draft)
    points = None if draft is None else draft.seconds
    return JobProfile(DeviceCosts.from_points(target.seconds, points), host, read)


def _time_forwards(stepper: Any, waiter: Any) -> ForwardTimes:
    """Back-to-back forwards of every bucket; collective over the ranks of a model."""
    assert isinstance(stepper, Stepper), "calibration times real forwards"
    seconds, host = {}, []
    for rows in stepper.buckets:
        tokens = np.arange(rows, dtype=np.int32)
        times = []
        for _ in range(_REPEATS + 1):  # as often on every rank: a forward is collective
            start = perf_counter()
            stepper.launch(rows, tokens)
            stepper.wait(waiter)
            wall = perf_counter() - start
            times.append((stepper.elapsed_s(), wall))
        device, walls = np.array(times[1:]).T
        seconds[rows] = float(np.median(device))
        host.append(float(np.median(walls - device)))
    return ForwardTimes(seconds, max(0.0, float(np.median(host))))


def _paused_pass(
    rank: Rank, target: ForwardTimes | None, draft: ForwardTimes | None, *, ahead: bool
) -> PassLedgers:
    """The loops over pauses as long as the forwards (8 ms at most, so that a pass stays short)."""
    session = rank.session
    sleep = session.backend.info.kind == "emulated"
    worker = drafter = None
    if rank.target is not None:
        worker = rank.target.twin(PausedForwards(_pause(target), sleep=sleep))
    if rank.draft is not None:
        paused = PausedForwards(_pause(draft), sleep=sleep)
        drafter = rank.drafter(rank.draft.twin(paused), ahead=ahead)

    def drive(loop: TargetLoop) -> Table:
        loop.admit(requests(WARM_ID, session.job.config.batch_size))
        loop.ledger.restart()
        for _ in range(_PAUSED_ROUNDS):
            loop.step()
            loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
        return loop.ledger.table(_SKIP, _PAUSED_ROUNDS)

    lead = rank.run_pass(worker, drafter, drive)
    if drafter is None:
        return PassLedgers(lead, None, None)
    num_jit = drafter.table(_SKIP, _PAUSED_ROUNDS)[:, Drafter.COLUMNS.index("num_jit")]
    return PassLedgers(lead, drafter.ledger.table(_SKIP, _PAUSED_ROUNDS), num_jit)


def _pause(times: ForwardTimes | None) -> Callable[[int], float]:
    assert times is not None, "a pause without a measured forward"
    known = sorted(times.seconds)

    def pause_s(rows: int) -> float:
        bucket = next((n for n in known if n >= rows), known[-1])
        return min(times.seconds[bucket], _LONGEST_PAUSE_S)

    return pause_s


def _host_costs(
    rank: Rank,
    leads: list[PassLedgers],
    drafts: list[PassLedgers],
    target: ForwardTimes,
    draft: ForwardTimes | None,
) -> HostCosts:
    """HostCosts of the paused passes: the first grows nothing, the second (SSD) does."""
    job = rank.session.job
    lead = _phases(leads[-1].lead, LeadPhase)
    late = _overshoot(rank)
    costs = {f"lead_{phase.name.lower()}": lead[phase] for phase in _LEAD_COSTS}
    verify = _pause(target)(job.verify_rows)
    costs["wake"] = lead[LeadPhase.DEVICE_WAIT] - verify + target.host_s - late
    if draft is not None:
        costs |= _draft_costs(rank, leads[0], drafts, draft, late)
    if job.tp > 1 and rank.session.backend.info.kind != "emulated":
        costs["follower"] = costs.get("link", 0.0) + costs["lead_commit"] + costs["lead_launch"]
    return HostCosts(**{name: max(0.0, float(value)) for name, value in costs.items()})


_LEAD_COSTS = (
    LeadPhase.SEND,
    LeadPhase.COMMIT,
    LeadPhase.BROADCAST,
    LeadPhase.LAUNCH,
    LeadPhase.SAMPLE,
    LeadPhase.RECORD,
)


def _draft_costs(
    rank: Rank, lead: PassLedgers, drafts: list[PassLedgers], draft: ForwardTimes, late: float
) -> dict[str, float]:
    """The draft's fields; `lead` is the ledger of the pass with nothing grown."""
    job = rank.session.job
    plain, pause_s = _phases(drafts[0].draft, DraftPhase), _pause(draft)
    again = draft.host_s - late  # what a real launch and wait take beyond a pause's
    backup = job.backup_lookahead if job.config.backup == "jit" else 0
    costs = {
        "draft_commit": plain[DraftPhase.COMMIT],
        "draft_lookup": plain[DraftPhase.LOOKUP],
        "draft_send": plain[DraftPhase.SEND],
        "draft_record": plain[DraftPhase.RECORD],
        "draft_assemble": 0.0,
    }
    if len(drafts) > 1:
        costs |= _growth_costs(rank, drafts[1], pause_s, again)
    steps_s = plain[DraftPhase.SPECULATE] - costs["draft_assemble"]
    if backup:
        costs["step"] = steps_s / backup - pause_s(job.config.batch_size) + again
    if rank.session.topology.num_drafts:
        costs["link"] = _link_s(lead, drafts[0])
    return costs


def _growth_costs(
    rank: Rank, grown: PassLedgers, pause_s: Callable[[int], float], again: float
) -> dict[str, float]:
    job = rank.session.job
    phases = _phases(grown.draft, DraftPhase)
    costs = {
        "draft_lookup": phases[DraftPhase.LOOKUP],
        "draft_commit": phases[DraftPhase.COMMIT],
        "glue": phases[DraftPhase.GLUE] - pause_s(job.verify_rows) + again,
        "keys": phases[DraftPhase.KEYS],
    }
    assert grown.draft is not None and grown.num_jit is not None, "a grown pass without a draft"
    hits = grown.draft[grown.num_jit == 0]
    if len(hits):  # the quickest: its branches were all grown
        costs["draft_assemble"] = float(hits[:, 2 + DraftPhase.SPECULATE].min()) * 1e-9
        step = pause_s(job.config.batch_size)
        if job.config.on_late == "finish" and costs["draft_assemble"] > step:
            costs["draft_assemble"] = 0.0  # no hit found its branches grown
    return costs


def _link_s(lead: PassLedgers, draft: PassLedgers) -> float:
    """One way: what the lead waits beyond the draft's own phases, halved; median over rounds."""
    assert lead.lead is not None and draft.draft is not None, "a link needs both ends"
    own = (DraftPhase.COMMIT, DraftPhase.LOOKUP, DraftPhase.SPECULATE, DraftPhase.SEND)
    waited = lead.lead[:, 2 + LeadPhase.DRAFT_WAIT] + lead.lead[:, 2 + LeadPhase.COMMIT]
    worked = sum(draft.draft[:, 2 + phase] for phase in own)
    return float(np.median(waited - worked)) * 0.5e-9


def _phases(table: Table | None, phases: Any) -> dict[Any, float]:
    """Median seconds of each phase."""
    assert table is not None and len(table), "a pass without rounds"
    medians = np.median(table[:, 2:], axis=0) * 1e-9
    return {phase: float(medians[phase]) for phase in phases}


def _overshoot(rank: Rank) -> float:
    """How much later than its pause a paused forward ends, launch included; median."""
    waiter = rank.session.waiter
    pause = PausedForwards(lambda rows: 1e-3, sleep=rank.session.backend.info.kind == "emulated")
    late = []
    for _ in range(_REPEATS):
        start = perf_counter()
        pause.launch(1, np.zeros(1, np.int32))
        pause.wait(waiter)
        late.append(perf_counter() - start - pause.elapsed_s())
    return float(np.median(late))
