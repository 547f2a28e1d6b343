"""Two nodes: nothing assumes that all ranks share a host."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mpi.harness import DIRECT, Started, ended, launch, needs_mpi
from tests.mpi.nodes import Hosts, two_hosts, why_not
from tests.needs import needs

LACK = why_not()
pytestmark = [*needs_mpi, needs(LACK or "", not LACK)]

SHAPES = [
    "--target=gen:layers=2,hidden=128,ffn=256,heads=4,vocab=512",
    "--draft=gen:layers=1,hidden=64,ffn=128,heads=2,vocab=512",
]
JOB = [*SHAPES, "--backend=numpy", "--mode=ssd", "--rounds=25", "--seed=5", "--batch_size=2"]
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
    row = ended(started(hosts, 3, "mpissd", "run", *JOB, f"--out={tmp_path / 'two'}")).row
    assert {key: row[key] for key in SAME} == {key: alone[key] for key in SAME}
    assert row["provenance"]["hosts"] == hosts.names and len(alone["provenance"]["hosts"]) == 1
    by_rank = [device["host"] for device in row["provenance"]["ranks"]]
    assert by_rank == [hosts.names[rank % 2] for rank in range(3)]
