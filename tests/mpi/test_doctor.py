"""The doctor with faults as they happen: shims on PYTHONPATH, other programs as mpirun."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mpi.harness import Started, needs_mpi
from tests.needs import lack

pytestmark = needs_mpi

TOY = ("--pair=toy", "--backend=numpy")
FAST = ("--backend=emulated", "--device=null", "--pair=toy")
# As MPICH's mpirun starts processes: under Open MPI's library each believes to be the only one.
OTHER_MPIRUN = """#!/bin/bash
if [ "$1" = --version ]; then echo "HYDRA build details:"; echo "    Version: 4.2.1"; exit; fi
np=$2; shift 2
for ((rank = 0; rank < np; rank++)); do PMI_RANK=$rank PMI_SIZE=$np "$@" & done
code=0
for job in $(jobs -p); do wait $job || code=$?; done
exit $code
"""


@dataclass(frozen=True)
class Printed:
    """The exit code and the output of the doctor."""

    code: int
    out: str
    err: str

    def line(self, what: str, verdict: str) -> str:
        """The line about `what`, and its fix, which is printed unless the check is ok."""
        lines = self.out.splitlines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            if re.match(rf"{verdict} +{re.escape(what)}  ", line):
                assert ("→" in after) == (verdict != "ok")
                return f"{line}\n{after}"
        raise AssertionError(f"no {verdict} {what}:\n{self.out}{self.err}")


def call(*words: str, env: Mapping[str, str] | None = None) -> Printed:
    with Started(words, env) as started:
        done = Printed(*started.finish())
        assert "Traceback" not in done.out + done.err
        return done


def doctor(*flags: str, env: Mapping[str, str] | None = None) -> Printed:
    return call("launch/doctor.sh", *flags, env=env)


def run(np_: int, *flags: str, env: Mapping[str, str] | None = None) -> int:
    words = ["launch/local.sh", str(np_), *flags, "--rounds=3", "--deadline_s=20"]
    with Started(words, env) as started:
        return started.finish()[0]


def shim(tmp_path: Path, **modules: str) -> dict[str, str]:
    """PYTHONPATH with these modules in front of the real ones."""
    folder = tmp_path / "shim"
    for name, text in modules.items():
        path = folder / name / "__init__.py" if name in ("mpi4py", "cupy") else None
        path = path or folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"PYTHONPATH": str(folder)}


def program(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / "programs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_where_the_doctor_says_ok_a_run_works(tmp_path: Path) -> None:
    printed = doctor("--tp=2", f"--out={tmp_path}/a/b")
    assert printed.code == 0, printed.out + printed.err
    assert printed.out.splitlines()[-1].startswith("doctor: this run works")
    assert printed.out.count("doctor:") == 1 and printed.err == ""
    assert list(tmp_path.iterdir()) == []  # the folder that it tried is gone again
    printed.line("launcher", "ok")
    printed.line("rank 2", "ok")
    assert "numpy on" in printed.line("backend", "ok")
    assert "mpi: host arrays" in printed.line("all-reduce", "ok")
    assert "toy-target / toy-draft: the default here" in printed.line("pair", "ok")
    assert run(3, f"--out={tmp_path}/a/b") == 0


BEFORE_MPI: list[tuple[str, tuple[str, ...], dict[str, str], str, str]] = [
    # the fault, flags, environment, the line, a word of its fix
    ("no mpirun", TOY, {"MPIRUN": "/nowhere/mpirun"}, "mpirun", "pip install"),
    ("out below a file", ("--out=setup.cfg/x", *TOY), {}, "run", "OUT="),
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "env", "what", "fix"), [b[1:] for b in BEFORE_MPI], ids=[b[0] for b in BEFORE_MPI]
)
def test_what_is_wrong_before_mpi_starts(
    flags: tuple[str, ...], env: dict[str, str], what: str, fix: str, tmp_path: Path
) -> None:
    printed = doctor(*flags, env=env)
    assert printed.code == 2 and fix in printed.line(what, "BAD")
    assert printed.out.splitlines()[-1].startswith(f"doctor: this run fails: {what}")


def open_mpi() -> str:
    """The file of the Open MPI library that jobs load here, as the doctor names it."""
    found = re.search(r"Open MPI v\S+ (/\S+)", doctor(*FAST, "--mode=ar").out)
    return found[1] if found else lack("Open MPI's library")


def test_an_mpirun_of_another_mpi(tmp_path: Path) -> None:
    """The library is named: none lies next to this mpirun, and elsewhere any or none."""
    env = {
        "MPIRUN": program(tmp_path, "mpirun", OTHER_MPIRUN),
        "MPI4PY_LIBMPI": open_mpi(),
    }
    printed = doctor(*FAST, env=env)
    assert printed.code == 2
    assert "started 2 processes, but MPI sees 1 rank" in printed.line("launcher", "BAD")


def test_a_broken_cupy(tmp_path: Path) -> None:
    env = shim(tmp_path, cupy="raise ImportError('libcudart.so.13: cannot open it')")
    printed = doctor("--pair=toy", env=env)
    assert printed.code == 2 and "libcudart.so.13" in printed.line("CuPy", "BAD"), printed.out
    assert doctor(*TOY, "--mode=ar", env=env).code == 0  # CuPy is not needed


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    sleeps = (
        "import os, socket, time\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '1':\n"
        "    socket.gethostname = lambda: time.sleep(600)\n"
    )
    printed = doctor(*FAST, "--deadline_s=2", env=shim(tmp_path, sitecustomize=sleeps))
    assert printed.code == 2 and "no answer within 12 s" in printed.line("session", "BAD")


def test_under_a_launcher_it_is_refused() -> None:
    printed = call(sys.executable, "-m", "mpissd", "doctor", *FAST, env={"PMI_SIZE": "1"})
    assert printed.code == 2 and "doctor under a launcher" in printed.err
