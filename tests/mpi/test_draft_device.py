"""Emulated draft ranks on another kind of device than the targets'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpissd.common.config import RunConfig
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.job import resolve
from mpissd.lab.predict.costs import DeviceCosts
from tests.mpi.harness import Job, Started, launch, needs_mpi, start

pytestmark = needs_mpi

JOB = ["--backend=emulated", "--device=h100", "--pair=8b/1b", "--progress=off"]
SSD = [*JOB, "--mode=ssd", "--rounds=30", "--lookahead=3"]


def test_the_draft_alone_is_slower(tmp_path: Path) -> None:
    """As its profile says, and as the row predicts; the tokens are the same."""
    same = launch(2, *SSD, folder=tmp_path, direct=True).row
    slow = launch(2, *SSD, "--draft_device=v100-32", folder=tmp_path, direct=True).row
    names = [f"{load_profile(name).device_name} (emulated)" for name in ("h100", "v100-32")]
    assert (same["device_name"], same["draft_device_name"]) == (names[0], names[0])
    assert (slow["device_name"], slow["draft_device_name"]) == (names[0], names[1])
    assert [rank["device"] for rank in slow["provenance"]["ranks"]] == names
    assert slow["token_digest"] == same["token_digest"]
    assert slow["outcome_digest"] == same["outcome_digest"]
    assert slow["config_digest"] != same["config_digest"]
    job = resolve(RunConfig(pair="8b/1b", lookahead=3), 1, backend="emulated", memory_bytes=None)
    costs = DeviceCosts.from_profile(load_profile("h100"), job, load_profile("v100-32"))
    saved = json.loads((tmp_path / "profiles" / f"{slow['run_id']}.json").read_text())["device"]
    for role, table in (("verify", costs.verify), ("draft", costs.draft)):
        assert table is not None
        for rows, seconds in saved[role].items():
            assert seconds == pytest.approx(float(table(int(rows))), rel=0.05, abs=2e-4)


def test_a_sweep_s_rows_without_a_draft_rank_are_as_without_the_flag(tmp_path: Path) -> None:
    grid = "--grid=mode=ar,sd,ssd; num_drafts=0,1; lookahead=2"
    flags = [*JOB, grid, "--rounds=10", "--repeats=1", f"--out={tmp_path}"]
    with start(2, "mpissd", "sweep", *flags, "--draft_device=a100-80") as job:
        found = Job(*job.finish(), tmp_path)
    assert found.code in (2, 3), found.err  # ssd with num_drafts=0 cannot be
    rows = {(row["mode"], row["num_drafts"]): row for row in found.saved}
    assert {key: row["draft_device_name"] is None for key, row in rows.items()} == {
        ("ar", 0): True,
        ("sd", 0): True,
        ("sd", 1): False,
        ("ssd", 1): False,
    }
    alone = launch(1, *JOB, "--mode=ar", "--rounds=10", folder=tmp_path, direct=True).row
    assert alone["config_digest"] == rows["ar", 0]["config_digest"]
    assert "draft on NVIDIA A100" in found.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--backend=numpy", "--draft_device=h100"), "with backend=numpy: allowed: backend=emul"),
        ((*JOB, "--mode=ar", "--draft_device=h100"), "without a draft rank: allowed: num_drafts"),
        ((*JOB, "--draft_device=h10"), "unknown device 'h10': did you mean 'h100'?"),
    ],
)
def test_refused_in_one_line(flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = launch(2, *flags, folder=tmp_path, direct=True)
    assert done.code == 2 and len(done.lines) == 1 and message in done.lines[0], done.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--backend=numpy", "--draft_device=h100"), "with backend=numpy: allowed: backend=emul"),
        (("--backend=emulated", "--draft_device=foo"), "unknown device 'foo'"),
    ],
)
def test_a_sweep_is_refused_before_it_is_listed(
    flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """Though AR, of no draft device, could be measured."""
    grid = "--grid=mode=ar,sd; lookahead=1,2"
    command = ["launch/local.sh", "2", grid, "--dry_run", *flags, f"--out={tmp_path / 'o'}"]
    with Started(command, {"COMMAND": "sweep"}) as job:
        done = Job(*job.finish(), tmp_path)
    assert done.code == 2 and len(done.lines) == 1 and message in done.lines[0], done.err
