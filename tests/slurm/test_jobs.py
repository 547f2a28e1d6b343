"""Launch scripts under a real Slurm, by mpirun and srun: rows, exit codes, refusals, signals, GPUs.

All jobs of the module are in the queue before the first is waited for.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.row import flat
from tests.mpi.harness import needs_mpi
from tests.scripts import ROOT, call, spawn, until
from tests.slurm.sandbox import Sandbox

pytestmark = [*needs_mpi, pytest.mark.slurm]

WAIT_S = 300.0  # of a job; a minute on two idle cores
# Nothing lasts, nothing is computed.
NULL = {"BACKEND": "emulated", "DEVICE": "null", "ROUNDS": "5"}
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
        command = ("sbatch", "--wait", f"--chdir={ROOT}", f"--output={folder}/%x-%j.log", *words)
        options = {"env": {**slurm.env, **told}, "stderr": subprocess.STDOUT}
        return cls(slurm, folder, spawn(*command, **options))

    @property
    def number(self) -> str:
        """Slurm's, once it is submitted."""
        if not self.said:
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
        until(lambda: text in self.log, WAIT_S, f"{text!r} in {self.log[-2000:]!r}")

    @property
    def processes(self) -> list[int]:
        """Its processes that are alive."""
        return self.slurm.processes(self.number)

    def cancel(self) -> None:
        """scancel, as a user would."""
        self.slurm.ask("scancel", self.number)


SCRIPT = "bridges2_shared"
# (mode, T, D, target) of each row, in the order in which they run.
ROWS = [(mode, 2, int(mode != "ar"), "llama-3.1-8b") for mode in ("ar", "sd", "ssd")]
MINE = ("--seed=7", "--warmup_rounds=1")  # further flags
# A short run, one without end, and one that never starts.
THREE = f"""#!/usr/bin/env bash
. launch/job.sh || exit 2
run 2 --mode=sd --backend=emulated --device=null --pair=toy --rounds=5
run 2 {" ".join(ENDLESS)}
run 2 --backend=emulated --device=null --pair=toy --rounds=5
"""


class Queue:
    """Submits each job in a folder of its own."""

    def __init__(self, slurm: Sandbox, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        three = self.script("three.sh", THREE)
        self.warned = self.submit("warned", "--ntasks=2", "--time=1", "--signal=B:TERM@55", three)
        self.cancelled = self.submit("cancelled", "--ntasks=2", three, LAUNCHER="srun")
        script = f"launch/{SCRIPT}.sh"
        self.ran = {
            "mpirun": self.submit("mpirun", script, *MINE, **NULL),
            "srun": self.submit(
                "srun", "--gpus-per-task=v100-32:1", script, *MINE, LAUNCHER="srun", **NULL
            ),
        }

    def submit(self, name: str, *words: str, **env: str) -> Job:
        return Job.submit(self.slurm, self.folder / name, *words, env=env)

    def script(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return str(path)


@pytest.fixture(scope="module")
def queue(slurm: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Queue:
    return Queue(slurm, tmp_path_factory.mktemp("slurm"))


def test_scancel_leaves_the_rows_and_nothing_else(queue: Queue) -> None:
    job = queue.cancelled
    job.says("--device=h100")
    until(lambda: len(job.processes) >= 4, 30, "mpirun and its ranks")
    job.cancel()
    until(lambda: not job.processes, 10, job.log[-2000:])
    until(lambda: job.state == "CANCELLED", 30, "its state")
    assert [row["mode"] for row in job.rows] == ["sd"]
    assert job.log.count("job: run on") == 2


def test_the_time_limit_leaves_the_rows_and_nothing_else(queue: Queue) -> None:
    job = queue.warned
    assert job.code == 128 + signal.SIGTERM
    until(lambda: not job.processes, 10)
    assert [row["mode"] for row in job.rows] == ["sd"]
    assert f"job: ended by a signal; the rows so far are in {job.folder}/out" in job.log


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_a_script_runs_to_its_rows(queue: Queue, launcher: str) -> None:
    job = queue.ran[launcher]
    assert job.code == 0, job.log[-2000:]
    keys = ("mode", "tp", "num_drafts", "target")
    assert [tuple(row[key] for key in keys) for row in job.rows] == ROWS
    assert {(row["backend"], row["seed"]) for row in job.rows} == {("emulated", 7)}
    printed = [flat(json.loads(line)) for line in job.log.splitlines() if line.startswith("{")]
    assert printed == job.rows  # each run's JSON line


# How ranks start, salloc's option, srun's --gpu-bind or --mpi, and the GPUs that they open or what
# the refusal says.
BOUND = [
    ("mpirun", "--gpus=3", "", "abc"),
    ("mpirun", "--gpus-per-task=1", "", "abc"),
    ("srun", "--gpus=3", "", "abc"),
    ("srun", "--gpus-per-task=1", "", "abc"),
    ("srun", "--gpus=3", "single:1", "abc"),
    ("srun", "--gpus=3", "map_gpu:2,0,1", "abc"),
    ("srun", "--gpus=3", "map_gpu:1", "share GPU-"),
    ("srun", "--gpus=3", "none", "MPI sees 1; srun --mpi=pmix for Open MPI"),
]


@pytest.mark.parametrize(("launcher", "gpus", "way", "told"), BOUND)
def test_ranks_open_the_gpus_that_slurm_binds(
    slurm: Sandbox, launcher: str, gpus: str, way: str, told: str
) -> None:
    """CuPy is a fake that sees GPUs a to d through Slurm's masks."""
    env = {"PYTHON": sys.executable, "FAKE_GPUS": "a b c d", "PYTHONPATH": "tests/fakes"}
    env |= {"LAUNCHER": launcher}
    if way:
        env["SLURM_GPU_BIND" if ":" in way else "SLURM_MPI_TYPE"] = way
    script = '. launch/env.sh; exec $MPIRUN -n 3 "$PYTHON" -m mpi4py -m mpissd run --backend=cupy'
    words = ["salloc", "--ntasks=3", gpus, "bash", "-c", f"{script} --pair=toy"]
    done = call(ROOT, *words, **{**slurm.env, **env})
    found = "".join(sorted(re.findall("^opened .*(.)$", done.stdout, re.M)))
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpissd")]
    assert done.returncode == 2 and told in (found or line), done.stdout + done.stderr


def test_an_array_goes_on_where_scancel_ended_it(slurm: Sandbox, tmp_path: Path) -> None:
    """No row is lost, none is measured twice."""
    grid = "mode=sd,ssd; lookahead=2..4; alpha=.6,.8"
    flags = ("--backend=emulated", "--device=h100", "--pair=8b/1b", "--rounds=150", "--repeats=1")
    words = ("--array=0-1", "--ntasks=2", "launch/array.sh", f"--grid={grid}", *flags)
    job = Job.submit(slurm, tmp_path, *words)
    until(lambda: len(job.rows) >= 3, WAIT_S, "rows")
    job.cancel()
    assert job.code != 0
    before = job.rows
    assert 3 <= len(before) < 12
    again = Job.submit(slurm, tmp_path, *words)
    assert again.code == 0, again.log[-2000:]
    tasks = [row["provenance"]["sweep"]["task"] for row in again.rows]
    assert len(tasks) == len(set(tasks)) == 12
    assert again.rows[: len(before)] == before


def test_make_submit_prints_the_line_and_runs_it(slurm: Sandbox, tmp_path: Path) -> None:
    words = f"MODE=ssd TP=2 PARTITION=GPU-shared TIME=0:05:00 OUT={tmp_path}/out ROUNDS=5"
    words += f" BACKEND=emulated DEVICE=null PAIR=toy PYTHON={sys.executable}"
    line = (
        "sbatch --time=0:05:00 --partition=GPU-shared --ntasks=3 --cpus-per-task=5 "
        f"--gpus=v100-32:3 --export=ALL,PYTHON={sys.executable} --wait --output={tmp_path}/%j.log "
        "launch/slurm.sh --mode=ssd --pair=toy --backend=emulated --device=null --rounds=5 "
        f"--out={tmp_path}/out"
    )
    env = {**slurm.env, "TP": "7", "ROUNDS": "7", "PAIR": "none"}  # none is meant for this job
    log = f"SBATCH=--wait --output={tmp_path}/%j.log"
    done = call(ROOT, "make", "submit", *words.split(), log, **env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == line
    (row,) = (flat(json.loads(text)) for text in (tmp_path / "out" / "runs.jsonl").open())
    asked = ("mode", "tp", "num_drafts", "target", "num_rounds")
    assert [row[key] for key in asked] == ["ssd", 2, 1, "toy-target", 5]
