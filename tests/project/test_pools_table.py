"""The table of docs/pools.md is what the committed rows say, and theory is where it claims."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mpissd.common.row import Row
from mpissd.lab.gates import violations
from tests.scripts import load

ROOT = Path(__file__).resolve().parents[2]
ROWS = [json.loads(line) for line in (ROOT / "results/pools/pools.jsonl").read_text().splitlines()]


def test_the_table_is_made_of_the_rows() -> None:
    table = load("results/pools/table.py").table(ROWS)
    assert len(table.splitlines()) > 30
    assert table in (ROOT / "docs" / "pools.md").read_text()


def test_every_pool_stands_beside_its_rivals_on_the_same_laws() -> None:
    table = load("results/pools/table.py")
    for case in {table.case_of(row) for row in ROWS if row["targets"] > 1}:
        modes = {row["mode"] for row in ROWS if table.case_of(row) == case}
        assert modes == {"ar", "sd", "ssd"}


def test_theory_and_simulation_where_targets_are_few() -> None:
    """b = 1, at most 8 targets: within 10%, but for one pair at one T."""
    few = [row for row in ROWS if 1 < row["targets"] <= 8 and row["batch_size"] == 1]
    errors = np.abs([row["theory_tok_per_s"] / row["tok_per_s"] - 1 for row in few])
    assert len(few) > 80 and np.median(errors) < 0.03 and np.mean(errors < 0.1) > 0.97


def test_emulated_runs_are_within_a_tenth_of_all_three() -> None:
    """A replay of their draws, the simulated mean under the laws, and queueing theory."""
    emulated = load("results/pools/emulated.py")
    lines = (ROOT / "results/pools/emulated.jsonl").read_text().splitlines()
    rows = [Row.from_dict(json.loads(line)) for line in lines]
    for row in rows:
        assert max(map(abs, emulated.errors(row))) < 0.1, row.run_id
        assert violations(row, {}) == []
    assert {row.groups for row in rows} == {1, 2, 4, 8}
    assert emulated.table(rows) in (ROOT / "docs" / "pools.md").read_text()
