"""Times a job's forwards in series, and reads the host's costs off the ledgers of warm-up rounds.

`calibrate` runs before the rounds: it times forwards bucket by bucket while the other ranks wait,
and measures the rates that bound them. `host_costs` computes HostCosts afterwards. Each cost is the
median of a phase; a phase that waits for a forward counts only its time beyond the forward in
series. Measured rounds are not used, so that a row's prediction does not depend on the numbers that
it is compared with. The part of the lead's wait that the draft's phases do not explain is the
link's time, with naps of both ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter, thread_time
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpissd.common.config import DEFAULT_PAIR, RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.real_pairs import DEFAULT_RATES
from mpissd.common.rounds import Source
from mpissd.common.trace import DraftLog, DraftPhase, LeadPhase
from mpissd.common.wait import Waiter
from mpissd.engine.backend.profile import EmulatedBackend
from mpissd.engine.comm.topology import agreed
from mpissd.engine.features.pool import GroupForwards
from mpissd.engine.job import Job
from mpissd.engine.law.acceptance import AcceptanceLaw
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.round.sequence import trunk_places
from mpissd.engine.round.target import TargetLoop
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Machine, Session
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts, RowTable
from mpissd.lab.predict.simulation import Grid, expect

WARM_ID = 1 << 30  # first request id of the warm-up's sequences
_SKIPPED = 6  # one of so many warm-up rounds, the first ones, does not count
_REPEATS = 5
_MOST_REPEATS = 50  # of a transformer's forward on a CPU
_BUDGET_S = 0.1  # for these repeats
_BUILDING_S = 3600.0
_MOST_K = 10  # the largest K that is tried where acceptance is imposed
_CHOSEN = "lookahead", "fan_out", "backup_lookahead"
_VERIFIED = (1, 4, 8)  # rows of the target's forwards that are timed to choose K
_DRAFTED = (1, 8, 16)  # rows of the draft's
_MARGIN = 1.05  # the default K and fan-out stay unless others are so much faster
Seconds = Mapping[int, float]  # seconds of a forward, by its rows
Value = TypeVar("Value")


@dataclass(frozen=True)
class JobProfile:
    """Measured device costs of this job for the predictor, and rates for the floor of a forward."""

    device: DeviceCosts
    read_bytes_per_s: float | None  # read rate of the lead's device
    peak_flops_per_s: float | None
    all_reduce_s: float | None  # seconds of all collectives of one verification
    calibrated_at: str  # when the oldest of these values was measured (ISO 8601, UTC)
    host: HostCosts = field(default_factory=HostCosts)


def calibrate(rank: Rank, *, is_brief: bool = False) -> JobProfile | None:
    """Times the job's forwards; returns its profile without host costs on the lead rank, None
    elsewhere. Collective. Measurements of the same process are reused. is_brief: each forward is
    timed once, and the rates stay unknown."""
    session = rank.session
    topology = session.topology
    backend = session.backend
    job = session.job
    used = list[datetime]()

    def once(owner: Any, key: Hashable, measure: Callable[[], Value]) -> Value:
        """Returns the value of `measure`, or the value measured before for (owner, key)."""
        values = session.calibrations.setdefault(owner, {})
        if key not in values:
            values[key] = measure(), datetime.now(timezone.utc)
        value: Value = values[key][0]
        used.append(values[key][1])
        return value

    def forward_times(stepper: Stepper) -> tuple[Seconds, Mapping[int, Seconds]]:
        """Returns {rows: seconds} of a model's forwards, and {candidates: {rows: seconds}} of those
        that score candidates of each row. Collective over the model's ranks."""

        def timed(rows: int, *, lists: bool) -> float:
            measure = partial(_time, stepper, rows, session, lists=lists, is_brief=is_brief)
            return once(stepper.stack, (rows, lists), measure)

        seconds = {rows: timed(rows, lists=False) for rows in stepper.buckets}
        candidates = stepper.options.top_k
        if candidates == 1:
            return seconds, {}
        live = range(1, job.config.batch_size + 1)
        scoring = sorted({stepper.bucket(n * (job.lookahead + 1)) for n in live})
        return seconds, {candidates: {rows: timed(rows, lists=True) for rows in scoring}}

    session.barrier(Waiter(_BUILDING_S, spin=False))  # the other ranks may still be making weights
    stepper = None  # only the first target group measures: devices are alike
    seconds: Seconds = {}
    reduces = read = peak = None
    if topology.group_index == 0 and rank.target is not None:
        stepper = _stepper(rank.target)
        seconds, _ = forward_times(stepper)
        rows = stepper.bucket(job.verify_rows)
        reduces = once(stepper.stack, ("sums", rows), partial(_all_reduce_s, session, stepper))
    session.barrier()
    draft = forward_times(_stepper(rank.draft)) if rank.draft else None
    session.barrier()
    if stepper is not None and topology.is_lead and not is_brief:
        weights, _ = job.rank_bytes(backend.itemsize)
        read = once(backend, ("read", weights), partial(backend.read_bandwidth, weights))
        peak = once(stepper.stack, tuple(stepper.buckets), backend.peak_flops)
        if peak is not None and backend.info.kind != "emulated":
            # On a busy CPU a forward may have run in a quieter moment than the large product.
            rates = (stepper.cost(rows).flops / s for rows, s in seconds.items() if s > 0)
            peak = max(peak, *rates)
    session.barrier()
    draft = topology.world.bcast(draft, root=topology.first_draft if topology.num_drafts else 0)
    if not topology.is_lead or stepper is None:
        return None
    device = DeviceCosts.from_points(seconds, *(draft or ()))
    return JobProfile(device, read, peak, reduces, min(used).isoformat(timespec="milliseconds"))


def _stepper(worker: Any) -> Stepper:
    stepper = worker.stepper
    if isinstance(stepper, GroupForwards):
        stepper = stepper.shared.stepper
    assert isinstance(stepper, Stepper), "calibration times real forwards"
    return stepper


def forwards(
    stepper: Stepper, rows: int, sequences: int, waiter: Waiter, *, lists: bool = False
) -> Iterator[float]:
    """Runs a forward of `rows` rows each time a value is requested, and yields its device seconds.
    Rows are uploaded each time, since forwards of other sizes may run in between."""
    tokens = np.arange(rows, dtype=np.int32) % stepper.shard.shape.vocab_size
    places = _timed_places(rows, sequences, stepper.options)
    while True:
        stepper.upload(rows, tokens, places, lists=lists)
        stepper.launch()
        stepper.wait(waiter)
        yield stepper.elapsed_s()


def _timed_places(rows: int, sequences: int, options: ForwardOptions) -> Places | None:
    """Returns places of `rows` rows after the mean context, for timing; None without a cache. Rows
    are grouped by sequence as in a verification, so that neighbours read the same keys and values.
    """
    if not options.capacity:
        return None
    number = np.arange(rows)
    slots = number * min(sequences, rows) // rows
    later = number - np.searchsorted(slots, slots)
    return trunk_places(slots, np.minimum(options.context + later, options.capacity - 1))


def _time(stepper: Stepper, rows: int, session: Session, *, lists: bool, is_brief: bool) -> float:
    """Returns the median device seconds of repeated forwards of `rows` rows; on a CPU more are run,
    since other processes may slow its cores. is_brief: only one counts."""
    batch = session.job.config.batch_size
    start = perf_counter()
    timed = forwards(stepper, rows, batch, session.waiter, lists=lists)
    next(timed)
    repeats = _REPEATS
    first_s = perf_counter() - start
    if is_brief:
        repeats = 1
    elif session.backend.info.kind == "cpu" and stepper.options.capacity:
        if stepper.stack.group.size > 1:  # the same number on every rank of the forward
            first_s = session.topology.group.bcast(first_s)
        repeats = int(min(max(_BUDGET_S / first_s, _REPEATS), _MOST_REPEATS))
    times = [next(timed) for _ in range(repeats)]
    stepper.release(range(batch))
    return float(np.median(times))


def chosen(session: Session) -> dict[str, Any] | None:
    """Returns the seconds from which K and fan-out of the shipped pair were chosen, or None."""
    values = session.calibrations.get(session.backend, {})
    config = session.job.config
    value, _ = values.get(("chosen", config.mode, config.drafts), (None, None))
    return value


def choose(machine: Machine, config: RunConfig, given: AbstractSet[str]) -> RunConfig:
    """Returns the configuration with the fastest K and fan-out here if no given flag says them.
    Collective. Only for one sequence of the shipped pair on CPUs, whose
    acceptance is known; the timed seconds are kept for `chosen`."""
    if not (_is_chosen_here(machine, config) and given.isdisjoint(_CHOSEN)):
        return config
    with agreed(machine.topology.world):
        job = machine.resolve(config)
    return _timed_best(machine, config, job, DEFAULT_RATES)


def best_k(machine: Machine, config: RunConfig, rates: Sequence[float] | None = None) -> RunConfig:
    """Returns the configuration of SD with its fastest K on this division of the machine.
    Collective; raises Refused. rates: measured acceptance rates by position; without rates, K stays
    unless the workload imposes rates or the pair is the shipped one."""
    job: Job | None = None
    with agreed(machine.topology.world):
        for k in range(_MOST_K, config.lookahead, -1) if not config.is_text else ():
            with suppress(ConfigError):  # a list of rates, or a recording, may have fewer
                job = machine.resolve(replace(config, lookahead=k))
                break
        job = job or machine.resolve(config)
    if _is_chosen_here(machine, config):
        rates = DEFAULT_RATES
    elif job.workload.is_imposed:
        rates = job.acceptance[Source.JIT].hazards
    elif rates is None:
        return config
    count = _MOST_K if config.is_text else job.lookahead
    return _timed_best(machine, config, job, rates[:count])


def _is_chosen_here(machine: Machine, config: RunConfig) -> bool:
    """Whether a run of this configuration chooses K: one sequence of the shipped pair on CPUs."""
    is_shipped = config.is_text and (config.pair or "").lower() == DEFAULT_PAIR
    is_one = config.batch_size == config.groups == 1 and not (config.tree or config.learners)
    is_drafted = config.mode != "ar" and config.backup == "jit" and machine.backend.name == "numpy"
    return is_shipped and is_one and is_drafted


def _timed_best(machine: Machine, config: RunConfig, job: Job, rates: Sequence[float]) -> RunConfig:
    """Returns the configuration with the K and fan-out that are fastest by forwards timed here.
    Collective. job: a job with the rows to time. rates: acceptance rates by position."""
    machine.models.expect([job])
    best = None
    session = machine.session(job)
    if session is not None:
        verify_s, draft_s = _deciding_forwards(session)
        values = {"verify_s": verify_s, "draft_s": draft_s}
        kept = machine.calibrations.setdefault(machine.backend, {})
        kept["chosen", config.mode, config.drafts] = values, datetime.now(timezone.utc)
        if session.topology.is_lead:
            best = fastest(replace(job, lookahead=config.lookahead), verify_s, draft_s, rates)
    best = machine.topology.world.bcast(best)
    return replace(config, **dict(zip(_CHOSEN, best, strict=False)))


def _deciding_forwards(session: Session) -> tuple[Seconds, Seconds]:
    """Returns {rows: median seconds} of the target's and of the draft's forwards; collective. On
    CPUs they are CPU seconds, without other processes' turns. In SSD both ranks are timed at once,
    as they share the memory's bandwidth."""
    topology = session.topology
    config = session.job.config
    is_ahead = config.mode == "ssd"
    batch = config.batch_size
    clock = thread_time if session.backend.name == "numpy" else perf_counter
    target, draft = session.models.open(session.job, topology)

    def timed(stepper: Stepper | None, sizes: Sequence[int], turns: int) -> Seconds:
        if stepper is None:
            return {}
        sizes = [batch * n for n in sizes if batch * n <= stepper.buckets[-1]]
        runs = [forwards(stepper, n, batch, session.waiter) for n in sizes]
        seconds = list[float]()
        for run in runs * turns:
            start = clock()
            next(run)
            seconds.append(clock() - start)
        stepper.release(range(batch))
        return {rows: median(seconds[n :: len(sizes)]) for n, rows in enumerate(sizes)}

    for stepper in (target, draft):
        timed(stepper, (1,), 1)  # loads the compiled kernels
    session.barrier()
    verify_s = timed(target, _VERIFIED, 3)
    if not is_ahead:
        session.barrier()
    draft_s = timed(draft, _DRAFTED, 9 if is_ahead else 3)  # ahead: as long as the target's
    root = topology.first_draft if config.drafts else 0
    return verify_s, topology.world.bcast(draft_s, root=root)


def fastest(
    job: Job, verify_s: Seconds, draft_s: Seconds, rates: Sequence[float] = DEFAULT_RATES
) -> tuple[int, str]:
    """Returns the K and fan-out with the highest expected rate; the job's own unless others are 5%
    faster. rates: acceptance by position. The expected rate is a mean over errors of draft_s, since
    a draft step that just fits into a forward promises too much."""
    default = (job.lookahead, job.config.fan_out)
    jobs = dict[tuple[int, str], Job]()
    for k, f in product(range(1, 1 + len(rates)), (1, 2, 3) if job.fan_out else (0,)):
        fans = (f,) * (k + 1) if f else ()
        way = replace(job, lookahead=k, backup_lookahead=k, fan_out=fans, fan_out_miss=fans)
        way = replace(way, acceptance=dict.fromkeys(Source, AcceptanceLaw(tuple(rates[:k]), "")))
        jobs[k, f"uniform:{f}" if f else default[1]] = way
    speeds = dict.fromkeys(jobs, 0.0)
    for error in (0.8, 1.0, 1.25):
        device = DeviceCosts.from_points(verify_s, {n: error * s for n, s in draft_s.items()})
        expected = expect(Grid.of([*jobs.values()], device, HostCosts()), quick=True)
        for name, speed in zip(jobs, expected.tok_per_s.tolist(), strict=True):
            speeds[name] += speed * (_MARGIN if name == default else 1)
    return max(speeds, key=speeds.__getitem__)


def _all_reduce_s(session: Session, stepper: Stepper) -> float | None:
    """Returns the seconds that the all-reduces of a forward of b(K+1) rows take: 0 at T = 1, None
    if unknown. Collective over the target ranks. Those in a captured forward cannot be timed alone,
    so on GPUs as many are timed in another program. On CPUs Group.spent_s times them where they
    run."""
    cost = stepper.cost(stepper.bucket(session.job.verify_rows))
    backend = session.backend
    group = session.group
    if cost.tp == 1:
        return 0.0
    if isinstance(backend, EmulatedBackend):
        try:
            once = backend.profile.all_reduce_s(cost.tp, cost.all_reduce_bytes)
        except ConfigError:  # the profile was probed on one rank and has no all-reduces
            return None
        return cost.num_all_reduces * once
    if group.spent_s is not None:
        return None
    array = backend.activation(cost.rows, stepper.shard.shape.hidden)

    def reduce_all() -> None:
        for _ in range(cost.num_all_reduces):
            group.all_reduce(array)

    program = backend.program(reduce_all, cost, capturable=group.capturable)
    seconds = list[float]()
    for _ in range(_REPEATS + 1):
        program.launch()
        program.wait(session.waiter)
        seconds.append(program.elapsed_s())
    program.close()
    return float(np.median(seconds[1:]))


@dataclass(frozen=True)
class WarmUp:
    """The warm-up rounds that count, of the lead rank or of a draft: the ledger [n, 2 + phases].
    num_rows: of the lead, rows of each verification [n]. rounds: of a draft, [n, DraftLog.COLUMNS].
    grow_s: of a draft, the median step that grows branches; None if none grew."""

    ledger: NDArray[np.int64]
    num_rows: NDArray[np.int64] | None = None
    rounds: NDArray[Any] | None = None
    grow_s: float | None = None

    @classmethod
    def of_draft(cls, log: DraftLog, count: int) -> WarmUp:
        """Returns the warm-up of a draft, whose pass began with `count` warm-up rounds."""
        span = count // _SKIPPED, count
        slices = log.ledger.slices(*span)
        steps = np.diff(slices[slices[:, 1] == DraftPhase.GROW, 2:]) * 1e-9
        grow_s = float(np.median(steps)) if len(steps) else None
        return cls(log.ledger.table(*span), None, log.table(*span), grow_s)

    def seconds(self, phase: int) -> Floats:
        """Returns the seconds of a phase in each round, [n]."""
        return np.asarray(self.ledger[:, 2 + phase] * 1e-9, np.float64)

    def column(self, name: str) -> NDArray[Any]:
        """Returns the column of `rounds` that has this name in DraftLog.COLUMNS."""
        assert self.rounds is not None, "a warm-up without a draft"
        values: NDArray[Any] = self.rounds[:, DraftLog.COLUMNS.index(name)]
        return values


def warm_up(loop: TargetLoop, rank: Rank, count: int) -> WarmUp:
    """Runs a new loop's first `count` rounds on throw-away sequences; returns those that count."""
    requests = rank.session.workload.requests(WARM_ID, rank.session.job.config.batch_size)
    loop.admit(requests)
    loop.ledger.restart()
    num_rows = []
    for _ in range(count):
        num_rows.append(loop.step().num_rows)
        loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
    loop.finish([request.request_id for request in requests])
    skipped = count // _SKIPPED
    return WarmUp(loop.ledger.table(skipped, count), np.array(num_rows[skipped:], np.int64))


def host_costs(job: Job, device: DeviceCosts, lead: WarmUp, draft: WarmUp | None) -> HostCosts:
    """Returns a job's host costs from its warm-up; draft: None in AR or if the draft was lost."""
    costs: dict[str, Any] = {
        f"lead_{name}": np.median(lead.seconds(LeadPhase[name.upper()]))
        for name in "send commit broadcast upload sample record".split()
    }
    assert lead.num_rows is not None, "a warm-up without a lead"
    launch = lead.seconds(LeadPhase.LAUNCH)
    wait = lead.seconds(LeadPhase.DEVICE_WAIT)
    beyond = np.median(launch + wait - _forward_s(device.verify, lead.num_rows))
    costs["lead_launch"] = min(np.median(launch), max(0.0, beyond))  # NumPy computes in the launch
    costs["wake"] = beyond - costs["lead_launch"]
    if draft is not None:
        costs |= _draft_costs(job, device, draft)
        if not job.inline:
            costs |= _link_costs(lead, draft)
    return HostCosts(**{name: max(0.0, float(value)) for name, value in costs.items()})


def _forward_s(table: RowTable, rows: Any) -> Floats:
    """Returns the seconds of the smallest timed forwards that have room for these rows."""
    places = np.searchsorted(table.rows, rows)
    last = len(table.rows) - 1
    return np.asarray(np.asarray(table.seconds)[np.minimum(places, last)], np.float64)


def _draft_costs(job: Job, device: DeviceCosts, draft: WarmUp) -> dict[str, Any]:
    """Returns the costs of the draft's host by field of HostCosts."""
    costs: dict[str, Any] = {
        f"draft_{phase.name.lower()}": np.median(draft.seconds(phase))
        for phase in (DraftPhase.COMMIT, DraftPhase.LOOKUP, DraftPhase.SEND, DraftPhase.RECORD)
    }
    answers = draft.seconds(DraftPhase.SPECULATE)
    num_jit = draft.column("num_jit")
    steps_ready = draft.column("steps_ready")
    is_ready = (num_jit == 0) & (steps_ready >= job.lookahead)  # answered without a draft step
    if job.config.backup == Source.FAST.name.lower():
        is_ready |= (num_jit == 0) & (steps_ready == 0)
    assemble = answers[is_ready].min() if is_ready.any() else 0.0
    costs["draft_assemble"] = assemble
    if device.draft is None:
        return costs
    batch = job.config.batch_size
    branches = batch * job.fan_outs.branches
    wide = np.array([len(nodes) for nodes in job.tree.inner[: job.lookahead]])  # rows, by level
    backup = job.num_forwards(job.backup_lookahead)
    missed = answers[num_jit == batch]
    if draft.grow_s is not None:
        grown = costs["step"] = draft.grow_s - _forward_s(device.draft, branches * wide).mean()
    if len(missed) and backup:
        step_s = (np.median(missed) - assemble) / backup
        costs["step"] = step_s - _forward_s(device.draft, batch * wide).mean()
        if draft.grow_s is not None:
            costs["joined"] = costs["step"] - max(0.0, grown)
    if (is_grown := draft.seconds(DraftPhase.GLUE) > 0).any():
        glue = device.lists[-1][1] if device.lists else device.draft
        glue_s = np.median(draft.seconds(DraftPhase.GLUE)[is_grown])
        costs["glue"] = glue_s - _forward_s(glue, job.verify_rows)
        costs["keys"] = np.median(draft.seconds(DraftPhase.KEYS)[is_grown])
    return costs


def _link_costs(lead: WarmUp, draft: WarmUp) -> dict[str, Any]:
    """Returns the seconds of one way of the link, and of reading an OUTCOME that has arrived
    already, as it has after growth that was cut short. As the lead then also waits for the running
    growth step, the link is read from the other rounds or, if there are none, from the fastest."""
    is_cut = np.isnan(draft.column("t_growth_s")[:-1]) & (draft.seconds(DraftPhase.GLUE)[:-1] > 0)
    reads = draft.seconds(DraftPhase.WAIT)[1:][is_cut]
    read = np.median(reads) if len(reads) else 0.0
    phases = (DraftPhase.COMMIT, DraftPhase.LOOKUP, DraftPhase.SPECULATE, DraftPhase.SEND)
    waited = lead.seconds(LeadPhase.DRAFT_WAIT) + lead.seconds(LeadPhase.COMMIT)
    between = waited - sum(draft.seconds(phase) for phase in phases)
    if is_cut.all() and len(is_cut):
        both_ways = between.min()
    else:
        both_ways = np.median(between[1:][~is_cut]) if len(is_cut) else between[0]
    return {"link": (both_ways - read) / 2, "draft_read": read}
