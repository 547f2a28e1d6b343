"""The job's own profile: what its forwards, its host code and its link take on this machine, now.

Forwards are timed bucket by bucket while the other ranks wait. The host's phases are medians of
passes of the very decoding loops over paused forwards (model/paused), once with nothing grown and,
for SSD, once with growth (bench/host_costs).
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from mpissd.backend.base import Backend, Cost
from mpissd.backend.emulated_backend import EmulatedBackend
from mpissd.bench.host_costs import ForwardTimes, PassLedgers, Table, host_costs, pause_of
from mpissd.bench.naps import measure_nap
from mpissd.bench.rank import Rank
from mpissd.bench.session import Session
from mpissd.comm.group import Group
from mpissd.decode.target import TargetLoop
from mpissd.errors import ConfigError
from mpissd.model.paused import PausedForwards
from mpissd.model.stepper import Stepper
from mpissd.predict.costs import DeviceCosts, HostCosts
from mpissd.trace import DraftPhase, LeadPhase
from mpissd.wait import Waiter

WARM_ID = 1 << 30  # request ids of throw-away sequences begin here
_REPEATS = 5
_PAUSED_ROUNDS = 18
_BUILDING_S = 3600.0
_SKIP = 3  # rounds of a pass that still warm up


@dataclass(frozen=True)
class JobProfile:
    """What the predictor needs, measured in this job."""

    device: DeviceCosts
    host: HostCosts
    read_bytes_per_s: float | None  # of the lead's device, as is the peak
    peak_flops_per_s: float | None
    all_reduce_s: float | None  # the collectives of one verification, on their own


def calibrate(rank: Rank) -> JobProfile | None:
    """Runs on every rank; the profile is made on the lead."""
    session = rank.session
    topology = session.topology
    session.barrier(Waiter(_BUILDING_S, spin=False))  # others may still make their weights
    target = _time_forwards(rank.target.stepper, session.waiter) if rank.target else None
    reduces = _all_reduce_s(session, rank.target.stepper) if rank.target else None
    session.barrier()
    draft = _time_forwards(rank.draft.stepper, session.waiter) if rank.draft else None
    session.barrier()
    read = peak = None
    if rank.target is not None and target is not None and topology.is_lead:
        weights, _ = session.job.rank_bytes(session.backend.itemsize)
        read = session.backend.read_bandwidth(weights)
        peak = _peak_flops(session, rank.target.stepper, target)
    session.barrier()
    draft = topology.world.bcast(draft, root=topology.tp) if topology.num_drafts else draft
    target = topology.world.bcast(target, root=0)
    passes = [_paused_pass(rank, target, draft, ahead=False)]
    if session.job.fan_out:
        passes.append(_paused_pass(rank, target, draft, ahead=True))
    nap = _nap(rank, target, draft)
    every = topology.world.gather(passes)
    if every is None or target is None:
        return None
    leads = every[0]
    drafts = every[topology.tp] if topology.num_drafts else every[0]
    host = host_costs(session, leads, drafts, target, draft, nap)
    points = None if draft is None else draft.seconds
    device = DeviceCosts.from_points(target.seconds, points)
    return JobProfile(device, host, read, peak, reduces)


def _time_forwards(stepper: Any, waiter: Any) -> ForwardTimes:
    """Back-to-back forwards of every bucket; collective over the ranks of a model."""
    assert isinstance(stepper, Stepper), "calibration times real forwards"
    seconds, host = {}, []
    for rows in stepper.buckets:
        tokens = np.arange(rows, dtype=np.int32)
        times = []
        for _ in range(_REPEATS + 1):  # as often on every rank: a forward is collective
            stepper.upload(rows, tokens)
            start = perf_counter()
            stepper.launch()
            stepper.wait(waiter)
            wall = perf_counter() - start
            times.append((stepper.elapsed_s(), wall))
        device, walls = np.array(times[1:]).T
        seconds[rows] = float(np.median(device))
        host.append(float(np.median(walls - device)))
    return ForwardTimes(seconds, max(0.0, float(np.median(host))))


def _peak_flops(session: Session, stepper: Any, times: ForwardTimes) -> float | None:
    """Flop a second of the fastest thing measured: a large product, or one of the forwards, which a
    busy CPU may have done in a quieter moment."""
    assert isinstance(stepper, Stepper), "calibration times real forwards"
    peak = session.backend.peak_flops()
    if peak is None or session.backend.info.kind == "emulated":
        return peak
    done = (stepper.cost(rows).flops / s for rows, s in times.seconds.items() if s > 0)
    return max(peak, *done)


def _all_reduce_s(session: Session, stepper: Any) -> float | None:
    """The collectives of a forward of b(K+1) rows; 0 at T = 1, None where they aren't known.

    Inside a captured forward none can be timed by itself, so on GPUs they are timed as a chain of
    their own. On CPUs they are timed where they run (Group.spent_s). Collective over the targets.
    """
    assert isinstance(stepper, Stepper), "calibration times real forwards"
    cost, backend = stepper.cost(stepper.bucket(session.job.verify_rows)), session.backend
    if cost.tp == 1:
        return 0.0
    if isinstance(backend, EmulatedBackend):
        try:
            once = backend.profile.all_reduce_s(cost.tp, cost.all_reduce_bytes)
        except ConfigError:  # it was probed with one rank
            return None
        return cost.num_all_reduces * once
    if session.group.spent_s is not None:
        return None
    return chain_s(backend, session.group, stepper.shard.shape.hidden, cost, session.waiter)


def chain_s(backend: Backend, group: Group, width: int, cost: Cost, waiter: Waiter) -> float:
    """Median seconds of a forward's all-reduces alone: as many, of [rows, width], one after the
    other in one program, captured where the forward is."""
    array = backend.activation(cost.rows, width)

    def reduce_all() -> None:
        for _ in range(cost.num_all_reduces):
            group.all_reduce(array)

    program, seconds = backend.program(reduce_all, cost, capturable=group.capturable), []
    for _ in range(_REPEATS + 1):
        program.launch()
        program.wait(waiter)
        seconds.append(program.elapsed_s())
    program.close()
    return float(np.median(seconds[1:]))


def _paused_pass(
    rank: Rank, target: ForwardTimes | None, draft: ForwardTimes | None, *, ahead: bool
) -> PassLedgers:
    """The loops over pauses as long as the forwards (host_costs.pause_of)."""
    session = rank.session
    sleep = session.backend.info.kind == "emulated"
    worker = drafter = None
    if rank.target is not None:
        worker = rank.target.twin(_paused(rank.target.stepper, target, sleep))
    if rank.draft is not None:
        paused = _paused(rank.draft.stepper, draft, sleep)
        drafter = rank.drafter(rank.draft.twin(paused), ahead=ahead)

    def drive(loop: TargetLoop) -> Table:
        loop.admit(session.requests(WARM_ID, session.job.config.batch_size))
        loop.ledger.restart()
        for _ in range(_PAUSED_ROUNDS):
            loop.step()
            loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
        return loop.ledger.table(_SKIP, _PAUSED_ROUNDS)

    lead = rank.run_pass(worker, drafter, drive)
    if drafter is None:
        return PassLedgers(lead)
    measured = _SKIP, _PAUSED_ROUNDS
    slices = drafter.ledger.slices(*measured)
    steps = np.diff(slices[slices[:, 1] == DraftPhase.GROW, 2:]) * 1e-9
    grow_s = float(np.median(steps)) if len(steps) else None
    return PassLedgers(lead, drafter.ledger.table(*measured), drafter.table(*measured), grow_s)


def _nap(rank: Rank, target: ForwardTimes | None, draft: ForwardTimes | None) -> float:
    """How late a nap ends, after waits as long as those of rounds with nothing grown."""
    job, session = rank.session.job, rank.session
    if draft is None:
        return 0.0
    drafting = job.num_forwards(job.backup_lookahead) * pause_of(draft)(job.config.batch_size)
    verify = pause_of(target)(job.verify_rows)
    return measure_nap(session.topology, session.waiter, drafting, verify)


def _paused(stepper: Any, times: ForwardTimes | None, sleep: bool) -> PausedForwards:
    assert isinstance(stepper, Stepper), "pauses stand for real forwards"
    return PausedForwards(pause_of(times), stepper.stack.buffers.tokens, sleep=sleep)
