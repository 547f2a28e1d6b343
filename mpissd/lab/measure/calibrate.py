"""Times a job's forwards one by one, and computes the durations of host work from warm-up rounds.

Before the rounds, `calibrate` times the target's and the draft's forward at each row count while
other ranks wait, and measures memory bandwidth and flop/s. After the warm-up rounds, `host_costs`
computes the durations of host work: each is the median of a timed phase, minus the time of a
forward if the phase waits for one. The part of rank 0's wait for draft tokens that the draft's
phases do not explain is the time of messages. Measured rounds are not used, so that a row's
prediction does not depend on the durations with which it is compared.
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
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.round.sequence import trunk_places
from mpissd.engine.round.target import TargetLoop
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Machine, Session
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts, RowTable
from mpissd.lab.predict.simulation import Grid, expect

WARM_ID = 1 << 30  # id of the first warm-up request, larger than the ids of all other requests
_SKIPPED = 6  # One sixth of the warm-up rounds, the first ones, are not evaluated.
_REPEATS = 5
_MOST_REPEATS = 50  # A transformer's forward is timed at most this often on a CPU.
_BUDGET_S = 0.1  # time in s that may be spent on timing one forward on a CPU
_BUILDING_S = 3600.0
_MOST_K = 10  # largest K (number of tokens drafted a round) that may be chosen
_CHOSEN = "lookahead", "fan_out", "backup_lookahead"
_VERIFIED = (1, 4, 8)  # To choose K, target forwards with these numbers of rows are timed.
_DRAFTED = (1, 8, 16)  # To choose K, draft forwards with these numbers of rows are timed.
_MARGIN = 1.05  # The default K and fan-out are kept unless other values are faster by this factor.
Seconds = Mapping[int, float]  # {number of rows: seconds of a forward}
Value = TypeVar("Value")


@dataclass(frozen=True)
class JobProfile:
    """The measured durations of a job's forwards and host work, from which its rounds are
    predicted; and the device's rates, which give the shortest possible time of a forward."""

    device: DeviceCosts
    read_bytes_per_s: float | None  # memory bandwidth of rank 0's device
    peak_flops_per_s: float | None
    all_reduce_s: float | None  # seconds of all all-reduces in one verification
    calibrated_at: str  # when the oldest of these values was measured (ISO 8601, UTC)
    host: HostCosts = field(default_factory=HostCosts)


def calibrate(rank: Rank, *, is_brief: bool = False) -> JobProfile | None:
    """Times the job's forwards; returns the durations, without host work, on rank 0, None
    elsewhere. All ranks must call this. Measurements of earlier jobs in this process are reused.
    is_brief: whether each forward is timed only once, and bandwidth and flop/s are not measured."""
    session = rank.session
    topology = session.topology
    backend = session.backend
    job = session.job
    used = list[datetime]()

    def once(owner: Any, key: Hashable, measure: Callable[[], Value]) -> Value:
        """Returns the value of measure(), which is called only once for each (owner, key), because
        it takes long; later calls return the stored value."""
        values = session.calibrations.setdefault(owner, {})
        if key not in values:
            values[key] = measure(), datetime.now(timezone.utc)
        value: Value = values[key][0]
        used.append(values[key][1])
        return value

    def forward_times(stepper: Stepper) -> tuple[Seconds, Mapping[int, Seconds]]:
        """Returns {rows: seconds} of a model's forwards, and {k: {rows: seconds}} of forwards that
        also select the top k tokens of each row. All ranks of the model must call this."""

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

    session.barrier(Waiter(_BUILDING_S, spin=False))  # wait for ranks that make weights
    stepper = None  # remains None on ranks that time no target forward
    seconds: Seconds = {}
    reduces = read = peak = None
    if topology.group_index == 0 and rank.target is not None:
        stepper = _stepper(rank.target)
        seconds, _ = forward_times(stepper)
        rows = stepper.bucket(job.verify_rows)
        reduces = once(stepper.stack, ("sums", rows), partial(_all_reduce_s, session, stepper))
    session.barrier()
    draft = forward_times(_stepper(rank.draft)) if rank.draft else None
    rank.end_drafting()
    session.barrier()
    if stepper is not None and topology.is_lead and not is_brief:
        weights, _ = job.rank_bytes(backend.itemsize)
        read = once(backend, ("read", weights), partial(backend.read_bandwidth, weights))
        peak = once(stepper.stack, tuple(stepper.buckets), backend.peak_flops)
        if peak is not None and backend.info.kind != "emulated":
            # On a busy CPU, a forward may reach more flop/s than was measured as the peak.
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
    """Yields the device's seconds of a forward of `rows` rows; a forward runs for each value that
    is requested. Its inputs are uploaded each time, because other forwards may run in between.
    sequences: batch size. lists: whether it also selects the top k tokens of each row."""
    tokens = np.arange(rows, dtype=np.int32) % stepper.shard.shape.vocab_size
    places = None
    options = stepper.options
    if options.capacity:  # The rows come after the configured context.
        # Consecutive rows belong to one sequence, as in a verification: they read the same K and V.
        number = np.arange(rows)
        slots = number * min(sequences, rows) // rows
        later = number - np.searchsorted(slots, slots)
        places = trunk_places(slots, np.minimum(options.context + later, options.capacity - 1))
    while True:
        stepper.upload(rows, tokens, places, lists=lists)
        stepper.launch()
        stepper.wait(waiter)
        yield stepper.elapsed_s()


def _time(stepper: Stepper, rows: int, session: Session, *, lists: bool, is_brief: bool) -> float:
    """Returns the median of the device's seconds of a forward of `rows` rows, run several times. A
    CPU runs it more often, because other processes may slow it. lists: whether the forward also
    selects the top k tokens of each row. is_brief: whether only one forward is timed."""
    batch = session.job.config.batch_size
    start = perf_counter()
    timed = forwards(stepper, rows, batch, session.waiter, lists=lists)
    next(timed)
    repeats = _REPEATS
    first_s = perf_counter() - start
    if is_brief:
        repeats = 1
    elif session.backend.info.kind == "cpu" and stepper.options.capacity:
        # All ranks must run the same number of forwards.
        if stepper.stack.group.size > 1 and stepper.tell is None:
            first_s = session.topology.group.bcast(first_s)
        repeats = int(min(max(_BUDGET_S / first_s, _REPEATS), _MOST_REPEATS))
    times = [next(timed) for _ in range(repeats)]
    stepper.release(range(batch))
    return float(np.median(times))


def chosen(session: Session) -> dict[str, Any] | None:
    """Returns the timed seconds of forwards from which this run's K and fan-out were chosen; None
    if they were not chosen by timing."""
    values = session.calibrations.get(session.backend, {})
    config = session.job.config
    value, _ = values.get(("chosen", config.mode, config.drafts), (None, None))
    return value


def choose(machine: Machine, config: RunConfig, given: AbstractSet[str]) -> RunConfig:
    """Returns the configuration with the K and fan-out that are fastest on this machine. It is
    returned unchanged if the user set one of them, or if acceptance rates are unknown. All ranks
    must call this. given: names of the flags that the user gave."""
    if not (_is_chosen_here(machine, config) and given.isdisjoint(_CHOSEN)):
        return config
    with agreed(machine.topology.world):
        job = machine.resolve(config)
    return _timed_best(machine, config, job, DEFAULT_RATES)


def best_k(machine: Machine, config: RunConfig, rates: Sequence[float] | None = None) -> RunConfig:
    """Returns an SD configuration with the K that is fastest on these ranks. All ranks must call
    this. rates: measured acceptance rate of each draft position; if None, K is chosen only if
    acceptance is drawn from a model. Raises Refused on all ranks if the job is impossible."""
    job: Job | None = None
    with agreed(machine.topology.world):
        for k in range(_MOST_K, config.lookahead, -1) if not config.is_text else ():
            with suppress(ConfigError):  # raised if k exceeds the number of known acceptance rates
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
    if config.parallel_drafting:
        count = min(count, 1 + job.most_masks)
    return _timed_best(machine, config, job, rates[:count])


def _is_chosen_here(machine: Machine, config: RunConfig) -> bool:
    """Returns whether K may be chosen by timing: on CPUs, for one sequence of text with the default
    model pair, whose acceptance rates are known."""
    is_shipped = config.is_text and (config.pair or "").lower() == DEFAULT_PAIR
    is_one = config.batch_size == config.groups == 1 and not (config.tree or config.learners)
    is_drafted = config.mode != "ar" and config.backup == "jit"
    return is_shipped and is_one and is_drafted and machine.target_backend == "numpy"


def _timed_best(machine: Machine, config: RunConfig, job: Job, rates: Sequence[float]) -> RunConfig:
    """Times forwards, and returns the configuration with the K and fan-out that these times make
    fastest. All ranks must call this. job: the configuration as a Job with the largest K to try.
    rates: acceptance rate of each draft position."""
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
    """Returns {rows: median seconds} of target forwards, and the same of draft forwards, for the
    choice of K. All ranks must call this. On CPUs, CPU time is measured, which excludes other
    processes. In SSD both are timed at the same time, because they share the memory bandwidth."""
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
        timed(stepper, (1,), 1)  # The first forward loads the compiled kernels.
    session.barrier()
    verify_s = timed(target, _VERIFIED, 3)
    if not is_ahead:
        session.barrier()
    # In SSD both models are timed at once; 9 turns make the draft's timing last as long.
    draft_s = timed(draft, _DRAFTED, 9 if is_ahead else 3)
    root = topology.first_draft if config.drafts else 0
    return verify_s, topology.world.bcast(draft_s, root=root)


def fastest(
    job: Job, verify_s: Seconds, draft_s: Seconds, rates: Sequence[float] = DEFAULT_RATES
) -> tuple[int, str]:
    """Returns the (K, fan-out) with the most simulated tokens/s; the job's own values unless others
    are 5% faster. verify_s, draft_s: {rows: seconds} of target and draft forwards. rates:
    acceptance rate of each position. The tokens/s are a mean of simulations with draft steps 20%
    shorter, unchanged and 25% longer, lest steps that barely fit into a forward look too good."""
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
    """Returns the seconds of all all-reduces in one verification of b(K+1) rows (b sequences, K
    drafted tokens): 0 with one target rank, None if unknown. All target ranks must call this.
    Inside a CUDA graph they cannot be timed; so on GPUs the same number is timed in a graph of
    their own. On CPUs the result is None, because Group.spent_s times them during the rounds."""
    cost = stepper.cost(stepper.bucket(session.job.verify_rows))
    backend = session.backend
    group = session.group
    if cost.tp == 1:
        return 0.0
    if isinstance(backend, EmulatedBackend):
        try:
            once = backend.profile.all_reduce_s(cost.tp, cost.all_reduce_bytes)
        except ConfigError:  # A profile made on one rank has no all-reduces.
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
    """The timed phases of n warm-up rounds, on rank 0 or on a draft rank. ledger: see Ledger.table.
    On rank 0: num_rows [n], rows of each verification; accepted [n], tokens accepted in the round
    before. On a draft: rounds, a table with the columns DraftLog.COLUMNS; grow_s, the median
    seconds of a step that grows branches (None: no branch grew)."""

    ledger: NDArray[np.int64]
    num_rows: NDArray[np.int64] | None = None
    rounds: NDArray[Any] | None = None
    grow_s: float | None = None
    accepted: NDArray[np.int64] | None = None

    @classmethod
    def of_draft(cls, log: DraftLog, count: int) -> WarmUp:
        """Returns the warm-up rounds of a draft rank, without the first sixth. log: the rank's log,
        which begins with `count` warm-up rounds."""
        span = count // _SKIPPED, count
        slices = log.ledger.slices(*span)
        steps = np.diff(slices[slices[:, 1] == DraftPhase.GROW, 2:]) * 1e-9
        grow_s = float(np.median(steps)) if len(steps) else None
        return cls(log.ledger.table(*span), None, log.table(*span), grow_s)

    def seconds(self, phase: int) -> Floats:
        """Returns the seconds that the phase with index `phase` took in each round, [n]."""
        return np.asarray(self.ledger[:, 2 + phase] * 1e-9, np.float64)

    def column(self, name: str) -> NDArray[Any]:
        """Returns the column of `rounds` that has this name in DraftLog.COLUMNS."""
        assert self.rounds is not None, "a warm-up without a draft"
        return self.rounds[:, DraftLog.COLUMNS.index(name)]


def warm_up(loop: TargetLoop, rank: Rank, count: int) -> WarmUp:
    """Runs `count` warm-up rounds on sequences that are thrown away, before `loop` decodes others;
    returns the timed phases of these rounds, without the first sixth."""
    requests = rank.session.workload.requests(WARM_ID, rank.session.job.config.batch_size)
    loop.admit(requests)
    loop.ledger.restart()
    num_rows = []
    accepted = [0]
    for _ in range(count):
        result = loop.step()
        num_rows.append(result.num_rows)
        accepted.append(int(result.outcome.num_accepted.sum()))
        loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
    loop.finish([request.request_id for request in requests])
    skipped = count // _SKIPPED
    table = loop.ledger.table(skipped, count)
    columns = np.array([num_rows, accepted[:-1]], np.int64)[:, skipped:]
    return WarmUp(table, columns[0], accepted=columns[1])


def host_costs(job: Job, device: DeviceCosts, lead: WarmUp, draft: WarmUp | None) -> HostCosts:
    """Returns a job's durations of host work, computed from the timed phases of its warm-up rounds.
    lead: the phases on rank 0. draft: those on the draft rank (None: there is no draft, or its rank
    was lost). device: durations of forwards."""
    costs: dict[str, Any] = {
        f"lead_{name}": np.median(lead.seconds(LeadPhase[name.upper()]))
        for name in "send commit broadcast upload sample record".split()
    }
    assert lead.num_rows is not None, "a warm-up without a lead"
    launch = lead.seconds(LeadPhase.LAUNCH)
    wait = lead.seconds(LeadPhase.DEVICE_WAIT)
    beyond = np.median(launch + wait - _forward_s(device.verify, lead.num_rows))
    # With NumPy, launching computes the forward; only what takes longer than that is host work.
    costs["lead_launch"] = min(np.median(launch), max(0.0, beyond))
    costs["wake"] = beyond - costs["lead_launch"]
    if draft is not None:
        costs |= _draft_costs(job, device, draft, lead)
        if not job.inline:
            costs |= _link_costs(lead, draft)
    return HostCosts(**{name: max(0.0, float(value)) for name, value in costs.items()})


def _forward_s(table: RowTable, rows: Any) -> Floats:
    """Returns the seconds of forwards with `rows` rows. A forward is padded to the next row count
    in `table`, so the time at that count is returned."""
    places = np.searchsorted(table.rows, rows)
    last = len(table.rows) - 1
    return np.asarray(np.asarray(table.seconds)[np.minimum(places, last)], np.float64)


def _draft_costs(job: Job, device: DeviceCosts, draft: WarmUp, lead: WarmUp) -> dict[str, Any]:
    """Returns the durations of the draft's host work as {field of HostCosts: seconds}. draft, lead:
    timed phases of the warm-up rounds on the draft and on rank 0. device: durations of forwards."""
    costs: dict[str, Any] = {
        f"draft_{phase.name.lower()}": np.median(draft.seconds(phase))
        for phase in (DraftPhase.COMMIT, DraftPhase.LOOKUP, DraftPhase.SEND, DraftPhase.RECORD)
    }
    answers = draft.seconds(DraftPhase.SPECULATE)
    num_jit = draft.column("num_jit")
    steps_ready = draft.column("steps_ready")
    is_ready = (num_jit == 0) & (steps_ready >= job.lookahead)  # rounds without a new step
    if job.config.backup == Source.FAST.name.lower():
        is_ready |= (num_jit == 0) & (steps_ready == 0)
    assemble = answers[is_ready].min() if is_ready.any() else 0.0
    costs["draft_assemble"] = assemble
    if device.draft is None:
        return costs
    batch = job.config.batch_size
    branches = batch * job.fan_outs.branches
    # For each draft step, the number of rows that one branch has.
    wide = np.array([len(nodes) for nodes in job.shape.inner[: job.lookahead]])
    wide = np.array([job.step_rows]) if job.masks else wide
    backup = job.num_forwards(job.backup_lookahead)
    stored = np.zeros(len(answers), np.int64)
    if job.catches_up and lead.accepted is not None:
        stored = lead.accepted
    steps_s = _forward_s(device.draft, batch * wide + stored[:, None]).mean(axis=1)
    missed = (answers - assemble - backup * steps_s)[num_jit == batch]
    if draft.grow_s is not None:
        grown = costs["step"] = draft.grow_s - _forward_s(device.draft, branches * wide).mean()
    if len(missed) and backup:
        costs["step"] = np.median(missed) / backup
        if draft.grow_s is not None:
            costs["joined"] = costs["step"] - max(0.0, grown)
    if (is_grown := draft.seconds(DraftPhase.GLUE) > 0).any():
        glue = device.lists[-1][1] if device.lists else device.draft
        glue_s = np.median(draft.seconds(DraftPhase.GLUE)[is_grown])
        costs["glue"] = glue_s - _forward_s(glue, job.verify_rows)
        costs["keys"] = np.median(draft.seconds(DraftPhase.KEYS)[is_grown])
    return costs


def _link_costs(lead: WarmUp, draft: WarmUp) -> dict[str, Any]:
    """Returns two durations as {field of HostCosts: seconds}: `link`, of a message between rank 0
    and the draft; `draft_read`, of reading a message that arrived earlier, while the draft was
    growing branches. In such rounds rank 0 also waits for the draft step that is running; so `link`
    comes from the other rounds or, if there are none, from the fastest round."""
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
