"""What is committed in results/ still loads and still passes the gates of today."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mpissd.common.row import Row
from mpissd.lab.gates import violations
from mpissd.lab.predict import jobfile
from mpissd.lab.predict.why import gaps

RESULTS = Path(__file__).parents[2] / "results"
JOBS = [path for path in sorted(RESULTS.glob("*/profiles/*.json")) if "-T" not in path.stem]
TABLES = sorted(RESULTS.glob("*/runs.jsonl"))


OTHERS = {"__pycache__", "gpu-limit"}  # make bench-gpu writes the latter unless OUT says otherwise
FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir() and path.name not in OTHERS)
SCRIPTS = ("*.sh", "*.py", "*.grid")


def rows(path: Path) -> list[Row]:
    return [Row.from_dict(json.loads(line)) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.parent.name)
def test_committed_rows_pass_the_gates(table: Path) -> None:
    for row in rows(table):
        arrays = table.parent / "rounds" / f"{row['run_id']}.npz"
        rounds = dict(np.load(arrays)) if arrays.exists() else {}
        assert violations(row, rounds) == [], row["run_id"]
        assert gaps(row), row["run_id"]


def test_some_of_them_have_raw_rounds() -> None:
    assert len(list(RESULTS.glob("*/rounds/*.npz"))) >= 10


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_committed_job_profiles_load(path: Path) -> None:
    found = jobfile.load(str(path))
    assert found is not None and found.host.lead_launch > 0


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_study_holds_its_script_and_says_how_many_rows(folder: Path) -> None:
    """A README with the command, a script beside it, and the count of every file of rows."""
    said = (folder / "README.md").read_text()
    scripts = [path.name for pattern in SCRIPTS for path in folder.glob(pattern)]
    assert any(name in said for name in scripts), scripts
    for path in folder.glob("*.jsonl"):
        count = len(path.read_text().splitlines())
        assert re.search(rf"{re.escape(path.name)}.*?\b{count}\b", said, re.S), (path.name, count)


def test_launch_holds_launchers_alone() -> None:
    names = {path.name for path in (RESULTS.parent / "launch").iterdir() if path.is_file()}
    launchers = "array chat doctor env job local replica serve setup slurm"
    launchers += " bridges2_8gpu bridges2_h100 bridges2_shared"
    assert names == {f"{name}.sh" for name in launchers.split()} | {"submit.py"}


def test_every_file_is_strict_json() -> None:
    """NaN and Infinity are no JSON: a value that was not measured is null."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{path}: {constant}")

    paths = [path for end in ("jsonl", "json") for path in sorted(RESULTS.rglob(f"*.{end}"))]
    assert len(paths) > 100
    for path in paths:
        text = path.read_text()
        for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
            json.loads(line, parse_constant=refuse)
