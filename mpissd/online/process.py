"""Starts a trainer and talks to it, without ever waiting for it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from mpissd.common.guard import without_ranks
from mpissd.online import frames
from mpissd.online.examples import Example

PYTHON = "MPISSD_LEARNER_PYTHON"  # another interpreter that has PyTorch; default: this one
_MOST = 256  # examples that wait for the trainer; further ones are dropped
_PATIENCE_S = 3.0  # for its last report


class TrainerProcess:
    """A trainer in a process of its own; what it does cannot hold up the process that started it.

    version: the newest version and its packed weights, once it has arrived; `take` hands it out.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self._waiting: queue.Queue[bytes] = queue.Queue(_MOST)
        self._newest: tuple[int, bytes] | None = None
        self.report: dict[str, Any] = {"state": "starting"}
        self.dropped = 0
        here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *_path()])}
        self._process = subprocess.Popen(
            [os.environ.get(PYTHON, sys.executable), "-m", "mpissd.online.trainer",
             json.dumps(task)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**without_ranks(os.environ), **here},
        )  # fmt: skip
        self._threads = [
            threading.Thread(target=part, daemon=True) for part in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, example: Example) -> None:
        """Hands an example over, or drops it where too many wait."""
        try:
            self._waiting.put_nowait(frames.of_example(example))
        except queue.Full:
            self.dropped += 1

    def take(self) -> tuple[int, bytes] | None:
        """Returns the newest version since the last call, as (version, packed weights)."""
        found, self._newest = self._newest, None
        return found

    @property
    def is_alive(self) -> bool:
        """Whether the trainer runs."""
        return self._process.poll() is None

    def stop(self) -> dict[str, Any]:
        """Ends the trainer; returns its last report, `state` "lost" if it had ended before."""
        was_alive = self.is_alive
        self._waiting.put(b"") if not self._waiting.full() else self._process.kill()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._threads[1].join(_PATIENCE_S)
        found = {**self.report, "dropped_examples": self.dropped}
        return found if was_alive else {**found, "state": "lost"}

    def _write(self) -> None:
        pipe: Any = self._process.stdin
        try:
            while data := self._waiting.get():
                frames.write(pipe, frames.EXAMPLE, data)
            pipe.close()
        except OSError:
            return  # it has ended: `is_alive` says so

    def _read(self) -> None:
        pipe: Any = self._process.stdout
        while (frame := frames.read(pipe)) is not None:
            if frame[0] == frames.VERSION:
                self._newest = frames.version_of(frame[1])
            else:
                self.report = json.loads(frame[1])


def _path() -> list[str]:
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
