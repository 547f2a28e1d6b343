"""The half of `serve` that runs on the ranks: passes of the decoding loops while requests run.

The lead waits for requests on its socket, the other ranks for the next pass of the lead; none of
them spins. A pass without a round ends the job.
"""

from __future__ import annotations

import gc
import os
import socket

from mpissd.common import guard
from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.stage import Stage
from mpissd.common.trace import DraftPhase, NullLedger
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.goodput import Goodput, widths_of
from mpissd.engine.decode.row_times import RowTimes
from mpissd.engine.decode.scheduler import Room, Scheduler
from mpissd.engine.job import Job, Serving
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.session.doubts import tell_doubts
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Machine, opened_machine, session_of
from mpissd.engine.workload.text.workload import TextWorkload
from mpissd.serve.config import AUTO, ServeConfig
from mpissd.serve.driver import Driver
from mpissd.serve.line import Line
from mpissd.serve.protocol import SOCKET_VARIABLE, Ready
from mpissd.serve.warm import warm

_POLL_S = 0.2  # between two looks at lost ranks, while nothing arrives


def execute_serve(config: ServeConfig) -> int:
    """Serves on all ranks until the front leaves; returns the exit code."""
    sharpen_sleep()
    run = config.decoding
    with opened_machine(run, run.drafts) as machine:
        _serve(machine, config)
    return 0


def _serve(machine: Machine, config: ServeConfig) -> None:
    serving = Serving(config.kv_tokens, config.sampling, config.prefix_cache)
    session = session_of(machine, config.decoding, serving)
    if machine.topology.is_lead:
        tell_doubts(session.job)
    rank = Rank(session)
    gc.collect()
    gc.freeze()  # what lives as long as the job; collections look at the rest alone
    try:
        if machine.topology.is_lead:
            _lead(rank, config)
        else:
            _follow(rank)
    finally:
        session.resources.close()
    rank.close()


def _drafter(rank: Rank) -> Drafter | None:
    """Returns the drafter of one pass, which keeps no record of its rounds."""
    if rank.draft is None:
        return None
    drafter = rank.drafter(rank.draft)
    drafter.ledger = NullLedger(DraftPhase)
    return drafter


def _follow(rank: Rank) -> None:
    """Takes part in passes until one has no round."""
    while True:
        rank.idle()
        rank.run_pass(rank.target, _drafter(rank), lambda loop: None)
        guard.stage(Stage.ROUNDS)
        if not rank.digest:  # of no outcome at all
            return


def _lead(rank: Rank, config: ServeConfig) -> None:
    job, workload = rank.session.job, rank.session.workload
    assert isinstance(workload, TextWorkload), "serving text"
    times, room = RowTimes(_stepper(rank).sizes), room_of(job, rank)
    rank.run_pass(rank.target, _drafter(rank), lambda loop: warm(loop, job, times, room))
    guard.stage(Stage.ROUNDS)
    line = Line(_connected())
    driver = Driver(
        Scheduler(room),
        line,
        stop_ids=workload.stop_ids,
        vocab=workload.vocab,
        samples=workload.samples,
    )
    driver.times, driver.mode, driver.lookahead = times, job.config.mode, job.lookahead
    if config.auto:
        driver.goodput = Goodput(job.lookahead, widths_of(job), times)
    backend = rank.session.backend
    line.put(
        Ready(
            model=job.target.name,
            context=job.longest,
            stop_ids=sorted(workload.stop_ids),
            max_running=config.max_running,
            mode=AUTO if config.auto else driver.mode,
            backend=backend.name,
            device_name=backend.info.name,
        )
    )
    while not driver.is_over:
        driver.draft_lost = driver.draft_lost or bool(guard.lost())
        if driver.wait(_POLL_S):
            rank.run_pass(rank.target, _drafter(rank), driver.drive)
    driver.finish()
    line.close()
    rank.run_pass(rank.target, _drafter(rank), lambda loop: None)


def _stepper(rank: Rank) -> Stepper:
    assert rank.target is not None and isinstance(rank.target.stepper, Stepper)
    return rank.target.stepper


def room_of(job: Job, rank: Rank) -> Room:
    """Returns the room of the target ranks; that of the drafts has as many pages."""
    pages = _stepper(rank).pages
    assert pages is not None, "text without a KV cache"
    sizes = pages.sizes
    ahead = job.lookahead + 1
    return Room(job.config.batch_size, job.longest, ahead, sizes.page, sizes.num_pages)


def _connected() -> socket.socket:
    """Returns a connection to the front; raises ConfigError where there is none."""
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        raise ConfigError("serve under a launcher: allowed: without one, which starts the ranks")
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(path)
    except OSError as error:
        raise FaultError(f"serve: the front has left: {error.strerror}") from error
    return connected
