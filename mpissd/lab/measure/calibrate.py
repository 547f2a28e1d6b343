"""Times a job's forwards in series, and reads the host's costs off the ledgers of warm-up rounds.

`calibrate` runs before the rounds: it times forwards bucket by bucket while the other ranks wait,
and measures the rates that bound them. `host_costs` computes HostCosts afterwards. Each cost is the
median of a phase; a phase that waits for a forward counts only its time beyond the forward in
series. Measured rounds are not used, so that a row's prediction does not depend on the numbers that
it is compared with. The part of the lead's wait that the draft's phases do not explain is the
link's time, with naps of both ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
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

from mpissd.common.config import AUTO_TREE, DEFAULT_PAIR, RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.real_pairs import DEFAULT_RATES
from mpissd.common.rounds import Source
from mpissd.common.trace import DraftLog, DraftPhase, LeadPhase
from mpissd.common.wait import Waiter
from mpissd.engine.backend.profile import EmulatedBackend, load_profile
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
from mpissd.lab.plan.plan import profile_of, with_best_tree
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts, RowTable
from mpissd.lab.predict.simulation import Grid, expect

WARM_ID = 1 << 30  # first request id of the warm-up's sequences
_SKIPPED = 6  # one of so many warm-up rounds, the first ones, does not count
_REPEATS = 5
_MOST_REPEATS, _BUDGET_S = 50, 0.1  # repeats of a transformer's forward on a CPU, and their time
_BUILDING_S = 3600.0
_MOST_K = 10  # the largest K that is tried where acceptance is imposed
_CHOSEN = "lookahead", "fan_out", "backup_lookahead"
_VERIFIED, _DRAFTED = (1, 4, 8), (1, 8, 16)  # rows of the forwards that decide, .2 s in all
_MARGIN = 1.05  # the default K and fan-out stay unless others are so much faster
Seconds = Mapping[int, float]  # seconds of a forward, by its rows
Value = TypeVar("Value")


@dataclass(frozen=True)
class JobProfile:
    """The measurements of this job that the predictor needs, and the rates of its floor."""

    device: DeviceCosts
    read_bytes_per_s: float | None  # read rate of the lead's device
    peak_flops_per_s: float | None
    all_reduce_s: float | None  # seconds of all collectives of one verification
    calibrated_at: str  # when the oldest of these values was measured (ISO 8601, UTC)
    host: HostCosts = field(default_factory=HostCosts)


def calibrate(rank: Rank, *, is_brief: bool = False) -> JobProfile | None:
    """Measures the job's profile without host costs; returns it on the lead, None elsewhere.

    is_brief: forwards are timed once, and the rates of the floor stay unknown. Collective: every
    rank calls it. Earlier measurements of the same process are reused.
    """
    session, topology = rank.session, rank.session.topology
    backend, job, used = session.backend, session.job, list[datetime]()

    def once(owner: Any, key: Hashable, measure: Callable[[], Value]) -> Value:
        """Returns the value of `measure` for (owner, key), which may have been measured before."""
        known = session.calibrations.setdefault(owner, {})
        if key not in known:
            known[key] = measure(), datetime.now(timezone.utc)
        used.append(known[key][1])
        value: Value = known[key][0]
        return value

    def forward_times(stepper: Stepper) -> tuple[Seconds, Mapping[int, Seconds]]:
        """Times every bucket of a model; collective over that model's ranks.

        Returns {rows: seconds}, and {candidates: the same} of scoring forwards (glues), which read
        out several candidates of each row; empty without such forwards.
        """

        def timed(rows: int, *, lists: bool) -> float:
            measure = partial(_time, stepper, rows, session, lists=lists, is_brief=is_brief)
            return once(stepper.stack, (rows, lists), measure)

        seconds = {rows: timed(rows, lists=False) for rows in stepper.buckets}
        candidates, live = stepper.options.top_k, range(1, job.config.batch_size + 1)
        if candidates == 1:
            return seconds, {}
        glues = sorted({stepper.bucket(n * (job.lookahead + 1)) for n in live})
        return seconds, {candidates: {rows: timed(rows, lists=True) for rows in glues}}

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
    device, since = DeviceCosts.from_points(seconds, *(draft or ())), min(used)
    return JobProfile(device, read, peak, reduces, since.isoformat(timespec="milliseconds"))


def _stepper(worker: Any) -> Stepper:
    stepper = worker.stepper
    if isinstance(stepper, GroupForwards):
        stepper = stepper.shared.stepper
    assert isinstance(stepper, Stepper), "calibration times real forwards"
    return stepper


def forwards(
    stepper: Stepper, rows: int, sequences: int, waiter: Waiter, *, lists: bool = False
) -> Iterator[float]:
    """Runs a forward of `rows` rows for each value that is asked for: its device seconds.

    The rows are uploaded each time, because forwards of other row counts may run in between.
    """
    tokens = np.arange(rows, dtype=np.int32) % stepper.shard.shape.vocab_size
    places = _timed_places(rows, sequences, stepper.options)
    while True:
        stepper.upload(rows, tokens, places, lists=lists)
        stepper.launch()
        stepper.wait(waiter)
        yield stepper.elapsed_s()


def _timed_places(rows: int, sequences: int, options: ForwardOptions) -> Places | None:
    """Returns places of `rows` rows after the mean context, for timing; None without a cache.

    Rows are grouped by sequence as in a verification, so that neighbours read the same keys and
    values. Their results are not used.
    """
    if not options.capacity:
        return None
    number = np.arange(rows)
    slots = number * min(sequences, rows) // rows
    later = number - np.searchsorted(slots, slots)
    return trunk_places(slots, np.minimum(options.context + later, options.capacity - 1))


def _time(stepper: Stepper, rows: int, session: Session, *, lists: bool, is_brief: bool) -> float:
    """Returns the median device seconds of repeated forwards of `rows` rows.

    They are repeated more often where other work may slow a host's cores; is_brief: one counts.
    """
    batch, start = session.job.config.batch_size, perf_counter()
    timed = forwards(stepper, rows, batch, session.waiter, lists=lists)
    next(timed)
    repeats, first_s = _REPEATS, perf_counter() - start
    if is_brief:
        repeats = 1
    elif session.backend.info.kind == "cpu" and stepper.options.capacity:
        if stepper.stack.group.size > 1:  # the same number on every rank of the forward
            first_s = session.topology.group.bcast(first_s)
        repeats = int(min(max(_BUDGET_S / first_s, _REPEATS), _MOST_REPEATS))
    times = [next(timed) for _ in range(repeats)]
    stepper.release(range(batch))
    return float(np.median(times))


def with_tree(machine: Machine, config: RunConfig, given: Container[str]) -> RunConfig:
    """Returns a configuration of --tree=auto with the tree for this machine; any other unchanged.

    given: names of the flags that were given, as to K. On CPUs trees are slower than chains. What
    it was chosen from is kept for `chosen`. Raises ConfigError as `with_best_tree` does.
    """
    if config.tree != AUTO_TREE:
        return config
    info, levels = machine.infos[0], config.lookahead if "lookahead" in given else None
    if info.kind == "cpu":
        config, known = replace(config, tree=None), {"tree": None, "device": "cpu"}
    else:
        is_emulated = info.kind == "emulated"
        profile = load_profile(config.device) if is_emulated else profile_of(info.name)
        config, known = with_best_tree(config, profile, machine.topology.tp, levels)
    values = machine.calibrations.setdefault(machine.backend, {})
    values["tree", config.digest] = known, datetime.now(timezone.utc)
    return config


def chosen(session: Session) -> dict[str, Any] | None:
    """Returns what --tree=auto, or the shipped pair's K and fan-out, was chosen from, if it was."""
    known = session.calibrations.get(session.backend, {})
    config = session.job.config
    by_k = known.get(("chosen", config.mode, config.drafts), (None, None))
    value, _ = known.get(("tree", config.digest), by_k)
    return value


def choose(machine: Machine, config: RunConfig, given: AbstractSet[str]) -> RunConfig:
    """Returns the configuration with the fastest K and fan-out here, if `given` names neither.

    Only for one sequence of the shipped pair on CPUs: no other pair's acceptance is known. The
    seconds are kept as a calibration of the backend. Collective.
    """
    if config.tree == AUTO_TREE:
        with agreed(machine.topology.world):
            config = with_tree(machine, config, given)
    if not (_is_chosen_here(machine, config) and given.isdisjoint(_CHOSEN)):
        return config
    with agreed(machine.topology.world):
        job = machine.resolve(config)
    return _timed_best(machine, config, job, DEFAULT_RATES)


def best_k(machine: Machine, config: RunConfig, rates: Sequence[float] | None = None) -> RunConfig:
    """Returns the configuration of SD with its fastest K on a part of the machine. Collective.

    The shipped pair's is chosen as a run chooses it. rates: acceptance rates by position that a run
    measured; without them K stays, unless they are imposed. Raises Refused.
    """
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
    most = _MOST_K if config.is_text else job.lookahead
    return _timed_best(machine, config, job, rates[:most])


def _is_chosen_here(machine: Machine, config: RunConfig) -> bool:
    """Whether a run of this configuration chooses K: one sequence of the shipped pair on CPUs."""
    is_shipped = config.is_text and (config.pair or "").lower() == DEFAULT_PAIR
    is_one = config.batch_size == config.groups == 1 and not (config.tree or config.learners)
    is_drafted = config.mode != "ar" and config.backup == "jit" and machine.backend.name == "numpy"
    return is_shipped and is_one and is_drafted


def _timed_best(machine: Machine, config: RunConfig, job: Job, rates: Sequence[float]) -> RunConfig:
    """Returns the configuration with its fastest K and fan-out, by forwards that are timed here.

    job: of the configuration, with the rows that are timed. Ranks that have no part in it wait.
    """
    machine.models.expect([job])
    best, session = None, machine.session(job)
    if session is not None:
        verify_s, draft_s = _deciding_forwards(session)
        known = machine.calibrations.setdefault(machine.backend, {})
        values = {"verify_s": verify_s, "draft_s": draft_s}
        known["chosen", config.mode, config.drafts] = values, datetime.now(timezone.utc)
        if session.topology.is_lead:
            best = fastest(replace(job, lookahead=config.lookahead), verify_s, draft_s, rates)
    best = machine.topology.world.bcast(best)
    return replace(config, **dict(zip(_CHOSEN, best, strict=False)))


def _deciding_forwards(session: Session) -> tuple[Seconds, Seconds]:
    """Returns the median seconds of the target's and the draft's forwards by rows; collective.

    On CPUs they are CPU seconds: the turns of other processes do not count. SSD's ranks are timed
    at once, as they share the memory's rate; a forward that began before the other rank's did not.
    """
    topology, config = session.topology, session.job.config
    is_ahead, batch = config.mode == "ssd", config.batch_size
    clock = thread_time if session.backend.name == "numpy" else perf_counter
    target, draft = session.models.open(session.job, topology)

    def timed(stepper: Stepper | None, sizes: Sequence[int], turns: int) -> Seconds:
        if stepper is None:
            return {}
        sizes = [batch * n for n in sizes if batch * n <= stepper.buckets[-1]]
        each_size = [forwards(stepper, n, batch, session.waiter) for n in sizes]
        seconds = list[float]()
        for each in each_size * turns:
            start = clock()
            next(each)
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
    """Returns K and the fan-out with the highest expected rate under acceptance rates by position.

    The job's own stay unless others are 5% faster. Rates are means over errors of the draft's
    seconds, since a draft step that just fits into a forward promises too much.
    """
    own, jobs = (job.lookahead, job.config.fan_out), dict[tuple[int, str], Job]()
    for k, f in product(range(1, 1 + len(rates)), (1, 2, 3) if job.fan_out else (0,)):
        fans, law = (f,) * (k + 1) if f else (), AcceptanceLaw(tuple(rates[:k]), "")
        way = replace(job, lookahead=k, backup_lookahead=k, fan_out=fans, fan_out_miss=fans)
        way = replace(way, acceptance=dict.fromkeys(Source, law))
        jobs[k, f"uniform:{f}" if f else own[1]] = way
    speeds = dict.fromkeys(jobs, 0.0)
    for error in (0.8, 1.0, 1.25):
        device = DeviceCosts.from_points(verify_s, {n: error * s for n, s in draft_s.items()})
        expected = expect(Grid.of([*jobs.values()], device, HostCosts()), quick=True)
        for name, speed in zip(jobs, expected.tok_per_s.tolist(), strict=True):
            speeds[name] += speed * (_MARGIN if name == own else 1)
    return max(speeds, key=speeds.__getitem__)


def _all_reduce_s(session: Session, stepper: Stepper) -> float | None:
    """Returns the seconds that the all-reduces of a forward of b(K+1) rows take.

    The result is 0 at T = 1 and None if the time is unknown. An all-reduce inside a captured
    forward cannot be timed on its own, so on GPUs the same number of them is timed as a separate
    chain, captured where the forward is captured. On CPUs they are timed where they run
    (Group.spent_s). Collective over the target ranks.
    """
    cost, backend = stepper.cost(stepper.bucket(session.job.verify_rows)), session.backend
    group, seconds = session.group, list[float]()
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
    for _ in range(_REPEATS + 1):
        program.launch()
        program.wait(session.waiter)
        seconds.append(program.elapsed_s())
    program.close()
    return float(np.median(seconds[1:]))


@dataclass(frozen=True)
class WarmUp:
    """The warm-up rounds that count, on the lead or on the draft: its ledger [n, 2 + phases].

    num_rows: on the lead, the rows of each verification [n]. rounds: on the draft, its rows
    [n, DraftLog.COLUMNS]. grow_s: its median growth step; None if no branch grew.
    """

    ledger: NDArray[np.int64]
    num_rows: NDArray[np.int64] | None = None
    rounds: NDArray[Any] | None = None
    grow_s: float | None = None

    @classmethod
    def of_draft(cls, log: DraftLog, count: int) -> WarmUp:
        """Returns a draft's warm-up, the first `count` rounds of the pass."""
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
    batch, lanes = job.config.batch_size, job.config.batch_size * job.fan_outs.branches
    wide = np.array([len(nodes) for nodes in job.tree.inner[: job.lookahead]])  # rows, by level
    backup, missed = job.num_forwards(job.backup_lookahead), answers[num_jit == batch]
    if draft.grow_s is not None:
        grown = costs["step"] = draft.grow_s - _forward_s(device.draft, lanes * wide).mean()
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
