"""Two jobs on one host at the same time do not touch each other."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.mpi.harness import Job, Started, launch, needs_mpi

pytestmark = needs_mpi

# Forwards take some ms, in which a rank sleeps: four ranks share two cores without a stir.
BASE = ["--pair=8b/1b", "--backend=emulated", "--device=h100", "--progress=off"]
FIRST = [*BASE, "--mode=ssd", "--rounds=60", "--seed=11", "--batch_size=2"]
SECOND = [*BASE, "--mode=ssd", "--rounds=50", "--seed=12", "--lookahead=3"]
SAME = "outcome_digest token_digest num_tokens accept_histogram hit_rate rank_digests".split()


def told(row: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on time."""
    return {key: row[key] for key in SAME}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return [
        launch(np_, *flags, folder=tmp_path_factory.mktemp("alone")).row
        for np_, flags in ((2, FIRST), (2, SECOND))
    ]


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(True, id="one folder"),
        pytest.param(False, id="two folders", marks=pytest.mark.long),
    ],
)
def test_two_at_once_are_two_alone(
    shared: bool, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    folders = [tmp_path / ("both" if shared else f"out{n}") for n in range(2)]
    started = [
        Started(["launch/local.sh", str(np_), *flags, f"--out={folder}"])
        for (np_, flags), folder in zip(((2, FIRST), (2, SECOND)), folders, strict=True)
    ]
    with started[0], started[1]:
        jobs = [Job(*job.finish(), folder) for job, folder in zip(started, folders, strict=True)]
        assert started[0].is_gone() and started[1].is_gone()
    assert [told(job.row) for job in jobs] == [told(row) for row in alone]
    assert jobs[0].row["run_id"] != jobs[1].row["run_id"]
    saved = [row["run_id"] for job in jobs for row in job.saved]
    assert sorted(set(saved)) == sorted(job.row["run_id"] for job in jobs)
    assert len(saved) == (4 if shared else 2)  # one file is read twice
    for job in jobs:
        assert len(job.arrays["round_s"]) == job.row["num_rounds"]
        assert (job.folder / "profiles" / f"{job.row['run_id']}.json").exists()


def test_one_that_fails_leaves_the_other_alone(tmp_path: Path) -> None:
    """Its ranks are ended, and nobody else's."""
    with (
        Started(["launch/local.sh", "2", *FIRST, "--rounds=2000", f"--out={tmp_path}"]) as lost,
        Started(["launch/local.sh", "2", *SECOND, f"--out={tmp_path}"]) as kept,
    ):
        os.kill(lost.rank(1), signal.SIGKILL)
        code, _, _ = lost.finish()
        found = Job(*kept.finish(), tmp_path)
    assert code != 0
    assert found.row["num_rounds"] == 50 and [r["run_id"] for r in found.saved] == [
        found.row["run_id"]
    ]
