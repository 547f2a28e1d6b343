"""Sweeps under mpirun: rows as `run` makes them, resumed, shared out, and never stopped by one.

As a program (`python -m mpi4py -m tests.mpi.test_sweep sweep --grid=…`) it is mpissd on a machine
whose rank 1 has no memory for buffers of more than 24 rows.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.row import flat
from mpissd.engine.backend.profile import EmulatedBackend
from mpissd.engine.law.acceptance import named_hit_law
from tests.mpi.harness import Job, Started, ended, launch, needs_mpi, start
from tests.scripts import until

pytestmark = needs_mpi
DEFAULT = named_hit_law("smollm2").label

EMULATED = ["--backend=emulated", "--progress=off"]
NULL = [*EMULATED, "--device=null", "--pair=toy", "--rounds=20", "--warmup_rounds=2"]


def sweep(np_: int, *flags: str, folder: Path, module: str = "mpissd") -> Job:
    """`mpissd sweep` on NP ranks."""
    return ended(start(np_, module, "sweep", *flags, f"--out={folder}"), folder)


def rows_in(folder: Path, name: str = "runs") -> list[dict[str, Any]]:
    path = folder / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [flat(json.loads(line)) for line in lines]


def tasks(folder: Path) -> list[str]:
    """The measured tasks, in order; a gate may flag a row if the machine is very busy."""
    rows = [row for name in ("runs", "flagged") for row in rows_in(folder, name)]
    rows.sort(key=lambda row: int(row["run_id"].split("-")[2], 16))
    return [row["provenance"]["sweep"]["task"] for row in rows]


def last(job: Job) -> dict[str, Any]:
    """The last line of stdout."""
    return json.loads(job.out.splitlines()[-1])


def keys(value: Any) -> Any:
    """The keys of an object, with the keys of the objects in it."""
    if not isinstance(value, dict):
        return None
    return {name: keys(found) for name, found in value.items() if name not in ("sweep", "flags")}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """All methods in one job of two ranks, each twice."""
    folder = tmp_path_factory.mktemp("swept")
    grid = "mode=ar,sd,ssd; num_drafts=0,1; lookahead=2; alpha=.7"
    told = [*EMULATED, "--pair=8b/1b", "--rounds=60", "--repeats=2"]
    return sweep(2, f"--grid={grid}", *told, folder=folder)


def test_a_sweep_measures_everything_and_says_what_was_best(swept: Job) -> None:
    assert swept.code == 2, swept.err  # ssd with num_drafts=0 cannot be
    told = last(swept)
    assert (told["measured"], told["failed"], told["rows"]) == (8, 2, 8)
    assert f", hits {DEFAULT}\n" in swept.out
    for method in ("AR", "SD", "SD inline", "SSD fan_out=uniform:3"):
        (line,) = re.findall(rf"^{re.escape(method)} +!?[\d.]+ .*%(.*)", swept.out, re.MULTILINE)
        assert line.split()[0] == "2"  # repeats
    failed = rows_in(swept.folder, "failed")
    assert [(row["exit_code"], row["repeat"]) for row in failed] == [(2, 0), (2, 1)]
    assert "mode=ssd with num_drafts=0" in failed[0]["error"]


def test_a_row_of_a_sweep_is_the_row_of_a_run(swept: Job, tmp_path: Path) -> None:
    np_, flags = 2, ["--mode=ssd", "--num_drafts=1", "--lookahead=2", "--alpha=.7"]
    alone = launch(
        np_, *flags, *EMULATED, "--pair=8b/1b", "--rounds=60", folder=tmp_path, direct=True
    ).row
    found = [row for row in rows_in(swept.folder) if row["config_digest"] == alone["config_digest"]]
    assert [row["provenance"]["sweep"]["repeat"] for row in found] == [0, 1]
    assert alone["provenance"]["sweep"] is None and alone["provenance"]["calibrated_at"]
    exact = (
        "outcome_digest token_digest world_size num_drafts tp hit_rate accept_histogram num_tokens "
        "t_target_s floor_us all_reduce inline_draft fan_out"
    ).split()
    for row in found:
        assert keys(row) == keys(alone)
        assert {name: row[name] for name in exact} == {name: alone[name] for name in exact}
        assert len(row["rank_digests"]) == np_ == len(row["provenance"]["ranks"])
        assert row["tok_per_s_per_gpu"] == pytest.approx(row["tok_per_s"] / np_, abs=1e-3)
        assert (swept.folder / "rounds" / f"{row['run_id']}.npz").exists()
    calibrated = {row["provenance"]["calibrated_at"] for row in found}
    assert len(calibrated) == 1  # the repeat reuses the first one's calibration


def test_a_sweep_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    flags = ["--grid=mode=sd,ssd; lookahead=1..4", *NULL, "--repeats=1", f"--out={tmp_path}"]
    with start(2, "mpissd", "sweep", *flags) as job:
        until(lambda: len(rows_in(tmp_path)) >= 3)
        os.kill(job.rank(0), 9)
        job.finish()
    before = tasks(tmp_path)
    assert 3 <= len(before) < 8
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"schema": 1, "run_id": "ssd-to')  # as a kill within a write would leave it
    again = sweep(2, *flags[:-1], folder=tmp_path)
    assert again.code in (0, 3), again.err
    after = tasks(tmp_path)
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) == 8
    assert last(again)["measured"] + last(again)["failed"] == 8 - len(before)


def test_what_goes_wrong_with_one_configuration_is_agreed_and_recorded(tmp_path: Path) -> None:
    """Rank 1 has no memory for the branches of eight sequences; rank 0 learns of it in time, and
    configurations with fewer rows are measured."""
    grid = "--grid=mode=ar,sd,ssd; lookahead=2; batch_size=1,8; fan_out=uniform:2"
    flags = [grid, *NULL, "--repeats=1"]
    found = sweep(2, *flags, folder=tmp_path, module="tests.mpi.test_sweep")
    assert found.code in (2, 3), found.err
    failed = rows_in(tmp_path, "failed")
    assert {row["error"] for row in failed} == {"rank 1: 48 rows wanted, 24 free"}
    kinds = [(row["flags"]["mode"], row["flags"]["batch_size"]) for row in failed]
    assert kinds == [("ssd", "8")]
    assert len(set(tasks(tmp_path))) == 5
    count = len(rows_in(tmp_path))
    again = last(sweep(2, *flags, folder=tmp_path))  # of all ranks with memory
    assert again["measured"] + again["failed"] == 6 - count
    assert len(set(tasks(tmp_path))) == 6


def test_a_dry_run_lists_the_plan(tmp_path: Path) -> None:
    told = ["--grid=mode=ar,ssd; p_hit=.5; fan_out=uniform:0,uniform:2", "--dry_run"]
    command = ["launch/local.sh", "2", *told, *NULL, f"--out={tmp_path}/none"]
    done = ended(Started(command, {"COMMAND": "sweep"}))
    lines = done.out.splitlines()
    assert done.code == 0 and len(lines) == 4, done.err
    assert "mode=ar" in lines[0] and "FAILS: " in lines[1] and "FAILS" not in lines[2]
    assert lines[3].startswith("3 configurations x 3 repeats = 9 measurements on T=1, D=1")
    assert not (tmp_path / "none").exists()


MOST_ROWS = 24


def forget_memory() -> None:
    """On this rank, from now on."""
    full = EmulatedBackend.activation

    def activation(self: EmulatedBackend, rows: int, width: int) -> Any:
        if rows > MOST_ROWS:
            raise MemoryError(f"{rows} rows wanted, {MOST_ROWS} free")
        return full(self, rows, width)

    EmulatedBackend.activation = activation  # type: ignore[method-assign]


if __name__ == "__main__":
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        forget_memory()
    sys.exit(main(sys.argv[1:]))
