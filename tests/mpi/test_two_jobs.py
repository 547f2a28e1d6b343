"""Two jobs on one host at the same time do not touch each other."""

import os
import signal
from pathlib import Path

from tests.mpi.harness import Job, Started, launch, needs_mpi

pytestmark = needs_mpi

# Forwards take some ms, in which a rank sleeps: four ranks share two cores without a stir.
BASE = ["--pair=8b/1b", "--backend=emulated", "--device=h100", "--progress=off"]
FIRST = [*BASE, "--mode=ssd", "--seed=11"]
SECOND = [*BASE, "--mode=ssd", "--rounds=50", "--seed=12", "--lookahead=3"]
SAME = "outcome_digest token_digest num_tokens accept_histogram hit_rate rank_digests".split()


def test_two_at_once_are_two_alone_and_one_that_fails_is_ended_alone(tmp_path: Path) -> None:
    alone = launch(2, *SECOND, folder=tmp_path / "alone", direct=True).row
    both = [
        Started(["launch/local.sh", "2", *flags, f"--out={tmp_path}"])
        for flags in ([*FIRST, "--rounds=2000"], SECOND)
    ]
    with both[0] as lost, both[1] as kept:
        os.kill(lost.rank(1), signal.SIGKILL)
        code, _, _ = lost.finish()
        found = Job(*kept.finish(), tmp_path)
        assert lost.is_gone() and kept.is_gone()
    assert code != 0
    assert {key: found.row[key] for key in SAME} == {key: alone[key] for key in SAME}
    assert [row["run_id"] for row in found.saved] == [found.row["run_id"]]
