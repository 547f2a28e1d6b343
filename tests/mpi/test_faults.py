"""A rank that dies, stops or raises ends the job with a code of its own, and no rank is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mpi.harness import Started, launch, needs_mpi, start

pytestmark = needs_mpi

NULL = "--backend=emulated --device=null --pair=toy --batch_size=1".split()


@contextmanager
def endless(np_: int, tmp_path: Path, *flags: str) -> Iterator[Started]:
    """A job in the midst of its measured rounds."""
    told = [*flags, "--rounds=100000000", "--progress=on", f"--out={tmp_path / 'out'}"]
    with start(np_, "mpissd", "run", *told) as job:
        job.read_until("round/s")
        yield job


def all_gone(job: Started) -> bool:
    """Within ten seconds of the job's end."""
    end = time.monotonic() + 10
    while job.alive() and time.monotonic() < end:
        time.sleep(0.05)
    return not job.alive()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_rank_takes_the_job_down(rank: int, tmp_path: Path) -> None:
    with endless(3, tmp_path, *NULL) as job:
        os.kill(job.rank(rank), signal.SIGKILL)
        code, out, _ = job.finish()
        assert code not in (0, 2, 3) and "schema" not in out
        assert all_gone(job)
    assert not (tmp_path / "out" / "runs.jsonl").exists()


def test_a_rank_that_stops_is_a_fault_after_the_deadline(tmp_path: Path) -> None:
    with endless(2, tmp_path, *NULL, "--deadline_s=1") as job:
        os.kill(job.rank(1), signal.SIGSTOP)
        code, _, err = job.finish()
        assert code == 5
        assert "mpissd: rank 0: draft: speculation: nothing for 1." in err
        assert all_gone(job)
    assert not (tmp_path / "out" / "runs.jsonl").exists()


def test_a_follower_that_stops_is_one_too(tmp_path: Path) -> None:
    """The others find it in the all-reduce."""
    with endless(2, tmp_path, "--backend=numpy", "--mode=ar", "--deadline_s=1") as job:
        os.kill(job.rank(1), signal.SIGSTOP)
        code, _, err = job.finish()
        assert code == 5 and "mpissd: rank 0: all-reduce: nothing for 1." in err
        assert all_gone(job)


def test_an_exception_on_the_lead_ends_every_rank(tmp_path: Path) -> None:
    """The rounds are measured, and then the folder is gone."""
    sabotage = tmp_path / "sabotage"
    sabotage.mkdir()
    (sabotage / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '0':\n"
        "    os.rename = os.replace = None\n"
    )
    env = {"PYTHONPATH": str(sabotage)}
    done = launch(3, *NULL, "--rounds=5", folder=tmp_path / "out", direct=True, env=env)
    assert done.code not in (0, 2, 3)
    assert "Traceback" in done.err and not (tmp_path / "out" / "runs.jsonl").exists()
