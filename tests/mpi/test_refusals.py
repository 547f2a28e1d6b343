"""What is wrong is said in one line, with exit code 2, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.harness import Started, launch, needs_mpi, start

pytestmark = needs_mpi

EMULATED = ("--backend=emulated", "--device=null")
BAD: list[tuple[int, tuple[str, ...], str]] = [
    (2, (*EMULATED, "--mod=ssd"), "unknown flag '--mod': did you mean '--mode'?"),
    (2, (*EMULATED, "--lookahead=x"), "lookahead=x: allowed: a whole number"),
    (2, (*EMULATED, "--fan_out=list:1,2,3"), "has 3 values: allowed: lookahead + 1 = 5"),
    (1, EMULATED, "world of 1 rank is too small for num_drafts=1"),
    (4, (*EMULATED, "--pair=toy"), "num_heads=8 is not divisible by tp=3"),
    (4, ("--backend=numpy",), "tp=3: no built-in pair divides by 3 (tried toy)"),
    (
        2,
        ("--backend=emulated", "--device=v100-32", "--pair=70b/1b"),
        "needs 136.9 GB a rank and 1.1 GB to spare; the device has 32.0 GB",
    ),
    (2, ("--device=h100",), "device=h100 with backend=auto: allowed: backend=emulated"),
    (3, ("--backend=emulated", "--device=v100-32", "--pair=70b/8b"), "needs 68.5 GB a rank"),
]


@pytest.mark.parametrize(("np_", "flags", "message"), BAD)
def test_the_launch_script_says_it_once(
    np_: int, flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = launch(np_, *flags, folder=tmp_path / "out")
    assert done.code == 2 and done.out == ""
    assert message in done.err and done.err.count("\n") == 1
    assert done.err.startswith("mpissd: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("np_", "flags", "message"), [BAD[0], BAD[3], BAD[4], BAD[6]])
def test_every_rank_sees_it_and_one_says_it(
    np_: int, flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = launch(np_, *flags, folder=tmp_path / "out", direct=True)
    assert done.code == 2 and done.out == ""
    assert len(done.lines) == 1 and message in done.lines[0]
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


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("here")
    done = launch(2, *EMULATED, folder=tmp_path / "out")
    assert done.code == 2 and "is not a folder" in done.err and done.err.count("\n") == 1
    assert (tmp_path / "out").read_text() == "here"


@pytest.mark.parametrize("np_", [1, 3])
def test_a_folder_that_only_the_lead_finds_unwritable(np_: int, tmp_path: Path) -> None:
    """Seen when MPI runs already: every rank leaves in good order."""
    (tmp_path / "rounds").write_text("a file where a folder has to be")
    mode = "ar" if np_ == 1 else "ssd"
    done = launch(np_, *EMULATED, f"--mode={mode}", folder=tmp_path)
    assert done.code == 2 and done.out == ""
    assert len(done.lines) == 1 and "cannot be written" in done.lines[0]
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["rounds"]


@pytest.mark.parametrize("backend", ["numpy", "auto"])
def test_the_shards_of_the_default_pair(backend: str, tmp_path: Path) -> None:
    """T = 3 divides no default pair; what auto is, is known when MPI runs."""
    done = launch(4, f"--backend={backend}", folder=tmp_path / "out", direct=True)
    assert done.code == 2
    assert len(done.lines) == 1 and "tp=3: no built-in pair divides by 3" in done.lines[0]


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_a_launcher_that_is_not_this_mpi_s(rank: str, lines: int, tmp_path: Path) -> None:
    """Two processes were started, each of which believes to be alone."""
    env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank}
    flags = (*EMULATED, "--mode=ar", f"--out={tmp_path / 'out'}")
    program = '. launch/env.sh; exec "$PYTHON" -m mpi4py -m mpissd run "$@"'
    with Started(["bash", "-c", program, "python", *flags], env) as job:
        code, out, err = job.finish()
    assert (code, out) == (2, "")
    said = [line for line in err.splitlines() if line.startswith("mpissd")]
    assert len(said) == lines
    assert all("it started 2 processes, but MPI sees 1" in line for line in said)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    with start(2, "mpissd", "run", *EMULATED, "--dry_run", f"--out={tmp_path / 'out'}") as job:
        assert job.finish() == (0, "", "")
    assert list(tmp_path.iterdir()) == []
