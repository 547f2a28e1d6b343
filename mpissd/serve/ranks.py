"""The half of `serve` that runs on the MPI ranks, which decode whenever there are requests.

A pass is one run of the decoding loops on all ranks, for as long as there are requests. Between
passes the lead (the target's first rank) waits for requests, and other ranks wait for the lead; no
rank spins. A pass without a round ends the job.
"""

import contextlib
import gc
import os
import socket
from collections.abc import Callable
from time import monotonic

from mpissd.common import guard
from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.rounds import Control, Request, Sampling
from mpissd.common.stage import Stage
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.features.goodput import ForwardTimes, Goodput, Way, warm_sizes, widths_of
from mpissd.engine.job import Job, Serving
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.oracle.logits import TextWorkload
from mpissd.engine.round.scheduler import Capacity, Endings, Scheduler
from mpissd.engine.round.target import TargetLoop
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import opened_machine, session_of, tell_doubt
from mpissd.serve.config import AUTO, ServeConfig
from mpissd.serve.driver import Driver
from mpissd.serve.protocol import SOCKET_VARIABLE, Line, Ready

_POLL_S = 0.2  # time between two checks for lost ranks while there are no requests
_WARM_ID, _WARM_ROUNDS, _WARM_PROMPT = 1 << 30, 6, (0, 1, 2)


def execute_serve(config: ServeConfig) -> int:
    """Serves requests on this rank until the front, the HTTP process, leaves; returns 0."""
    sharpen_sleep()
    run = config.decoding
    serving = Serving(config.kv_tokens, config.sampling, config.prefix_cache)
    with opened_machine(run, run.drafts) as machine:
        session = session_of(machine, run, serving)
        if machine.topology.is_lead:
            tell_doubt(session.job)
        with contextlib.suppress(ConfigError):  # Without llguidance there are no grammars.
            if isinstance(session.workload, TextWorkload):
                _ = session.workload.grammars  # Build now, lest a request wait 1 s.
        rank = Rank(session)
        gc.collect()
        gc.freeze()  # exempts objects that live as long as the job from garbage collection
        try:
            if machine.topology.is_lead:
                _lead(rank, config)
            while not machine.topology.is_lead:
                rank.idle()
                _pass(rank, lambda loop: None)
                guard.stage(Stage.ROUNDS)
                if not rank.digest:  # a pass without a round
                    break
        finally:
            session.resources.close()
        rank.close()
    return 0


def _pass(rank: Rank, drive: Callable[[TargetLoop], object]) -> None:
    """Runs the decoding loops on all ranks once, for as long as there are requests. drive: a
    function that decodes rounds on the target's rank 0; other ranks follow its messages."""
    rank.run_pass(rank.target, rank.make_drafters(), drive)


def _lead(rank: Rank, config: ServeConfig) -> None:
    job, workload, backend = rank.session.job, rank.session.workload, rank.session.backend
    assert isinstance(workload, TextWorkload), "serving text"
    assert rank.target is not None and isinstance(rank.target.stepper, Stepper)
    pages = rank.target.stepper.pages  # KV pages; a draft rank has equally many
    times = ForwardTimes(rank.target.stepper.sizes, job.tokens_a_forward)
    assert pages is not None, "text without a KV cache"
    batch, ahead = job.config.batch_size, job.lookahead + 1
    room = Capacity(batch, job.longest, ahead, pages.sizes.page, pages.sizes.num_pages)
    goodput = Goodput(job.lookahead, widths_of(job), times) if config.auto else None
    _pass(rank, lambda loop: warm(loop, job, times, room, goodput))
    guard.stage(Stage.ROUNDS)
    line = Line(_connected())
    driver = Driver(
        Scheduler(room, Endings(*workload.stop_ids)),
        line,
        job.config.mode,
        job.lookahead,
        times=times,
        goodput=goodput,
        shape=job.shape,
    )
    line.put(
        Ready(
            model=job.target.name,
            context=job.longest,
            stop_ids=sorted(workload.stop_ids),
            max_running=config.max_running,
            mode=AUTO if config.auto else driver.mode,
            vocab=workload.vocab,
            backend=backend.name,
            device_name=backend.info.name,
            draws=rank.draws if config.sampling else None,
        )
    )
    while not driver.is_over:
        driver.draft_lost = driver.draft_lost or bool(guard.lost())
        if driver.wait(_POLL_S):
            _pass(rank, driver.drive)
    line.close()
    _pass(rank, lambda loop: None)


def warm(
    loop: TargetLoop, job: Job, times: ForwardTimes, room: Capacity, goodput: Goodput | None = None
) -> None:
    """Decodes a few rounds with batches of several sizes, so that no request waits for compilers or
    cold caches. `times` gets the times of their forwards, and the controller `goodput` those of
    rounds with AR and every fan-out at the largest K. A batch has as many sequences as KV pages
    allow."""
    sampled = job.serving is not None and job.serving.samples
    pages = room.pages_of(len(_WARM_PROMPT) + _WARM_ROUNDS * (job.lookahead + 1))
    most = max(1, room.pages // pages)
    batches = [(1, Way(k, None), 0.0) for k in range(job.lookahead + 1)]
    ways = [Way(job.lookahead, None)]
    if goodput is not None:
        ways = [way for way in goodput.ways if way.lookahead in (0, job.lookahead)]
    sizes = [count for count in warm_sizes(job) if count <= most]
    batches += [(count, way, 0.0) for count in sizes for way in ways]
    batches += [(1, Way(job.lookahead, None), 1.0)] * sampled
    first = _WARM_ID
    for count, way, temperature in batches:
        ids = range(first, first + count)
        sampling = Sampling(temperature)
        loop.control = Control(*way)
        loop.admit([Request(n, _WARM_PROMPT[-1], 0, _WARM_PROMPT, sampling) for n in ids])
        for number in range(_WARM_ROUNDS):
            start = monotonic()
            result = loop.step()
            if number > 1:
                times.add(result.num_rows, result.t_target_s)
                if goodput is not None and way in goodput.ways:
                    goodput.time(way, result, monotonic() - start)
        loop.finish(list(ids))
        first += count
    loop.control = Control()


def _connected() -> socket.socket:
    """Returns a connection to the front (the HTTP process). Raises ConfigError if no front started
    this rank, FaultError if the front is gone."""
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        raise ConfigError("serve under a launcher: allowed: without one, which starts the ranks")
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(path)
    except OSError as error:
        raise FaultError(f"serve: the front has left: {error.strerror}") from error
    return connected
