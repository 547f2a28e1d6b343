"""Several nodes: nothing assumes that all ranks share a host."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.mpi.harness import DIRECT, Job, Started, launch, needs_mpi, start
from tests.mpi.nodes import Hosts, two_hosts, why_not
from tests.needs import needs
from tests.serve.rig import until

pytestmark = needs_mpi
OnOneHost = Callable[[str], dict[str, Any]]
LACK = why_not()
on_two_hosts = needs(LACK or "", not LACK)

SHAPES = [
    "--target=gen:layers=2,hidden=128,ffn=256,heads=4,vocab=512",
    "--draft=gen:layers=1,hidden=64,ffn=128,heads=2,vocab=512",
]
NULL = ["--pair=toy", "--backend=emulated", "--device=null"]
REST = ["--rounds=25", "--seed=5", "--batch_size=2", "--progress=off"]
JOBS = {  # all-reduces, plans and the link; logits
    "numpy": (3, [*SHAPES, "--backend=numpy", "--mode=ssd", *REST]),
    "markov": (3, [*NULL, "--workload=markov", "--temperature=1", "--mode=ssd", *REST]),
}
SAME = "outcome_digest token_digest num_tokens accept_histogram hit_rate rank_digests tp".split()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> OnOneHost:
    """The row of a job as it runs here."""

    @cache
    def row(name: str) -> dict[str, Any]:
        np_, flags = JOBS[name]
        return launch(np_, *flags, folder=tmp_path_factory.mktemp("one")).row

    return row


def started(hosts: Hosts, np_: int, *arguments: str) -> Started:
    """mpirun on the first host, ranks on both."""
    words = " ".join(f"'{word}'" for word in ("bash", "-c", DIRECT, "mpirun", str(np_), *arguments))
    return Started(hosts.command(words), hosts.env)


@on_two_hosts
@pytest.mark.parametrize("name", ["numpy", pytest.param("markov", marks=pytest.mark.long)])
def test_a_job_on_two_hosts_decides_what_it_does_on_one(
    name: str, hosts: Hosts, on_one_host: OnOneHost, tmp_path: Path
) -> None:
    np_, flags = JOBS[name]
    alone = on_one_host(name)
    with started(hosts, np_, "mpissd", "run", *flags, f"--out={tmp_path / 'two'}") as job:
        found = Job(*job.finish(), tmp_path / "two")
    assert {key: found.row[key] for key in SAME} == {key: alone[key] for key in SAME}
    assert found.row["provenance"]["hosts"] == hosts.names
    by_rank = [device["host"] for device in found.row["provenance"]["ranks"]]
    assert by_rank == [hosts.names[rank % 2] for rank in range(np_)]
    assert len(alone["provenance"]["hosts"]) == 1


@on_two_hosts
def test_devices_are_counted_host_by_host(hosts: Hosts) -> None:
    """A rank's number among those of its host, by which it takes its GPU."""
    with started(hosts, 4, "tests.mpi.nodes_job") as job:
        code, out, err = job.finish()
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    here, there = hosts.names
    assert told["hosts"] == [here, there, here, there] and told["tp"] == 3
    assert [(host, local) for host, local, _ in told["ranks"]] == [
        (here, 0),
        (there, 0),
        (here, 1),
        (there, 1),
    ]
    shared = [shm for *_, shm in told["ranks"]]
    assert shared[0] == shared[2] != shared[1] == shared[3], "the hosts share memory"


@on_two_hosts
@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_dies_ends_the_ranks_of_both_hosts(
    rank: int, hosts: Hosts, tmp_path: Path
) -> None:
    """The host of the culprit names it, rank 2's being mpirun's own; of another host mpirun
    forwards that, unless it is very busy ending the job, but a line there always is."""
    flags = [*NULL, "--mode=ssd", "--rounds=100000000", "--progress=on", f"--out={tmp_path}"]
    for _ in range(1 if rank == 2 else 3):
        with started(hosts, 3, "mpissd", "run", *flags) as job:
            victim = rank_on(hosts, rank)
            job.read_until("round/s")
            os.kill(victim, signal.SIGKILL)
            code, _, err = job.finish()
            until(lambda: not hosts.alive())
        assert code != 0, err[-1000:]
        said = [line for line in err.splitlines() if "mpissd: " in line]
        assert said, err[-1000:]
        named = [line for line in said if "mpissd: rank " in line]
        culprit = f"pid {victim}) was killed by signal 9 (SIGKILL) in "
        assert all(culprit in line or "of another host" in line for line in named), named
        if any(f"mpissd: rank {rank} (" in line and culprit in line for line in named):
            return
    raise AssertionError(f"never named: {err[-1000:]}")


@on_two_hosts
@pytest.mark.parametrize(
    ("np_", "model"),
    [
        pytest.param(2, NULL, id="draft"),
        pytest.param(3, [*SHAPES, "--backend=numpy"], id="follower", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_stops_on_the_other_host_ends_the_job(
    np_: int, model: list[str], hosts: Hosts, tmp_path: Path
) -> None:
    """It is the only rank there: its warden cannot tell a fault from job control. The rank that
    waits for it ends the job after the deadline."""
    flags = [*model, "--mode=ssd", "--rounds=100000000", "--progress=on", f"--out={tmp_path}"]
    with started(hosts, np_, "mpissd", "run", *flags, "--deadline_s=2") as job:
        victim = rank_on(hosts, 1)
        job.read_until("round/s")
        os.kill(victim, signal.SIGSTOP)
        code, _, err = job.finish()
        until(lambda: not hosts.alive())
    assert code != 0, err[-1000:]
    lines = [line for line in err.splitlines() if "mpissd: rank " in line]
    assert lines and all(line.endswith("; a rank of another host may be why") for line in lines)


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


@pytest.mark.parametrize("name", ["numpy"])
def test_a_job_without_shared_memory_decides_the_same(
    name: str, on_one_host: OnOneHost, tmp_path: Path
) -> None:
    """Open MPI forced on TCP: what waits for shared memory, or for eager messages, shows."""
    np_, flags = JOBS[name]
    alone = on_one_host(name)
    tcp = {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_btl_tcp_if_include": "lo",
        "OMPI_MCA_btl_tcp_eager_limit": "256",
    }
    with start(np_, "mpissd", "run", *flags, f"--out={tmp_path / 'tcp'}", env=tcp) as job:
        found = Job(*job.finish(), tmp_path / "tcp")
    assert {key: found.row[key] for key in SAME} == {key: alone[key] for key in SAME}
