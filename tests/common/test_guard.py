"""Ranks and their warden as processes, without MPI: their messages and their ends."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from tests.needs import missing, needs, needs_linux

pytestmark = needs_linux
ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, sys, time
from mpissd.common import guard
from mpissd.common.stage import Stage
rank = int(sys.argv[1])
guard.join(rank, 2, deadline_s=1.0)
guard.stage(Stage.ROUNDS)
print("joined", flush=True)
sys.stdin.readline()  # until all have
{then}
time.sleep(30)
"""


def two_ranks(then: str, inside: Sequence[str] = ()) -> list[subprocess.Popen[str]]:
    """Two ranks of one job that have joined, and then do `then`; inside: what starts each."""
    env = {**os.environ, "PMI_JOBID": uuid4().hex, "MPI_LOCALNRANKS": "2", "PYTHONPATH": str(ROOT)}
    env.pop("OMPI_COMM_WORLD_LOCAL_SIZE", None)
    ranks = [
        subprocess.Popen(
            [*inside, sys.executable, "-c", RANK.format(then=then), str(rank)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for one in ranks:
        assert one.stdout is not None and one.stdout.readline() == "joined\n"
    for one in ranks:
        one.stdin.write("\n")
        one.stdin.flush()
    return ranks


def ended(ranks: list[subprocess.Popen[str]], within_s: float = 10.0) -> str:
    """Returns the stderr of both ranks after both have ended."""
    try:
        return "".join(one.communicate(timeout=within_s)[1] for one in ranks)
    finally:
        for one in ranks:
            one.kill()


@pytest.mark.parametrize("text", ["'x' * 5000", "'\\U0001f600' * 5000", "'a\\udcff' * 9"])
def test_what_a_rank_says_of_its_end_may_be_long_and_odd(text: str) -> None:
    said = ended(two_ranks(f"if rank: raise ValueError({text})"))
    lines = [line for line in said.splitlines() if line.startswith("mpissd")]
    assert len(lines) == 1 and lines[0].startswith("mpissd: rank 1 (")
    assert " failed in rounds: ValueError: " in lines[0] and "warden.py" not in said


ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@needs("PID namespaces", not missing("unshare") and not subprocess.run([*ALONE, "true"]).returncode)
def test_a_rank_in_a_container_of_its_own_is_not_taken_for_dead() -> None:
    """The other's warden cannot see its process."""
    then = "time.sleep(1.5); guard.leave(0); guard.stage(Stage.DONE); os._exit(0)"
    assert ended(two_ranks(then, ALONE)) == ""
