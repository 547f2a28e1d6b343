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

import torch

from mpissd.common.errors import ConfigError
from mpissd.engine.model.transformer.checkpoint import packed
from mpissd.online.examples import Example
from mpissd.online.learner import Learner, Student
from mpissd.online.process import receive, send

_IDLE_S = 0.05
_REPORT_S = 0.5  # time between two reports


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


def train(task: Task, inbox: queue.SimpleQueue[Example | None], out: BinaryIO) -> None:
    """Learns from arriving examples, until None arrives; writes versions and reports to `out`."""
    device = device_of(task)
    student = Student(
        task.draft, task.target, seed=task.seed, device=device, rate=task.rate,
        longest=task.longest, exact=task.exact,
    )  # fmt: skip
    learner = Learner(student, task.batch, task.steps)
    counts = learner.counts
    published_at = reported_at = time.monotonic()
    published_steps = 0

    def age() -> float | None:
        """Returns the seconds since this process was started."""
        return round(time.time() - task.started_at, 2) if task.started_at else None

    def report() -> None:
        nonlocal reported_at
        reported_at = time.monotonic()
        work = {"state": learner.state, **asdict(counts)}
        send(out, {**work, "held_out_agreement": learner.agreement, **since_start})

    gpu = None  # as DeviceInfo.uuid
    if device != "cpu":
        gpu = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', None)}"
    since_start: dict[str, Any] = {"gpu": gpu, "ready_s": age()}
    report()
    while True:
        try:  # waits if no step is due
            example = inbox.get(timeout=_IDLE_S) if not learner.is_due else inbox.get_nowait()
            while example is not None:
                learner.add(example)
                example = inbox.get_nowait()
            break
        except queue.Empty:
            pass
        if learner.is_due:
            learner.learn()
            since_start.setdefault("first_step_s", age())
        now = time.monotonic()
        if counts.steps > published_steps and now - published_at >= task.publish_s:
            published_at, published_steps = now, counts.steps
            if learner.publish():
                send(out, (counts.published, packed(student.arrays())))
            report()
        if time.monotonic() - reported_at > _REPORT_S:
            report()
    report()


def device_of(task: Task) -> str:
    """Returns "cpu", or the GPU whose index is the rank's on its host, at most the last GPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if task.device == "cpu" or not gpus:
        if task.device == "cuda":
            raise ConfigError("learn=device=cuda: PyTorch finds no GPU: allowed: auto, cpu")
        return "cpu"
    return f"cuda:{min(task.local_rank, gpus - 1)}"


def main(settings: str) -> int:
    """Trains until stdin ends; returns 0."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps prints of libraries out of the messages
    task = Task(**json.loads(settings))
    torch.set_num_threads(task.threads)
    torch.set_float32_matmul_precision("high")
    inbox: queue.SimpleQueue[Example | None] = queue.SimpleQueue()

    def read() -> None:
        while (example := receive(sys.stdin.buffer)) is not None:
            inbox.put(example)
        inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    train(task, inbox, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
