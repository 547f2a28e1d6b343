"""What is committed in results/ still loads and still passes the gates of today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.gates import violations
from mpissd.predict import jobfile
from mpissd.predict.why import gaps

RESULTS = Path(__file__).parents[2] / "results"
JOBS = [path for path in sorted(RESULTS.glob("*/profiles/*.json")) if "-T" not in path.stem]
TABLES = sorted(RESULTS.glob("*/runs.jsonl"))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
