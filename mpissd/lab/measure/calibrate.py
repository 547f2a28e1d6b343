"""Times a job's forwards in series, and measures the rates that bound them, before its rounds.

Forwards are timed bucket by bucket while the other ranks wait. The host's work is not calibrated:
it is read off the ledgers of the warm-up rounds (host_costs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, Cost
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.comm.group import Group
from mpissd.engine.model.shared import GroupView
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Session
from mpissd.engine.workload.sequence import timed_places
from mpissd.lab.predict.costs import DeviceCosts, HostCosts

_REPEATS = 5
_MOST_REPEATS, _BUDGET_S = 50, 0.1  # of a transformer on a CPU
_BUILDING_S = 3600.0
Seconds = Mapping[int, float]  # of a forward, by its rows


@dataclass(frozen=True)
class JobProfile:
    """The measurements of this job that the predictor needs, and the rates of its floor."""

    device: DeviceCosts
    read_bytes_per_s: float | None  # read rate of the lead's device
    peak_flops_per_s: float | None
    all_reduce_s: float | None  # seconds of all collectives of one verification
    calibrated_at: str  # when the oldest of these values was measured (ISO 8601, UTC)
    host: HostCosts = field(default_factory=HostCosts)


def calibrate(rank: Rank) -> JobProfile | None:
    """Measures the job's profile without host costs; returns it on the lead, None elsewhere.

    Collective: every rank calls it. Earlier measurements of the same process are reused.
    """
    session, known = rank.session, rank.session.calibrations
    topology = session.topology
    known.restart()
    session.barrier(Waiter(_BUILDING_S, spin=False))  # the other ranks may still be making weights
    stepper = None  # of the first target group: the groups' devices are alike
    target: tuple[Seconds, Mapping[int, Seconds]] | None = None
    reduces = None
    if topology.group_index == 0 and rank.target is not None:
        stepper = _stepper(rank.target)
        target = _forward_times(session, stepper)
        rows = stepper.bucket(session.job.verify_rows)
        reduces = known.once(
            stepper.stack, ("sums", rows), partial(_all_reduce_s, session, stepper)
        )
    session.barrier()
    draft = _forward_times(session, _stepper(rank.draft)) if rank.draft else None
    session.barrier()
    read = peak = None
    if stepper is not None and target is not None and topology.is_lead:
        backend, (weights, _) = session.backend, session.job.rank_bytes(session.backend.itemsize)
        read = known.once(backend, ("read", weights), partial(backend.read_bandwidth, weights))
        measured = partial(_peak_flops, session, stepper, target[0])
        peak = known.once(stepper.stack, tuple(stepper.buckets), measured)
    session.barrier()
    draft = topology.world.bcast(draft, root=topology.first_draft if topology.num_drafts else 0)
    if not topology.is_lead or target is None:
        return None
    device = DeviceCosts.from_points(target[0], *(draft or ()))
    return JobProfile(device, read, peak, reduces, known.since)


def _stepper(worker: Any) -> Stepper:
    stepper = worker.stepper
    if isinstance(stepper, GroupView):
        stepper = stepper.shared.stepper
    assert isinstance(stepper, Stepper), "calibration times real forwards"
    return stepper


def _forward_times(session: Session, stepper: Stepper) -> tuple[Seconds, Mapping[int, Seconds]]:
    """Times the forward of every bucket of a model; collective over that model's ranks.

    Returns {rows: seconds}, and {candidates: the same} of scoring forwards (glues), which read out
    several candidates of each row; empty without such forwards.
    """
    known, job = session.calibrations, session.job

    def timed(rows: int, *, lists: bool) -> float:
        measure = partial(_time, stepper, rows, session, lists=lists)
        return known.once(stepper.stack, (rows, lists), measure)

    seconds = {rows: timed(rows, lists=False) for rows in stepper.buckets}
    candidates, live = stepper.options.top_k, range(1, job.config.batch_size + 1)
    if candidates == 1:
        return seconds, {}
    glues = sorted({stepper.bucket(n * (job.lookahead + 1)) for n in live})
    return seconds, {candidates: {rows: timed(rows, lists=True) for rows in glues}}


def _time(stepper: Stepper, rows: int, session: Session, *, lists: bool) -> float:
    """Returns the median device seconds of repeated forwards of `rows` rows."""
    sequences, times = session.job.config.batch_size, list[float]()
    tokens = np.arange(rows, dtype=np.int32) % stepper.shard.shape.vocab_size
    places = timed_places(rows, sequences, stepper.options)

    def once() -> float:
        stepper.upload(rows, tokens, places, lists=lists)
        start = perf_counter()
        stepper.launch()
        stepper.wait(session.waiter)
        times.append(stepper.elapsed_s())
        return perf_counter() - start

    for _ in range(_repeats(session, stepper, once())):
        once()
    stepper.release(range(sequences))
    return float(np.median(times[1:]))


def _repeats(session: Session, stepper: Stepper, first_s: float) -> int:
    """Returns how often to time a forward: more often where other work may slow a host's cores.

    It is the same number on every rank of the forward, which is collective.
    """
    if session.backend.info.kind != "cpu" or not stepper.options.capacity:
        return _REPEATS
    if stepper.stack.group.size > 1:
        first_s = session.topology.group.bcast(first_s)
    return int(min(max(_BUDGET_S / first_s, _REPEATS), _MOST_REPEATS))


def _peak_flops(session: Session, stepper: Stepper, seconds: Seconds) -> float | None:
    """Returns the peak flops per second of the lead's device, or None if it is unknown.

    The peak is the highest rate measured, whether in a large matrix product or in one of the
    forwards: on a busy CPU a forward may have run in a quieter moment than the product.
    """
    peak = session.backend.peak_flops()
    if peak is None or session.backend.info.kind == "emulated":
        return peak
    return max(peak, *(stepper.cost(rows).flops / s for rows, s in seconds.items() if s > 0))


def _all_reduce_s(session: Session, stepper: Stepper) -> float | None:
    """Returns the seconds that the all-reduces of a forward of b(K+1) rows take.

    The result is 0 at T = 1 and None if the time is unknown. An all-reduce inside a captured
    forward cannot be timed on its own, so on GPUs the same number of them is timed as a separate
    chain. On CPUs they are timed where they run (Group.spent_s). Collective over the target ranks.
    """
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
