"""The command `run`: measures one configuration and prints its result row.

All ranks decode warm-up rounds and then the measured rounds together. Rank 0 decides when the
rounds end, gathers all ranks' reports, builds the result row, writes the files, and prints.
"""

from collections.abc import Set as AbstractSet
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np

from mpissd.common import guard
from mpissd.common.config import RunConfig
from mpissd.common.errors import FaultError, GateError
from mpissd.common.output import json_line
from mpissd.common.records import RoundRecords
from mpissd.common.row import Row
from mpissd.common.stage import Stage
from mpissd.common.trace import LeadPhase, Ledger
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.comm.mpi_learner import LearnerComms
from mpissd.engine.comm.topology import Refused, agree
from mpissd.engine.features.learning import PIECE_BYTES, ExampleSender
from mpissd.engine.oracle.logits import LogitsTarget
from mpissd.engine.round.target import TargetLoop
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Session, opened_machine, rest, session_of, tell_doubt
from mpissd.lab.gates import violations
from mpissd.lab.measure.beside import compared
from mpissd.lab.measure.calibrate import calibrate, choose, host_costs, warm_up
from mpissd.lab.measure.card import print_card, print_summary, progress_bar, status_line
from mpissd.lab.measure.load import counters, disturbances
from mpissd.lab.measure.row import (
    LeadReport,
    Measured,
    draft_report,
    joined_leads,
    make_row,
    round_arrays,
    write_row,
)
from mpissd.lab.measure.tracing import compare_clocks, write_trace
from mpissd.lab.measure.verdict import UseComparison
from mpissd.lab.show import open_terminal, shown

_INSTANT_S = 5e-6
_ATTEMPTS = 100  # most attempts to read two timers without a preemption in between


class UnwrittenError(FaultError):
    """Raised if the result row could not be written to the output folder."""


def execute(config: RunConfig, given: AbstractSet[str] = frozenset(["lookahead"])) -> int:
    """Runs the command `run` on all ranks; returns the exit code. If the flags ask for training
    while decoding, the last ranks train the draft model. given: names of the flags that the user
    gave; if K and fan-out are not among them, they may be chosen by timing."""
    sharpen_sleep()
    comms = LearnerComms(PIECE_BYTES) if config.learners else None
    with nullcontext() if comms is None else closing(comms):
        if comms is not None and comms.is_learner:
            from mpissd.online.process import learn

            return learn(config, comms)
        world = None if comms is None else comms.world
        comparison = None
        with opened_machine(config, config.drafts, world) as machine, open_terminal() as terminal:
            topology = machine.topology
            is_watched = terminal is not None
            is_shown = is_watched and config.show
            session = session_of(machine, choose(machine, config, given))
            machine.resources.callback(session.resources.close)
            session.learning = comms
            if topology.is_lead:
                print_card(session)
            before = counters()
            row = measure(session)
            # A lost draft rank could not take part in this collective call.
            busy = disturbances(before, session) if config.on_draft_loss == "abort" else {}
            if row is not None and not is_shown:
                print_summary(row, config.out, busy)
            if _is_compared(session, row, is_shown=is_shown):
                session.resources.close()
                with status_line(config, terminal) as say:
                    brief = partial(measure, is_brief=True)
                    comparison = compared(machine, session.job.config, row, brief, say)
            guard.stage(Stage.TEARDOWN)
    if row is not None:
        line = row.to_dict()
        if isinstance(comparison, UseComparison):
            print("\n".join([*comparison.lines(), ""]), flush=True)
            line["beside"] = comparison.to_dict()
        elif comparison is not None:
            print(f"no comparison: {comparison}\n", flush=True)
        where = f"row {row.run_id}: the last line of {config.out}/runs.jsonl"
        print(where if is_watched and not config.json else json_line(line), flush=True)
    return 0


def _is_compared(session: Session, row: Row | None, *, is_shown: bool) -> bool:
    """Returns whether the alternatives (AR, SD) are measured after the run, to tell whether
    speculation pays. All ranks must call this and get the same result. row: the run's result row,
    on rank 0. is_shown: whether a terminal showed the answer, known on rank 0."""
    config = session.job.config
    is_able = config.groups == 1 and not config.learners and config.on_draft_loss == "abort"
    if config.beside != "auto" or not (is_able and config.is_text):
        return config.beside in ("all", "ar")
    is_one = is_shown and row is not None and row.num_prompts == 1
    return bool(session.topology.world.bcast(is_one))


def measure(
    session: Session, sweep: dict[str, Any] | None = None, *, is_brief: bool = False
) -> Row | None:
    """Measures one configuration and writes its result row; returns the row on rank 0, None
    elsewhere. All ranks must call this. sweep: name of the sweep and task for the row's
    provenance.sweep. is_brief: whether each forward is timed only once before the rounds. Raises
    Refused on every rank if memory is too small or if the row contradicts itself."""
    if session.topology.is_lead:
        tell_doubt(session.job)
    rank = Rank(session)
    guard.stage(Stage.WARM_UP)
    try:
        row = _passes(rank, sweep, is_brief=is_brief)
    except Refused:  # All ranks raise this. After other errors, closing would wait for lost ranks.
        rank.close()
        raise
    rank.close()
    return row


def _passes(rank: Rank, sweep: dict[str, Any] | None, *, is_brief: bool) -> Row | None:
    """Times the forwards, decodes warm-up and measured rounds, and writes the result row, as
    `measure` does. Raises GateError on every rank if the row contradicts itself, and UnwrittenError
    if it cannot be written."""
    session = rank.session
    topology = session.topology
    config = session.job.config
    profile = calibrate(rank, is_brief=is_brief)
    drafters = rank.make_drafters()
    rank.prepare()
    clocks = None
    if config.trace is not None:
        session.barrier()  # All ranks must answer without delay.
        clocks = compare_clocks(topology.world, session.waiter)
    if not topology.is_lead:  # Rank 0 reports this stage after warm-up.
        guard.stage(Stage.ROUNDS)
    drive = partial(_measure, rank=rank, is_alone=sweep is None)
    lead = rank.run_pass(rank.target, drafters, drive)
    if topology.groups > 1:
        rest(topology)  # wait for target groups that still decode
    guard.stage(Stage.GATHER)
    world = session.survivors(draft_lost=lead is not None and lead.draft_lost_round is not None)
    digests: list[int | None] = [rank.digest]
    if topology.is_draft:
        digests = [drafter.batch.digest for drafter in drafters]
    digests = list(chain(*world.gather(digests) or ()))
    rounds = world.allgather((lead.first_round, lead.last_round) if lead else None)
    spans = [span for span in rounds if span is not None]
    drafts = world.gather(draft_report(drafters, spans, rank.updates))
    leads = [lead] if topology.groups == 1 else world.gather(lead)
    row = error = None
    if profile is not None:
        draft = next((report for report in drafts or () if report is not None), None)
        groups = [report for report in leads or () if report is not None]
        several = len(groups) > 1
        digests += [None] * (session.job.world_size - config.learners - len(digests))
        try:
            # Host work is timed in the round's phases only if the host launched each forward.
            if not several and rank.device_rounds is None:
                warm = None if draft is None else draft.warm_up
                costs = host_costs(session.job, profile.device, groups[0].warm_up, warm)
                profile = replace(profile, host=costs)
            joined = joined_leads(groups) if several else groups[0]
            measured = Measured(joined, draft, profile, digests, groups if several else ())
            row = _conclude(session, measured, sweep)
        except (GateError, UnwrittenError) as loss:
            error = loss
    agree(world, error)
    if config.trace is not None:
        took = None if lead is None else np.array(lead.records.t_target_s)
        log = drafters[0].log if drafters else None
        write_trace(rank, log, spans[0], took, clocks)
    return row


def _conclude(session: Session, measured: Measured, sweep: dict[str, Any] | None) -> Row:
    """Builds and checks the result row on rank 0, and writes the files; returns the row. Raises
    GateError if the row contradicts itself. Raises UnwrittenError if a file cannot be written; a
    valid row is then printed first, so that it is not lost."""
    row = make_row(session, measured, sweep)
    arrays = round_arrays(measured)
    faults = violations(row, arrays)
    try:
        write_row(session, row, measured, arrays, faults)
    except OSError as error:  # raised, for example, if the disk is full
        if not faults:
            print(json_line(row.to_dict()), flush=True)
        where = f"out={session.job.config.out!r}: {error.filename}"
        raise UnwrittenError(f"{where}: the row was not written: {error.strerror}") from error
    if faults:
        raise GateError(f"row {row.run_id} contradicts itself: {'; '.join(faults)}")
    return row


def _measure(loop: TargetLoop, rank: Rank, *, is_alone: bool) -> LeadReport:
    """Decodes warm-up rounds on sequences that are thrown away, then the measured rounds, on a
    target group's first rank; returns its report. is_alone: whether no sweep runs."""
    session = rank.session
    config = session.job.config
    group = session.group
    warm = warm_up(loop, rank, config.warmup_rounds)
    scheduler = session.workload.scheduler(session.topology.group_index)
    loop.admit(scheduler.turn().join)
    rank.meet()
    guard.stage(Stage.ROUNDS)
    learning = session.learning
    sender = None
    if learning is not None and learning.outlet is not None:
        assert rank.target is not None, "a lead without a target"
        oracle = rank.target.oracle
        assert isinstance(oracle, LogitsTarget), "a learner of a workload without logits"
        loop.tell()  # so that no warm-up round becomes a training example
        sender = ExampleSender(oracle, learning.outlet)
        loop.observers.append(sender)
    first = loop.round
    messages_before = rank.messages
    reduced = group.spent_s
    prefilled = loop.prefill_s
    records = RoundRecords(session.job.lookahead)
    limit = config.max_rounds
    with shown(session.workload) if is_alone else nullcontext() as show:
        has_bar = not (show is not None and show.is_live) and session.topology.is_lead
        with progress_bar(config, limit) if has_bar else nullcontext() as advance:
            start = last = _begin(loop.ledger)
            while scheduler.running and (limit is None or len(records) < limit):
                result = scheduler.step(loop, records)
                if show is not None:
                    show.take(result)
                if advance is not None:
                    advance(1)
                before = perf_counter()  # a second timer, to check the sum of phases
                stamp = loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
                now = perf_counter()
                if stamp - before < now - stamp:  # The OS has preempted the rank since `stamp`.
                    now = before
                records.round_s.append(now - last)
                last = now
    count = max(1, loop.round - first)
    lost = loop.draft_lost_round
    learner = None
    if sender is not None and learning is not None:
        loop.tell()
        learner = {**(learning.stop() or {"state": "silent"}), "cost": sender.to_dict()}
    messages, sent = (after - b for after, b in zip(rank.messages, messages_before, strict=True))
    return LeadReport(
        records=records,
        first_round=first,
        last_round=loop.round,
        wall_s=last - start,
        ledger=loop.ledger.table(first, loop.round),
        phases=loop.ledger.names,
        warm_up=warm,
        messages_per_round=messages / count,
        bytes_per_round=sent / count,
        all_reduce_s=None if reduced is None else (group.spent_s or 0.0) - reduced,
        prefill_s=loop.prefill_s - prefilled,
        draft_lost_round=None if lost is None else max(0, lost - first),
        learner=learner,
        kernel=rank.kernel,
        draws=rank.draws,
    )


def _begin(ledger: Ledger) -> float:
    """Starts timing phases in `ledger`; returns the perf_counter time of that instant, in s. If the
    OS preempts the rank between reading both clocks, they are read again."""
    for _ in range(_ATTEMPTS):
        before = perf_counter()
        ledger.restart()
        start = perf_counter()
        if start - before < _INSTANT_S:
            break
    return start
