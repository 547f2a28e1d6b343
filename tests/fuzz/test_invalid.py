"""Random command lines with a mistake: exit 2, one line that names it, before MPI starts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpissd.__main__ import main
from tests.fuzz.configs import arguments, invalid
from tests.mpi.harness import Started, needs_mpi

ROOT = Path(__file__).resolve().parents[2]
WORLD = 3


def refusals(first: int, count: int) -> None:
    """Prints what was not refused as it should be, and whether MPI was ever started."""
    wrong = []
    for seed in range(first, first + count):
        broken = invalid(seed, WORLD)
        said, out = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
                code: object = main(
                    [*arguments(broken.flags), "--dry_run", f"--world_size={WORLD}"]
                )
        except BaseException as error:  # noqa: BLE001  (a traceback is the finding)
            code = repr(error)
        lines = said.getvalue().splitlines()
        one_line = len(lines) == 1 and lines[0].startswith("mpissd: ") and not out.getvalue()
        if code != 2 or not one_line or broken.named not in lines[0]:
            wrong.append([seed, broken.flags, broken.named, code, lines[-3:]])
    print(json.dumps({"wrong": wrong, "mpi": "mpi4py.MPI" in sys.modules}))


@pytest.mark.parametrize(
    ("first", "count"), [(0, 120), pytest.param(0, 500, marks=pytest.mark.long)]
)
def test_every_mistake_is_one_line_and_exit_code_2(first: int, count: int) -> None:
    program = f"from tests.fuzz.test_invalid import refusals; refusals({first}, {count})"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=kept,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-800:]
    found = json.loads(done.stdout)
    assert not found["wrong"], "\n".join(map(repr, found["wrong"][:5]))
    assert not found["mpi"], "MPI was started for a command line that is refused"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_process_of_its_own_says_the_same(seed: int, tmp_path: Path) -> None:
    broken = invalid(seed, WORLD)
    done = subprocess.run(
        [sys.executable, "-m", "mpissd", *arguments(broken.flags), f"--out={tmp_path / 'out'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == "", done
    assert len(done.stderr.splitlines()) == 1 and broken.named in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


class TestUnderMpirun:
    pytestmark = needs_mpi

    def test_no_rank_is_started(self, tmp_path: Path) -> None:
        """The launch script asks first; mpirun never runs."""
        flags = arguments(invalid(4, WORLD).flags)[1:]
        env = {"MPIRUN": f"{tmp_path / 'mpirun'}"}
        (tmp_path / "mpirun").write_text("#!/bin/sh\ntouch $0.ran\n")
        (tmp_path / "mpirun").chmod(0o755)
        with Started(["launch/local.sh", str(WORLD), *flags], env) as job:
            code, out, err = job.finish()
        assert (code, out) == (2, "") and len(err.splitlines()) == 1, err
        assert not (tmp_path / "mpirun.ran").exists()


def test_breakers_break_only_what_they_say() -> None:
    """A line is refused for what is named: the rest of it is valid."""
    names = {invalid(seed, WORLD).named for seed in range(300)}
    assert len(names) > 80
    assert main.__module__ == "mpissd.__main__"
