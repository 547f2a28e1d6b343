"""The rounds in front of the first request: they compile, fill caches and measure forwards."""

from __future__ import annotations

from mpissd.common.rounds import Control, Request
from mpissd.common.trace import LeadPhase, NullLedger
from mpissd.engine.decode.goodput import warm_sizes
from mpissd.engine.decode.row_times import RowTimes
from mpissd.engine.decode.scheduler import Room
from mpissd.engine.decode.target import TargetLoop
from mpissd.engine.job import Job

_FIRST_ID, _ROUNDS, _PROMPT = 1 << 30, 6, (0, 1, 2)


def warm(loop: TargetLoop, job: Job, times: RowTimes, room: Room) -> None:
    """Decodes a few rounds of batches of several sizes, and measures their forwards.

    No request waits for compilers and caches afterwards. A batch has as many sequences as there are
    pages for.
    """
    loop.ledger = NullLedger(LeadPhase)
    sampled = job.serving is not None and job.serving.samples
    most = max(1, room.pages // room.pages_of(len(_PROMPT) + _ROUNDS * (job.lookahead + 1)))
    every = [(1, k, 0.0) for k in range(job.lookahead + 1)]
    every += [(count, job.lookahead, 0.0) for count in warm_sizes(job) if count <= most]
    every += [(1, job.lookahead, 1.0)] * sampled
    first = _FIRST_ID
    for count, lookahead, temperature in every:
        ids = range(first, first + count)
        loop.control = Control(lookahead)
        loop.admit([Request(n, _PROMPT[-1], 0, _PROMPT, temperature) for n in ids])
        for number in range(_ROUNDS):
            result = loop.step()
            if number > 1:
                times.add(result.num_rows, result.t_target_s)
        loop.finish(list(ids))
        first += count
    loop.control = Control()
