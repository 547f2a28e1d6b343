"""Measures the job's own profile: how long its forwards, host code and link take on this machine.

Forwards are timed bucket by bucket while the other ranks wait. Host costs are medians over passes
of the real decoding loops in which pauses replace the forwards (model/paused). One pass grows no
branches; SSD adds a second pass that does (host_costs).
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, Cost
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.comm.group import Group
from mpissd.engine.job import Job
from mpissd.engine.model.shared import GroupView
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Session
from mpissd.engine.workload.placement import timed_places
from mpissd.lab.measure.forward_times import ForwardTimes, Rehearsed, in_sequence
from mpissd.lab.measure.host_costs import LONGEST_PAUSE_S, host_costs
from mpissd.lab.measure.passes import nap_of, paused_pass
from mpissd.lab.measure.rehearsal import LONGEST_S
from mpissd.lab.predict.costs import DeviceCosts, HostCosts

_REPEATS = 5
_MOST_REPEATS, _BUDGET_S = 50, 0.1  # of a transformer on a CPU
_BUILDING_S = 3600.0
_UNSEEN = (
    "alpha",
    "acceptance",
    "seed",
    "rounds",
    "num_tokens",
    "warmup_rounds",
    "out",
)
_GROWN = ("mode", "fan_out", "p_hit", "hit_law")


@dataclass(frozen=True)
class JobProfile:
    """The measurements of this job that the predictor needs."""

    device: DeviceCosts
    host: HostCosts
    read_bytes_per_s: float | None  # read rate of the lead's device
    peak_flops_per_s: float | None
    all_reduce_s: float | None  # seconds of all collectives of one verification
    calibrated_at: str  # when the oldest of these values was measured (ISO 8601, UTC)


def calibrate(rank: Rank) -> JobProfile | None:
    """Measures the job's profile; returns it on the lead and None on the other ranks.

    Collective: every rank calls it. Earlier measurements of the same process are reused.
    """
    session, known = rank.session, rank.session.calibrations
    topology = session.topology
    known.restart()
    session.barrier(Waiter(_BUILDING_S, spin=False))  # the other ranks may still be making weights
    timed = rank.target if topology.group_index == 0 else None  # the groups' devices are alike
    target = _forward_times(session, timed) if timed else None
    reduces = _reduces_s(session, timed) if timed else None
    session.barrier()
    draft = _forward_times(session, rank.draft) if rank.draft else None
    session.barrier()
    read = peak = None
    if timed is not None and target is not None and topology.is_lead:
        read, peak = _rates(session, timed, target)
    session.barrier()
    draft = topology.world.bcast(draft, root=topology.first_draft if topology.num_drafts else 0)
    target = topology.world.bcast(target, root=0)
    if topology.groups > 1:  # nothing predicts rounds that wait for other groups' answers
        if not topology.is_lead or target is None:
            return None
        device = in_sequence(session.job, Rehearsed(), Rehearsed(), target, draft)
        return JobProfile(device, HostCosts(), read, peak, reduces, known.since)
    key = "host", _key(session.job, ()), session.job.fan_outs
    measured = known.once(session.backend, key, lambda: _host_costs(rank, target, draft))
    if measured is None or target is None:
        return None
    host, device = measured
    return JobProfile(device, host, read, peak, reduces, known.since)


def _key(job: Job, unseen: Iterable[str]) -> Hashable:
    """Returns a key; configurations with equal keys have rounds of equal cost.

    unseen: names of further flags to ignore.
    """
    flags = asdict(job.config)
    flags_read = json.dumps({n: v for n, v in flags.items() if n not in {*unseen, *_UNSEEN}})
    return flags_read, job.lookahead, job.config.drafts, job.draft


def _host_costs(
    rank: Rank, target: ForwardTimes | None, draft: ForwardTimes | None
) -> tuple[HostCosts, DeviceCosts] | None:
    """Measures the host costs of the job's decoding loops over paused forwards, or rehearsed ones.

    Collective over the job's world; returns these and the forwards' costs on the lead, and None
    elsewhere. The pass without branches does not depend on the hit model or the fan-out, so
    configurations with equal pauses share it.
    """
    session, known = rank.session, rank.session.calibrations
    topology, plain = session.topology, _pass_key(session.job, target, draft)
    owner = session.backend
    passes = [
        known.once(owner, ("pass", plain), lambda: paused_pass(rank, target, draft, ahead=False))
    ]
    if session.job.fan_out:
        passes.append(paused_pass(rank, target, draft, ahead=True))
    nap = known.once(owner, ("nap", plain), lambda: nap_of(rank, target, draft))
    every = topology.world.gather(passes)
    if every is None or target is None:
        return None
    leads = every[0]
    drafts = every[topology.first_draft] if topology.num_drafts else every[0]
    device = in_sequence(session.job, leads[-1].rehearsed, drafts[-1].rehearsed, target, draft)
    if rank.chained is not None:  # nothing of a round waits for the host
        return HostCosts(), device
    return host_costs(session, leads, drafts, target, draft, nap), device


def _pass_key(job: Job, target: ForwardTimes | None, draft: ForwardTimes | None) -> Hashable:
    """Returns a key for configurations that can share one paused pass without branches.

    The lengths of the pauses are part of the key: a draft that may grow more rows can run another
    kernel, and its forward then takes a different time.
    """
    assert target is not None, "a pass without a measured forward"
    drafting = None if draft is None else min(draft(job.config.batch_size), LONGEST_PAUSE_S)
    return _key(job, _GROWN), min(target(job.verify_rows), LONGEST_PAUSE_S), drafting


def _forward_times(session: Session, worker: Any) -> ForwardTimes:
    """Times the forward of every bucket of a worker's model; collective over that model's ranks.

    A glue (the draft's scoring forward) is also timed with all the candidates that it reads.
    """
    stepper, known, job = _stepper(worker), session.calibrations, session.job

    def timed(rows: int, lists: bool) -> tuple[float, float]:
        measured = partial(_time, stepper, rows, session, lists=lists)
        found: tuple[float, float] = known.once(stepper.stack, (rows, lists), measured)
        return found

    every = {rows: timed(rows, False) for rows in stepper.buckets}
    seconds = {rows: device for rows, (device, _) in every.items()}
    host_s = max(0.0, float(np.median([host for _, host in every.values()])))
    on_host = session.backend.info.kind == "cpu" and stepper.options.capacity > 0
    times = ForwardTimes(seconds, host_s, on_host and max(seconds.values()) <= LONGEST_S)
    candidates, live = stepper.options.top_k, range(1, job.config.batch_size + 1)
    if candidates == 1:
        return times
    glues = sorted({stepper.bucket(n * (job.lookahead + 1)) for n in live})
    lists = {rows: timed(rows, True)[0] for rows in glues}
    return replace(times, candidates=candidates, lists=lists)


def _time(stepper: Stepper, rows: int, session: Session, *, lists: bool) -> tuple[float, float]:
    """Times repeated forwards of `rows` rows.

    Returns two medians in seconds: time on the device, and time that the host adds to it.
    """
    sequences, times = session.job.config.batch_size, list[tuple[float, float]]()
    tokens = np.arange(rows, dtype=np.int32) % stepper.shard.shape.vocab_size
    places = timed_places(rows, sequences, stepper.options)

    def once() -> float:
        stepper.upload(rows, tokens, places, lists=lists)
        start = perf_counter()
        stepper.launch()
        stepper.wait(session.waiter)
        times.append((stepper.elapsed_s(), perf_counter() - start))
        return times[-1][1]

    for _ in range(_repeats(session, stepper, once())):
        once()
    stepper.release(range(sequences))
    device, walls = np.array(times[1:]).T
    return float(np.median(device)), float(np.median(walls - device))


def _repeats(session: Session, stepper: Stepper, first_s: float) -> int:
    """Returns how often to time a forward: more often where other work may slow a host's cores.

    It is the same number on every rank of the forward, which is collective.
    """
    if session.backend.info.kind != "cpu" or not stepper.options.capacity:
        return _REPEATS
    if stepper.stack.group.size > 1:
        first_s = session.topology.group.bcast(first_s)
    return int(min(max(_BUDGET_S / first_s, _REPEATS), _MOST_REPEATS))


def _rates(session: Session, worker: Any, times: ForwardTimes) -> tuple[float | None, float | None]:
    """Returns the rates that bound a forward on the lead: bytes and flops per second, or None."""
    stepper, known = _stepper(worker), session.calibrations
    weights, _ = session.job.rank_bytes(session.backend.itemsize)
    read = known.once(
        session.backend, ("read", weights), lambda: session.backend.read_bandwidth(weights)
    )
    peak = known.once(
        stepper.stack, tuple(stepper.buckets), lambda: _peak_flops(session, stepper, times)
    )
    return read, peak


def _reduces_s(session: Session, worker: Any) -> float | None:
    stepper, known = _stepper(worker), session.calibrations
    rows = stepper.bucket(session.job.verify_rows)
    return known.once(stepper.stack, ("sums", rows), lambda: _all_reduce_s(session, stepper))


def _stepper(worker: Any) -> Stepper:
    stepper = worker.stepper
    if isinstance(stepper, GroupView):
        stepper = stepper.shared.stepper
    assert isinstance(stepper, Stepper), "calibration times real forwards"
    return stepper


def _peak_flops(session: Session, stepper: Any, times: ForwardTimes) -> float | None:
    """Returns the peak flops per second of the lead's device, or None if it is unknown.

    The peak is the highest rate measured, whether in a large matrix product or in one of the
    forwards: on a busy CPU a forward may have run in a quieter moment than the product.
    """
    assert isinstance(stepper, Stepper), "calibration times real forwards"
    peak = session.backend.peak_flops()
    if peak is None or session.backend.info.kind == "emulated":
        return peak
    done = (stepper.cost(rows).flops / s for rows, s in times.seconds.items() if s > 0)
    return max(peak, *done)


def _all_reduce_s(session: Session, stepper: Any) -> float | None:
    """Returns the seconds that the all-reduces of a forward of b(K+1) rows take.

    The result is 0 at T = 1 and None if the time is unknown. An all-reduce inside a captured
    forward cannot be timed on its own, so on GPUs the same number of them is timed as a separate
    chain. On CPUs they are timed where they run (Group.spent_s). Collective over the target ranks.
    """
    assert isinstance(stepper, Stepper), "calibration times real forwards"
    cost, backend = stepper.cost(stepper.bucket(session.job.verify_rows)), session.backend
    if cost.tp == 1:
        return 0.0
    if isinstance(backend, EmulatedBackend):
        try:
            once = backend.profile.all_reduce_s(cost.tp, cost.all_reduce_bytes)
        except ConfigError:  # the profile was probed on one rank and has no all-reduces
            return None
        return cost.num_all_reduces * once
    if session.group.spent_s is not None:
        return None
    return chain_s(backend, session.group, stepper.shard.shape.hidden, cost, session.waiter)


def chain_s(backend: Backend, group: Group, width: int, cost: Cost, waiter: Waiter) -> float:
    """Returns the median seconds of only a forward's all-reduces, run one after another.

    They run as one program on an array [rows, width], captured where the forward is captured.
    """
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
