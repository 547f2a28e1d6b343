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
from mpissd.engine.comm import learner_messages
from mpissd.engine.comm.learner_messages import Bytes, pieces
from mpissd.engine.job import resolve_unopened
from mpissd.engine.workload.text.workload import TextWorkload
from mpissd.online.examples import Collector, Example
from mpissd.online.process import TrainerProcess

if TYPE_CHECKING:
    from mpissd.engine.comm.mpi_learner import LearnerComms  # importing it starts MPI

_NAP_S = 1e-3


class LearnerRank:
    """The state of a learner's rank between two polls."""

    def __init__(self, comms: LearnerComms, trainer: TrainerProcess, collector: Collector) -> None:
        self._comms, self._trainer, self._collector = comms, trainer, collector
        self._pieces: Iterator[Bytes] = iter(())
        self._sending: tuple[Any, Bytes] | None = None
        self._fault: str | None = None
        self.sent = 0  # the version that was sent last

    def run(self) -> None:
        """Works until the lead sends stop."""
        while True:
            is_over = self._comms.is_told_to_stop()
            # Lessons for a trainer that is gone stay where they are: so the lead reads no more.
            is_busy = (self._trainer.is_alive and self._receive()) | self._send()
            if is_over:
                break
            if not is_busy:
                time.sleep(_NAP_S)
        while self._receive():
            continue
        self._post(self._collector.rest)
        report = self._trainer.stop()
        if self._fault is not None:
            report |= {"state": "failed", "fault": self._fault}
        report |= {"version_sent": self.sent, "dropped_sequences": self._collector.dropped}
        self._comms.finish(report, None if self._sending is None else self._sending[0])

    def _receive(self) -> bool:
        numbers = self._comms.lesson()
        if numbers is None:
            return False
        self._post(lambda: self._collector.add(learner_messages.read_lessons(numbers)))
        return True

    def _post(self, collected: Callable[[], list[Example]]) -> None:
        """Hands sequences on; an error ends the learning, and not the job."""
        if self._fault is not None:
            return
        try:
            for example in collected():
                self._trainer.post(example)
        except Exception as fault:  # noqa: BLE001  (an error of ours must not end the job either)
            self._fault = f"{type(fault).__name__}: {fault}"

    def _send(self) -> bool:
        """Sends the next piece of a version, once the last one is gone."""
        if self._sending is not None and not self._sending[0].Test():
            return False
        self._sending = None
        message = next(self._pieces, None)
        if message is None:
            if (newest := self._trainer.take()) is None:
                return False
            self.sent = newest[0]
            self._pieces = pieces(*newest)
            message = next(self._pieces)
        self._sending = self._comms.send_piece(message), message
        return True


def learn(config: RunConfig, comms: LearnerComms) -> int:
    """Runs a learner's rank to the job's end; returns 0."""
    guard.stage(Stage.ROUNDS)
    job = resolve_unopened(config, comms.world_size - config.learners - config.drafts, None)
    workload = job.workload
    stops = workload.stop_ids if isinstance(workload, TextWorkload) else frozenset[int]()
    task = task_of(config, job.target_where, job.draft_where, comms.local_rank)
    LearnerRank(comms, TrainerProcess(task), Collector(stops)).run()
    guard.stage(Stage.TEARDOWN)
    return 0


def task_of(config: RunConfig, target: str, draft: str, local_rank: int) -> dict[str, Any]:
    """Returns the fields of trainer.Task for a run; of several threads, as many as cores idle."""
    return {
        "target": target,
        "draft": draft,
        "seed": 2 * config.seed + 1,
        "device": config.learning.device,
        "local_rank": local_rank,
        "rate": config.learning.rate,
        "batch": config.learning.batch,
        "steps": config.learning.steps,
        "publish_s": config.learning.publish_s,
        "exact": choose(config.backend) == "cupy",
        "longest": config.context or 1024,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
    }
