"""The process that trains: `python -m mpissd.online.trainer JSON`, started by a learner's rank.

It reads examples from stdin and writes versions and reports to stdout. Whatever happens to it, the
rank that started it, and the job, go on. It ends when stdin does.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from mpissd.common.errors import ConfigError
from mpissd.engine.model.transformer.checkpoint import packed
from mpissd.online.examples import Example
from mpissd.online.learner import Learner, LearnerPlan
from mpissd.online.process import receive, send
from mpissd.online.student import Student

_IDLE_S = 0.05
_REPORT_S = 0.5  # between two reports


@dataclass(frozen=True)
class Task:
    """Settings of a trainer; its fields arrive as JSON.

    seed: of random weights of the draft. started_at: when its process was started, time.time.
    """

    draft: str
    target: str
    seed: int = 0
    device: str = "auto"
    local_rank: int = 0
    rate: float = 3e-5
    batch: int = 4
    steps: float = 1.0
    publish_s: float = 10.0
    longest: int = 1024
    threads: int = 1
    exact: bool = False
    started_at: float = 0.0


class Trainer:
    """One learner between two pipes."""

    def __init__(self, task: Task, out: BinaryIO) -> None:
        self.task, self._out = task, out
        device = _device(task)
        student = Student(
            task.draft, task.target, seed=task.seed, device=device, rate=task.rate,
            longest=task.longest, exact=task.exact,
        )  # fmt: skip
        self.learner = Learner(student, LearnerPlan(task.batch, task.steps))
        self._published_at = self._reported_at = time.monotonic()
        self._published_steps = 0
        self._since_start: dict[str, Any] = {"gpu": _gpu(device), "ready_s": self._age()}

    def run(self, inbox: queue.SimpleQueue[Example | None]) -> None:
        """Learns from arriving examples, until None arrives."""
        self.report()
        while self._drain(inbox):
            if self.learner.is_due:
                self.learner.learn()
                self._since_start.setdefault("first_step_s", self._age())
            self._publish_if_due()
            if time.monotonic() - self._reported_at > _REPORT_S:
                self.report()
        self.report()

    def _drain(self, inbox: queue.SimpleQueue[Example | None]) -> bool:
        """Takes all examples that have arrived; waits for one if no step is due."""
        wait = 0.0 if self.learner.is_due else _IDLE_S
        while True:
            try:
                example = inbox.get(timeout=wait) if wait else inbox.get_nowait()
            except queue.Empty:
                return True
            if example is None:
                return False
            self.learner.add(example)
            wait = 0.0

    def _publish_if_due(self) -> None:
        counts, now = self.learner.counts, time.monotonic()
        has_learned = counts.steps > self._published_steps
        if not has_learned or now - self._published_at < self.task.publish_s:
            return
        self._published_at, self._published_steps = now, counts.steps
        if self.learner.publish():
            send(self._out, (counts.published, packed(self.learner.student.arrays())))
        self.report()

    def report(self) -> None:
        """Writes a report of the learner's work so far."""
        self._reported_at = time.monotonic()
        learner = self.learner
        counts = asdict(learner.counts)
        losses = counts.pop("losses")
        last = {} if not losses else {name: _mean(losses, name) for name in losses[0]}
        told: dict[str, Any] = {"state": learner.state.value, **counts, "last_losses": last}
        told |= {"held_out_agreement": learner.agreement, **self._since_start}
        send(self._out, told)

    def _age(self) -> float | None:
        """Returns the seconds since this process was started."""
        return round(time.time() - self.task.started_at, 2) if self.task.started_at else None


def _mean(losses: list[dict[str, float]], name: str) -> float | None:
    found = sum(one[name] for one in losses) / len(losses)
    return round(found, 5) if found == found else None


def _device(task: Task) -> str:
    """Returns "cpu", or the GPU whose index is the rank's on its host, at most the last GPU."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if task.device == "cpu" or not gpus:
        if task.device == "cuda":
            raise ConfigError("learn=device=cuda: PyTorch finds no GPU: allowed: auto, cpu")
        return "cpu"
    return f"cuda:{min(task.local_rank, gpus - 1)}"


def _gpu(device: str) -> str | None:
    """Returns the GPU's unique name, as `DeviceInfo.uuid`; None on a CPU."""
    import torch

    if device == "cpu":
        return None
    return f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', None)}"


def _read(pipe: BinaryIO, inbox: queue.SimpleQueue[Example | None]) -> None:
    while (example := receive(pipe)) is not None:
        inbox.put(example)
    inbox.put(None)


def main(told: str) -> int:
    """Trains until stdin ends; returns 0."""
    import torch

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps prints of libraries out of the frames
    task = Task(**json.loads(told))
    torch.set_num_threads(task.threads)
    torch.set_float32_matmul_precision("high")
    inbox: queue.SimpleQueue[Example | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, inbox), daemon=True).start()
    Trainer(task, out).run(inbox)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
