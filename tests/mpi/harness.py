"""Jobs under mpirun, in a session of their own that is ended whole, whatever happens.

`python -m mpi4py -m tests.mpi.harness FOLDER…` makes runs in one world, one after the other: the
flags of FOLDER/flags.json; rank 0 writes FOLDER/told.json, [exit code, stdout, stderr]. A run that
raises ends the job.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.row import flat
from tests.needs import needs
from tests.scripts import ROOT, spawn, until

DEADLINE_S = 120.0  # of a job; an idle machine needs two seconds

# mpirun as launch/local.sh starts it, without the dry run that comes first there.
DIRECT = '. launch/env.sh; np=$1; shift; exec $MPIRUN -n "$np" "$PYTHON" -m mpi4py -m "$@"'
ALWAYS = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}  # the GPU has tests of its own
# A launcher's variables of this process, if pytest itself runs under one.
_LAUNCHERS = ("OMPI_COMM", "PMIX_", "PMI_", "PRTE_", "SLURM_")


def mpirun_missing() -> bool:
    beside = str(Path(sys.executable).parent)
    path = f"{os.environ.get('PATH', '')}:{beside}"
    return shutil.which(os.environ.get("MPIRUN", "mpirun").split()[0], path=path) is None


needs_mpi = [pytest.mark.mpi, needs("an mpirun", not mpirun_missing())]


@dataclass(frozen=True)
class Job:
    """Exit code, output and files of a finished job."""

    code: int
    out: str
    err: str
    folder: Path

    @cached_property
    def row(self) -> dict[str, Any]:
        """The last line on stdout."""
        assert self.code == 0, self.err[-2000:]
        return flat(json.loads(self.out.splitlines()[-1]))

    @property
    def lines(self) -> list[str]:
        """The lines of mpissd itself on stderr."""
        return [line for line in self.err.splitlines() if line.startswith("mpissd")]

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        with np.load(self.folder / "rounds" / f"{self.row['run_id']}.npz") as held:
            return dict(held)

    @property
    def saved(self) -> list[dict[str, Any]]:
        """The rows in runs.jsonl."""
        return [flat(json.loads(line)) for line in (self.folder / "runs.jsonl").open()]


class Started:
    """A job that runs; leaving the context, or the deadline, ends every process of its session."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
        self._tag = f"MPISSD_TEST_JOB={uuid4().hex}"
        name, _, value = self._tag.partition("=")
        self.process = spawn(*command, env={**kept, **ALWAYS, **(env or {}), name: value})
        self.late = False
        self._deadline = threading.Timer(deadline_s, self._end_late)
        self._deadline.daemon = True
        self._deadline.start()

    def _end_late(self) -> None:
        self.late = True
        self._end()

    def _end(self) -> None:
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self._deadline.cancel()
        self._end()
        self.process.wait(30)
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()

    def alive(self) -> list[int]:
        """Processes of the job (mpirun, ranks and wardens) that have not ended: all of its
        session, and all that inherited its tag."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
                tagged = self._tag.encode() in (path.parent / "environ").read_bytes()
            except OSError:
                continue
            if (int(session) == self.process.pid or tagged) and state not in "ZX":
                found.append(int(path.parent.name))
        return found

    def is_gone(self) -> bool:
        """Whether no process is left of a job that ended, ten seconds later at the latest."""
        with suppress(AssertionError):
            until(lambda: not self.alive(), 10)
        return not self.alive()

    def rank(self, rank: int) -> int:
        """The process of a rank, once it runs mpissd."""
        wanted = {f"{name}={rank}".encode() for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")}
        found: list[int] = []

        def is_there() -> bool:
            for pid in self.alive():
                with suppress(OSError):
                    told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    found.extend([pid] if wanted & set(told) else [])
            return bool(found)

        until(is_there, DEADLINE_S, f"rank {rank}")
        return found[0]

    def read_until(self, text: str) -> None:
        """Reads stderr up to `text`."""
        said = ""
        while text not in said:
            found = self.process.stderr.read(1)
            assert found, f"{text!r} was never said: {said!r}, {self.finish()}"
            said += found

    def finish(self) -> tuple[int, str, str]:
        """(code, stdout, stderr) when it is over; fails if the deadline ended it."""
        out, err = self.process.communicate()
        assert not self.late, f"{self.process.args!r} had to be ended: {out[-500:]}{err[-2000:]}"
        return self.process.returncode, out, err


def start(np_: int, *arguments: str, env: Mapping[str, str] | None = None) -> Started:
    """mpirun -np NP python -m mpi4py -m ARGUMENTS…"""
    return Started(["bash", "-c", DIRECT, "mpirun", str(np_), *arguments], env)


def ended(started: Started, folder: Path = ROOT) -> Job:
    """The job, finished; fails if a process of it is left."""
    with started as job:
        found = Job(*job.finish(), folder)
        assert job.is_gone(), "ranks outlive their job"
    return found


def launch(
    np_: int, *flags: str, folder: Path, direct: bool = False, env: Mapping[str, str] | None = None
) -> Job:
    """`mpissd run` on NP ranks, by launch/local.sh or (direct) by mpirun itself."""
    told = [*flags, f"--out={folder}"]
    if direct:
        return ended(start(np_, "mpissd", "run", *told, env=env), folder)
    return ended(Started(["launch/local.sh", str(np_), *told], env), folder)


def shim(
    folder: Path, code: str, rank: int | None = None, name: str = "sitecustomize"
) -> dict[str, str]:
    """PYTHONPATH with a module in front of the others that runs `code`; rank: on this one only."""
    folder.mkdir(exist_ok=True)
    own = "os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK'))"
    when = "" if rank is None else f"if {own} == '{rank}':\n    "
    (folder / f"{name}.py").write_text(f"import os, socket, sys, time\n{when}{code}\n")
    return {"PYTHONPATH": str(folder)}


class Together:
    """Runs by name: (ranks, flags). Runs on as many ranks are one job, which starts when the
    first of them is asked for: starting MPI and Python takes longer than a short run.
    """

    def __init__(self, runs: Mapping[str, tuple[int, Sequence[str]]], folder: Path) -> None:
        self._runs, self._folder = runs, folder
        self._done: dict[str, Job] = {}

    def __getitem__(self, name: str) -> Job:
        if name not in self._done:
            np_ = self._runs[name][0]
            alike = {other: flags for other, (n, flags) in self._runs.items() if n == np_}
            self._done |= self._run(np_, alike)
        return self._done[name]

    def _run(self, np_: int, runs: Mapping[str, Sequence[str]]) -> dict[str, Job]:
        folders = {name: self._folder / f"{np_}-{n}" for n, name in enumerate(runs)}
        for name, folder in folders.items():
            folder.mkdir()
            flags = [*runs[name], f"--out={folder / 'out'}"]
            (folder / "flags.json").write_text(json.dumps(flags))
        done = ended(start(np_, "tests.mpi.harness", *map(str, folders.values())))
        assert done.code == 0, done.err[-2000:]
        return {
            name: Job(*json.loads((folder / "told.json").read_text()), folder / "out")
            for name, folder in folders.items()
        }


if __name__ == "__main__":
    import io
    from contextlib import redirect_stderr, redirect_stdout

    from mpi4py import MPI

    from mpissd.cli.arguments import parse
    from mpissd.lab.measure.run import execute

    for name in sys.argv[1:]:
        command = parse(["run", *json.loads(Path(name, "flags.json").read_text())])
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = execute(command.config)
        if MPI.COMM_WORLD.rank == 0:
            told = [code, out.getvalue(), err.getvalue()]
            Path(name, "told.json").write_text(json.dumps(told))
