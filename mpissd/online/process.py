"""A learner's rank: receives training examples from the lead rank, has a trainer process learn from
them, and sends new weights to the draft rank.

The trainer is a child process, so that this rank always answers at once. The trainer gets Examples,
and sends back versions of the weights, (number, packed weights), and reports, which are dicts.
Messages are pickled; this rank never waits for one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mpissd.common import guard
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.stage import Stage
from mpissd.engine.backend.registry import choose
from mpissd.engine.features.learning import Bytes, pieces, read_parts
from mpissd.engine.job import resolve_unopened
from mpissd.engine.oracle.logits import TextWorkload
from mpissd.online.examples import Collector, Example

if TYPE_CHECKING:
    from mpissd.engine.comm.mpi_learner import LearnerComms  # importing it starts MPI

_NAP_S = 1e-3
_MOST = 256  # examples that may wait for the trainer; further ones are dropped
_PATIENCE_S = 3.0  # seconds to wait for the trainer's last report
_NEEDED = ("numpy", "safetensors", "torch")  # packages that a trainer imports


def check_trainer() -> None:
    """Raises ConfigError if this Python lacks a package that the trainer imports."""
    if missing := ", ".join(name for name in _NEEDED if not importlib.util.find_spec(name)):
        use = "pip install 'mpissd[distill]' there"
        raise ConfigError(f"learners=1: {sys.executable} has no {missing}: {use}")


def send(pipe: BinaryIO, message: object) -> None:
    """Writes a pickled message; blocks while the pipe is full."""
    pickle.dump(message, pipe)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """Returns the next message from a pipe; None once the sending process has ended."""
    try:
        return pickle.load(pipe)
    except (EOFError, pickle.UnpicklingError):  # the sender ended, perhaps within a message
        return None


class TrainerProcess:
    """A trainer in a child process, which cannot block the caller. report: its latest report."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._waiting: queue.Queue[Example | None] = queue.Queue(_MOST)
        self._newest: deque[tuple[int, bytes]] = deque(maxlen=1)
        self.report: dict[str, Any] = {"state": "starting"}
        self.dropped = 0
        path = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = {**guard.without_ranks(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, path))}
        settings = json.dumps({**task, "started_at": time.time()})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mpissd.online.trainer", settings],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
        )  # fmt: skip
        threading.Thread(target=self._write, daemon=True).start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def post(self, example: Example) -> None:
        """Queues an example for the trainer, or drops it if 256 examples wait."""
        try:
            self._waiting.put_nowait(example)
        except queue.Full:
            self.dropped += 1

    def take(self) -> tuple[int, bytes] | None:
        """Returns the newest version since the last call (number, packed weights) or None."""
        try:
            return self._newest.popleft()  # atomic, so no newer version is lost
        except IndexError:
            return None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> dict[str, Any]:
        """Ends the trainer; returns its last report with the number of dropped examples. `state` is
        "lost" if the trainer had ended already, and "silent" if it does not end within 3 s."""
        state = {} if self.is_alive else {"state": "lost"}
        self._waiting.put(None) if not self._waiting.full() else self._process.kill()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            state = {"state": "silent"}
        self._reader.join(_PATIENCE_S)
        return {**self.report, "dropped_examples": self.dropped, **state}

    def _write(self) -> None:
        pipe: Any = self._process.stdin
        try:
            while (example := self._waiting.get()) is not None:
                send(pipe, example)
            pipe.close()
        except OSError:
            return  # the trainer has ended, so `is_alive` is False

    def _read(self) -> None:
        pipe: Any = self._process.stdout
        while (message := receive(pipe)) is not None:
            if isinstance(message, dict):
                self.report = message
            else:
                self._newest.append(message)


def learn(config: RunConfig, comms: LearnerComms) -> int:
    """Runs the learner's rank until the job ends; returns 0."""
    guard.stage(Stage.ROUNDS)
    job = resolve_unopened(config, comms.world_size - config.learners - config.drafts, None)
    workload = job.workload
    stops = workload.stop_ids if isinstance(workload, TextWorkload) else frozenset[int]()
    learning = config.learning
    task = {  # arguments of trainer.main and of Student
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
    """Passes examples to the trainer, and new versions of the weights to the draft rank, until the
    lead rank says stop."""
    parts: Iterator[Bytes] = iter(())  # pieces of the current version that are not sent yet
    sending: Any = None  # the MPI request of a piece, and the piece
    fault = None
    version = 0

    def post(examples: Callable[[], list[Example]]) -> None:
        """Queues the sequences that `examples` returns. An error ends only the training."""
        nonlocal fault
        try:
            for example in examples() if fault is None else ():
                trainer.post(example)
        except Exception as error:  # noqa: BLE001  (an error of ours must not end the job either)
            fault = f"{type(error).__name__}: {error}"

    def received() -> bool:
        if (message := comms.examples()) is None:
            return False
        post(lambda: collector.add(read_parts(message)))
        return True

    is_over = False
    while not is_over:
        is_over = comms.must_stop()
        # Without a trainer, messages stay unread, so that the lead rank stops sending them.
        is_busy = trainer.is_alive and received()
        if sending is None or sending[0].Test():
            sending = None
            message = next(parts, None)
            if message is None and (newest := trainer.take()) is not None:
                version = newest[0]
                parts = pieces(*newest)
                message = next(parts)
            if message is not None:
                sending = comms.send_piece(message), message
                is_busy = True
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
