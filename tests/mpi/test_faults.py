"""A rank that dies, stops or raises ends the job, is named once, and nothing is left of the job."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mpi.harness import Started, launch, needs_mpi, start
from tests.mpi.struck import Strike, faults_of

pytestmark = needs_mpi

NULL = "--backend=emulated --device=null --pair=toy --batch_size=1".split()
LEAD, FOLLOWER, DRAFT = 0, 1, 2
STRIKES = [
    Strike(LEAD, "kill", "join", 1),
    Strike(LEAD, "raise", "verify", 700),
    Strike(FOLLOWER, "exit", "warm-up", 1),
    Strike(FOLLOWER, "hang", "verify", 300),
    Strike(DRAFT, "stop", "growth", 300),
]


def test_the_lead_of_a_second_group_is_named() -> None:
    assert faults_of(Strike(1, "kill", "verify", 300), "--groups=2") == []


@pytest.mark.parametrize("strike", STRIKES, ids=str)
def test_a_struck_rank_is_named_and_the_job_is_gone(strike: Strike) -> None:
    assert faults_of(strike) == []


@contextmanager
def endless(np_: int, tmp_path: Path, *flags: str, **env: str) -> Iterator[Started]:
    """A job in the midst of its measured rounds."""
    told = [*flags, "--rounds=100000000", "--progress=on", f"--out={tmp_path / 'out'}"]
    with start(np_, "mpissd", "run", *told, env=env) as job:
        job.read_until(" rounds, ")
        yield job


def test_who_ends_the_launcher_reads_one_line(tmp_path: Path) -> None:
    """Ctrl-C goes to the terminal's foreground group."""
    with endless(3, tmp_path, *NULL) as job:
        os.killpg(job.process.pid, signal.SIGINT)
        code, out, err = job.finish()
        assert code != 0 and "schema" not in out
        assert job.is_gone()
    said = err.splitlines()[-1]
    assert "mpissd: ended by signal " in err and err.count("mpissd:") == 1, said
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "runs.jsonl").exists()


def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    """All ranks pause for longer than the deadline: that is job control, no fault."""
    with endless(2, tmp_path, *NULL, "--deadline_s=1") as job:
        ranks = [job.rank(0), job.rank(1)]
        for signum, pause_s in ((signal.SIGSTOP, 2.0), (signal.SIGCONT, 1.5)):
            for pid in ranks:
                os.kill(pid, signum)
            time.sleep(pause_s)
        assert set(ranks) <= set(job.alive())


def sabotaged(tmp_path: Path) -> dict[str, str]:
    """The lead cannot name its files."""
    (tmp_path / "sabotage").mkdir()
    (tmp_path / "sabotage" / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '0':\n"
        "    os.rename = os.link = None\n"
    )
    return {"PYTHONPATH": str(tmp_path / "sabotage")}


def test_an_exception_on_the_lead_ends_every_rank(tmp_path: Path) -> None:
    """The rounds are measured, and then the row can't be written."""
    env = sabotaged(tmp_path)
    done = launch(3, *NULL, "--rounds=5", folder=tmp_path / "out", direct=True, env=env)
    assert done.code not in (0, 2, 3)
    assert done.err.count("Traceback") == 1 and len(done.lines) == 1
    assert (
        done.lines[0].startswith("mpissd: rank 0 (") and "failed in gather: Type" in done.lines[0]
    )
    assert not (tmp_path / "out" / "runs.jsonl").exists()
    assert not list((tmp_path / "out" / "rounds").iterdir())
