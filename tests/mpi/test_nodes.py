"""Two nodes: nothing assumes that all ranks share a host."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mpi.harness import DIRECT, Job, Started, launch, needs_mpi
from tests.mpi.nodes import Hosts, two_hosts, why_not
from tests.needs import needs
from tests.serve.rig import until

LACK = why_not()
pytestmark = [*needs_mpi, needs(LACK or "", not LACK)]

SHAPES = [
    "--target=gen:layers=2,hidden=128,ffn=256,heads=4,vocab=512",
    "--draft=gen:layers=1,hidden=64,ffn=128,heads=2,vocab=512",
]
JOB = [*SHAPES, "--backend=numpy", "--mode=ssd", "--rounds=25", "--seed=5", "--batch_size=2"]
NULL = ["--pair=toy", "--backend=emulated", "--device=null"]
SAME = "outcome_digest token_digest num_tokens accept_histogram hit_rate rank_digests tp".split()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


def started(hosts: Hosts, np_: int, *arguments: str) -> Started:
    """mpirun on the first host, ranks on both."""
    words = " ".join(f"'{word}'" for word in ("bash", "-c", DIRECT, "mpirun", str(np_), *arguments))
    return Started(hosts.command(words), hosts.env)


def test_a_job_on_two_hosts_decides_what_it_does_on_one(hosts: Hosts, tmp_path: Path) -> None:
    alone = launch(3, *JOB, folder=tmp_path / "one").row
    with started(hosts, 3, "mpissd", "run", *JOB, f"--out={tmp_path / 'two'}") as job:
        row = Job(*job.finish(), tmp_path / "two").row
    assert {key: row[key] for key in SAME} == {key: alone[key] for key in SAME}
    assert row["provenance"]["hosts"] == hosts.names and len(alone["provenance"]["hosts"]) == 1
    by_rank = [device["host"] for device in row["provenance"]["ranks"]]
    assert by_rank == [hosts.names[rank % 2] for rank in range(3)]


def test_a_rank_that_dies_ends_the_ranks_of_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """The host of the culprit names it, here the host of mpirun itself."""
    flags = [*NULL, "--mode=ssd", "--rounds=100000000", "--progress=on", f"--out={tmp_path}"]
    with started(hosts, 3, "mpissd", "run", *flags) as job:
        victim = rank_on(hosts, 2)
        job.read_until("round/s")
        os.kill(victim, signal.SIGKILL)
        code, _, err = job.finish()
        until(lambda: not hosts.alive())
    assert code != 0, err[-1000:]
    named = [line for line in err.splitlines() if "mpissd: rank " in line]
    culprit = f"pid {victim}) was killed by signal 9 (SIGKILL) in "
    assert any("mpissd: rank 2 (" in line and culprit in line for line in named), err[-1000:]
    assert all(culprit in line or "of another host" in line for line in named), named


def rank_on(hosts: Hosts, rank: int) -> int:
    """The process of a rank, on whichever host."""
    wanted = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for pid in hosts.alive():
            try:
                told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                name = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if wanted in told and b"mpissd" in name:
                return pid
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} never started")
