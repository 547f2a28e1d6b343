"""The command `run`: one configuration from launch to JSON line.

Rank 0 leads: it prints, decides how long, and writes. Followers and drafts serve until told to
stop, then everybody's raw rows are gathered and rank 0 makes the result row of them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.bench.report import print_card, print_summary, progress_bar
from mpissd.bench.row import Measured, make_row, write_row
from mpissd.bench.session import Session, open_session
from mpissd.comm import mpi_link
from mpissd.config import RunConfig
from mpissd.decode.draft import Drafter, DraftPolicy, serve
from mpissd.decode.speculator import (
    InlineSpeculator,
    NoSpeculator,
    RemoteSpeculator,
    Speculator,
)
from mpissd.decode.target import TargetLoop, follow
from mpissd.records import RoundRecords
from mpissd.rounds import Outcome, Request, Source
from mpissd.trace import LeadPhase
from mpissd.wait import sharpen_sleep

_WARM_ID = 1 << 30  # request ids of throw-away sequences begin here
_CALIBRATIONS = 9


@dataclass
class DraftReport:
    """What a draft rank (or the inline draft) hands to rank 0 when all is over."""

    t_draft_s: list[float]  # of K sequential steps, calibrated alone
    rounds: NDArray[Any]  # Drafter.COLUMNS
    ledger: NDArray[np.int64]
    phases: list[str]


@dataclass
class RankReport:
    """What every rank hands to rank 0."""

    draft: DraftReport | None = None
    read_bandwidth: float | None = None
    notes: list[str] = field(default_factory=list)


def execute(config: RunConfig) -> int:
    """Runs one configuration on all ranks; returns the exit code."""
    sharpen_sleep()
    session = open_session(config)
    with session.resources:
        if session.topology.is_lead:
            _lead(session)
        elif session.topology.is_draft:
            _draft(session)
        else:
            _follower(session)
    return 0


def _lead(session: Session) -> None:
    world, job = session.topology.world, session.job
    print_card(session)
    worker = session.target_worker()
    session.resources.callback(worker.close)
    drafter = _drafter(session) if job.inline else None
    plans = mpi_link.PlanSender(session.topology.group.Dup(), session.link_shape, session.waiter)
    speculator, link = _speculator(session, drafter)
    loop = TargetLoop(worker, speculator, plans, job.config.batch_size, session.waiter)
    report = RankReport()
    calibrated = _calibrate(session, drafter)
    report.read_bandwidth = _read_bandwidth(session)
    records, first, wall_s = _measure(loop, session)
    ends = [plans] + ([link] if link is not None else [])
    messages = sum(end.num_messages for end in ends) / max(1, loop.round)
    num_bytes = sum(end.num_bytes for end in ends) / max(1, loop.round)
    loop.stop()
    if drafter is not None:
        report.draft = _draft_report(drafter, calibrated, first, loop.round)
    world.bcast((first, loop.round))
    reports = world.gather(report)
    for end in ends:
        end.close()
    assert reports is not None
    draft = next((r.draft for r in reports if r.draft is not None), None)
    measured = Measured(
        records=records,
        wall_s=wall_s,
        ledger=loop.ledger.table(first, loop.round),
        phases=loop.ledger.names,
        draft_rounds=None if draft is None else draft.rounds,
        draft_ledger=None if draft is None else draft.ledger,
        draft_phases=[] if draft is None else draft.phases,
        t_draft_s=[] if draft is None else draft.t_draft_s,
        read_bandwidth=reports[0].read_bandwidth,
        messages_per_round=messages,
        bytes_per_round=num_bytes,
    )
    row = make_row(session, measured)
    write_row(session, row, measured)
    print_summary(row)


def _speculator(
    session: Session, drafter: Drafter | None
) -> tuple[Speculator, Any]:
    """The speculator of this job, and its link where it has one."""
    if session.job.draft is None:
        return NoSpeculator(), None
    if drafter is not None:
        return InlineSpeculator(drafter), None
    world = session.topology.world.Dup()
    link = mpi_link.lead_end(world, session.job.tp, session.link_shape, session.waiter)
    return RemoteSpeculator(link), link


def _draft(session: Session) -> None:
    world = session.topology.world
    drafter = _drafter(session)
    link = mpi_link.draft_end(world.Dup(), 0, session.link_shape, session.waiter)
    calibrated = _calibrate(session, drafter)
    _read_bandwidth(session)
    with undisturbed():
        serve(link, drafter)
    first, last = world.bcast(None)
    world.gather(RankReport(_draft_report(drafter, calibrated, first, last)))
    link.close()


def _follower(session: Session) -> None:
    world, job = session.topology.world, session.job
    worker = session.target_worker()
    session.resources.callback(worker.close)
    plans = mpi_link.PlanReceiver(
        session.topology.group.Dup(), session.link_shape, session.waiter
    )
    if job.draft is not None and not job.inline:
        world.Dup()  # the link's communicator: creating it is collective
    _calibrate(session, None)
    _read_bandwidth(session)
    with undisturbed():
        follow(worker, plans, job.config.batch_size, session.waiter)
    world.bcast(None)
    world.gather(RankReport())
    plans.close()


def _drafter(session: Session) -> Drafter:
    job = session.job
    worker = session.draft_worker()
    session.resources.callback(worker.close)
    policy = DraftPolicy(
        lookahead=job.lookahead,
        fan_out=job.fan_out,
        backup=Source[job.config.backup.upper()],
        backup_lookahead=job.backup_lookahead,
        on_late=job.config.on_late,
    )
    return Drafter(worker, policy, job.config.batch_size, session.waiter)


def _draft_report(
    drafter: Drafter, calibrated: list[float], first: int, last: int
) -> DraftReport:
    ledger = drafter.ledger
    return DraftReport(
        calibrated, drafter.table(first, last), ledger.table(first, last), ledger.names
    )


def _calibrate(session: Session, drafter: Drafter | None) -> list[float]:
    """Times K sequential draft steps while the other ranks wait: nobody competes for the host."""
    session.barrier()
    times: list[float] = []
    if drafter is not None:
        requests = _requests(_WARM_ID, session.job.config.batch_size)
        times = drafter.calibrate(requests, _CALIBRATIONS)
    session.barrier()
    return times


def _read_bandwidth(session: Session) -> float | None:
    """The read rate over a buffer of this rank's weights, while the other ranks wait."""
    rate = None
    if session.topology.is_lead:
        weights, _ = session.job.rank_bytes(session.backend.itemsize)
        rate = session.backend.read_bandwidth(weights)
    session.barrier()
    return rate


def _requests(first_id: int, count: int) -> list[Request]:
    return [Request(first_id + n, first_token=n) for n in range(count)]


def _measure(loop: TargetLoop, session: Session) -> tuple[RoundRecords, int, float]:
    """Warm-up on throw-away sequences, then the measured rounds: (records, first round, wall)."""
    config = session.job.config
    warm = _requests(_WARM_ID, config.batch_size)
    loop.admit(warm)
    with undisturbed():
        loop.ledger.restart()
        for _ in range(config.warmup_rounds):
            loop.step()
            loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
        loop.finish([request.request_id for request in warm])
        loop.admit(_requests(0, config.batch_size))
        first = loop.round
        records, wall_s = _rounds(loop, config, session.job.lookahead)
    return records, first, wall_s


def _rounds(loop: TargetLoop, config: RunConfig, lookahead: int) -> tuple[RoundRecords, float]:
    records = RoundRecords(lookahead)
    emitted: dict[int, int] = dict.fromkeys(range(config.batch_size), 0)
    limit = config.max_rounds
    loop.ledger.restart()
    start = last = perf_counter()
    with progress_bar(config, limit) as advance:
        while emitted and (limit is None or len(records) < limit):
            result = loop.step()
            if config.num_tokens is not None:
                loop.finish(_finished(emitted, result.outcome, config.num_tokens))
            records.add(result.t_target_s, result.speculation, result.outcome)
            advance(1)
            loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
            now = perf_counter()  # a clock of its own: the ledger has to close against it
            records.round_s.append(now - last)
            last = now
    return records, last - start


def _finished(emitted: dict[int, int], outcome: Outcome, enough: int) -> list[int]:
    """Counts tokens a sequence; the ids that have enough now leave `emitted`."""
    for request_id, accepted in zip(
        outcome.ids.tolist(), outcome.num_accepted.tolist(), strict=True
    ):
        emitted[request_id] += accepted + 1
    gone = [request_id for request_id, count in emitted.items() if count >= enough]
    for request_id in gone:
        del emitted[request_id]
    return gone


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection: a full one costs a round some milliseconds."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
