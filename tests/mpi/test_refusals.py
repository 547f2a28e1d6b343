"""A refusal is one line, with exit code 2, and writes nothing."""

from pathlib import Path

import pytest

from tests.mpi.harness import Job, Started, ended, launch, needs_mpi, start

pytestmark = needs_mpi

EMULATED = ("--backend=emulated", "--device=null")


def test_it_is_said_once_and_nothing_is_written(tmp_path: Path) -> None:
    flags = "--backend=emulated", "--device=v100-32", "--pair=70b/1b"
    done = launch(2, *flags, folder=tmp_path / "out")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "needs 136.9 GB a rank and 1.1 GB to spare; the device has 32.0 GB" in done.lines[0]
    assert list(tmp_path.iterdir()) == []


def test_the_rank_that_speaks_is_heard_where_it_is_the_last(tmp_path: Path) -> None:
    """mpirun ends every rank when one has left with an error; rank 0 imports slowly here."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '0':\n"
        "    time.sleep(1)\n"
    )
    flags = (*EMULATED, "--mode=sdd")
    env = {"PYTHONPATH": str(slow)}
    done = launch(3, *flags, folder=tmp_path / "out", direct=True, env=env)
    assert done.code == 2
    assert len(done.lines) == 1 and "unknown mode 'sdd'" in done.lines[0]


def test_a_folder_that_only_the_lead_finds_unwritable(tmp_path: Path) -> None:
    """Detected when MPI runs already: every rank exits cleanly."""
    (tmp_path / "rounds").write_text("a file where a folder has to be")
    done = launch(3, *EMULATED, folder=tmp_path)
    assert done.code == 2 and done.out == ""
    assert len(done.lines) == 1 and "cannot be written" in done.lines[0]
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["rounds"]


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_a_launcher_that_is_not_this_mpi_s(rank: str, lines: int, tmp_path: Path) -> None:
    """Two processes were started, each of which believes to be the only one."""
    env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank}
    flags = (*EMULATED, "--mode=ar", f"--out={tmp_path / 'out'}")
    program = '. launch/env.sh; exec "$PYTHON" -m mpi4py -m mpissd run "$@"'
    with Started(["bash", "-c", program, "python", *flags], env) as job:
        done = Job(*job.finish(), tmp_path)
    assert (done.code, done.out, len(done.lines)) == (2, "", lines)
    assert all("it started 2 processes, but MPI sees 1" in line for line in done.lines)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    done = ended(start(2, "mpissd", "run", *EMULATED, "--dry_run", f"--out={tmp_path / 'out'}"))
    assert (done.code, done.out, done.err) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
