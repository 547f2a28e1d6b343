"""Batch jobs of the sandbox: submitted, waited for, and their output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpissd.common.row import flat
from tests.slurm.sandbox import Sandbox, wait_until

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300.0  # of a job; a minute on two idle cores
NULL = {
    "BACKEND": "emulated",
    "DEVICE": "null",
    "ROUNDS": "5",
}  # nothing lasts, nothing is computed
# An endless run whose ranks sleep.
ENDLESS = ("--backend=emulated", "--device=h100", "--pair=8b/1b", "--rounds=100000000")


@dataclass
class Job:
    """A job under `sbatch --wait`. code: what that ended with, the job's own."""

    slurm: Sandbox
    folder: Path
    waiting: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    @classmethod
    def submit(
        cls, slurm: Sandbox, folder: Path, *words: str, env: Mapping[str, str] | None = None
    ) -> Job:
        """sbatch --wait WORDS… in the project's folder; its log and rows go to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        told = {"PYTHON": sys.executable, "OUT": str(folder / "out"), **(env or {})}
        command = ("sbatch", "--wait", f"--chdir={ROOT}", f"--output={folder}/%x-%j.log")
        waiting = subprocess.Popen(
            [*command, *words],
            cwd=ROOT,
            env={**slurm.env, **told},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return cls(slurm, folder, waiting)

    @property
    def number(self) -> str:
        """Slurm's, once it is submitted."""
        if not self.said:
            assert self.waiting.stdout is not None
            self.said.append(self.waiting.stdout.readline())
        return self.said[0].split()[-1]

    @property
    def code(self) -> int:
        """When it is over."""
        rest, _ = self.waiting.communicate(timeout=WAIT_S)
        self.said.append(rest)
        return self.waiting.returncode

    @property
    def state(self) -> str:
        """Slurm's state of it; the code of a cancelled job may still be 0 when sbatch asks."""
        told = self.slurm.ask("scontrol", "--oneliner", "show", "job", self.number)
        return told.partition("JobState=")[2].split()[0]

    @property
    def log(self) -> str:
        """The job's output, of all its tasks."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows on disk."""
        paths = sorted(self.folder.glob("out/**/runs.jsonl"))
        return [flat(json.loads(line)) for path in paths for line in path.open()]

    def says(self, text: str) -> None:
        """Waits until the log holds a text."""
        wait_until(lambda: text in self.log, f"{text!r} in {self.log[-2000:]!r}", WAIT_S)

    @property
    def processes(self) -> list[int]:
        """Its processes that are alive."""
        return self.slurm.processes(self.number)

    def cancel(self) -> None:
        """scancel, as a user would."""
        self.slurm.ask("scancel", self.number)
