"""The doctor with faults as they happen: shims on PYTHONPATH, other programs as mpirun."""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.mpi.harness import Started, needs_mpi, shim

pytestmark = needs_mpi

TOY = ("--pair=toy", "--backend=numpy")
FAST = ("--backend=emulated", "--device=null", "--pair=toy")


def doctor(*flags: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Returns the exit code and the table."""
    with Started(("launch/doctor.sh", *flags), env) as started:
        return examined(started)


def examined(started: Started) -> tuple[int, str]:
    code, out, err = started.finish()
    assert "Traceback" not in out + err and err == "", err
    return code, out


def line(table: str, what: str, verdict: str) -> str:
    """The line about `what`, and its fix, which is printed unless the check is ok."""
    found = re.search(rf"^{verdict} +{re.escape(what)}  .*\n( +→.*\n)?", table, re.M)
    assert found, f"no {verdict} {what}:\n{table}"
    assert (found[1] is None) == (verdict == "ok")
    return found[0]


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A doctor one of whose ranks hangs: it waits for 12 s, while other tests run."""
    env = shim(tmp_path_factory.mktemp("hung"), "socket.gethostname = lambda: time.sleep(600)", 1)
    with Started(("launch/doctor.sh", *FAST, "--deadline_s=2"), env) as started:
        yield started


def test_where_the_doctor_says_ok_a_run_works(hung: Started, tmp_path: Path) -> None:
    code, table = doctor("--tp=2", f"--out={tmp_path}/a/b")
    assert code == 0 and table.splitlines()[-1].startswith("doctor: this run works")
    assert list(tmp_path.iterdir()) == []  # the folder that it tried is gone again
    line(table, "launcher", "ok")
    line(table, "rank 2", "ok")
    assert "numpy on" in line(table, "backend", "ok")
    assert "toy-target / toy-draft" in line(table, "pair", "ok")
    words = ["launch/local.sh", "3", f"--out={tmp_path}/a/b", "--rounds=3", "--deadline_s=20"]
    with Started(words) as started:
        assert started.finish()[0] == 0


@pytest.mark.parametrize(
    ("flags", "env", "what", "fix"),
    [
        ((), {"MPIRUN": "/nowhere/mpirun"}, "mpirun", "pip install"),
        ((), {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, "MPI library", "MPI4PY_LIBMPI"),
        (("--out=setup.cfg/x",), {}, "run", "troubleshooting"),
    ],
)
def test_what_is_wrong_before_mpi_starts(
    flags: tuple[str, ...], env: dict[str, str], what: str, fix: str
) -> None:
    code, table = doctor(*flags, *TOY, env=env)
    assert code == 2 and fix in line(table, what, "BAD")
    assert table.splitlines()[-1].startswith(f"doctor: this run fails: {what}")


def test_a_broken_cupy(tmp_path: Path) -> None:
    env = shim(tmp_path, "raise ImportError('libcudart.so.13: cannot open it')", name="cupy")
    code, table = doctor("--pair=toy", env=env)
    assert code == 2 and "libcudart.so.13" in line(table, "session", "BAD"), table


def test_a_rank_that_hangs(hung: Started) -> None:
    code, table = examined(hung)
    assert code == 2 and "no answer within 12 s" in line(table, "session", "BAD")


def test_under_a_launcher_it_is_refused() -> None:
    words = [sys.executable, "-m", "mpissd", "doctor", *FAST]
    with Started(words, {"PMI_SIZE": "1"}) as started:
        code, _, err = started.finish()
    assert code == 2 and "doctor under a launcher" in err
