"""A learner's rank: it receives lessons, has a trainer learn from them, and sends new weights on.

It computes little itself, so that it answers at once whatever its trainer does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpissd.common import guard
from mpissd.common.config import RunConfig
from mpissd.common.stage import Stage
from mpissd.engine.backend.registry import choose
from mpissd.engine.comm.learner_messages import Bytes, pieces, read_lessons
from mpissd.engine.job import resolve_unopened
from mpissd.engine.workload.text import TextWorkload
from mpissd.online.examples import Collector, Example
from mpissd.online.process import TrainerProcess

if TYPE_CHECKING:
    from mpissd.engine.comm.mpi_learner import LearnerComms  # importing it starts MPI

_NAP_S = 1e-3


def learn(config: RunConfig, comms: LearnerComms) -> int:
    """Runs a learner's rank to the job's end; returns 0."""
    guard.stage(Stage.ROUNDS)
    job = resolve_unopened(config, comms.world_size - config.learners - config.drafts, None)
    workload, learning = job.workload, config.learning
    stops = workload.stop_ids if isinstance(workload, TextWorkload) else frozenset[int]()
    task = {  # the fields of trainer.Task
        "target": job.target_where,
        "draft": job.draft_where,
        "seed": 2 * config.seed + 1,
        "device": learning.device,
        "local_rank": comms.local_rank,
        "rate": learning.rate,
        "batch": learning.batch,
        "steps": learning.steps,
        "publish_s": learning.publish_s,
        "exact": choose(config.backend) == "cupy",
        "longest": config.context or 1024,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
    }
    relay(comms, TrainerProcess(task), Collector(stops))
    guard.stage(Stage.TEARDOWN)
    return 0


def relay(comms: LearnerComms, trainer: TrainerProcess, collector: Collector) -> None:
    """Brings lessons to the trainer, and its versions to the draft, until the lead sends stop."""
    parts: Iterator[Bytes] = iter(())  # pieces of the current version that are still to be sent
    sending: Any = None  # the request of a piece, and the piece
    fault, version = None, 0

    def post(examples: Callable[[], list[Example]]) -> None:
        """Hands sequences on; an error ends the learning, and not the job."""
        nonlocal fault
        try:
            for example in examples() if fault is None else ():
                trainer.post(example)
        except Exception as error:  # noqa: BLE001  (an error of ours must not end the job either)
            fault = f"{type(error).__name__}: {error}"

    def received() -> bool:
        if (message := comms.lesson()) is None:
            return False
        post(lambda: collector.add(read_lessons(message)))
        return True

    is_over = False
    while not is_over:
        is_over = comms.must_stop()
        # If the trainer is gone, messages stay unread, so that the lead soon reads no more logits.
        is_busy = trainer.is_alive and received()
        if sending is None or sending[0].Test():
            sending = None
            message = next(parts, None)
            if message is None and (newest := trainer.take()) is not None:
                version, parts = newest[0], pieces(*newest)
                message = next(parts)
            if message is not None:
                sending, is_busy = (comms.send_piece(message), message), True
        if not (is_busy or is_over):
            time.sleep(_NAP_S)
    while received():
        continue
    post(collector.rest)
    report = trainer.stop()
    if fault is not None:
        report |= {"state": "failed", "fault": fault}
    report |= {"version_sent": version, "dropped_sequences": collector.dropped}
    comms.finish(report, None if sending is None else sending[0])
