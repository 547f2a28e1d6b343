"""The table of Saguaro's C in docs/ssd.md is what its rows say, and its counts fit the rows."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mpissd.common.row import Row
from mpissd.lab.gates import violations
from tests.scripts import load

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "ssd.md").read_text()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("results/saguaro/table.py")


def test_the_documents_table_is_made_of_the_rows(script: ModuleType) -> None:
    table = script.table()
    assert table.count("\n") == 7 and table in DOCUMENT


def test_counts_fit_the_rows(script: ModuleType) -> None:
    rows, cells = script.entries(script.ROWS), script.entries(script.CELLS)
    assert [row["run_id"] for row in rows] == [cell["run_id"] for cell in cells]
    for row, cell in zip(rows, cells, strict=True):
        assert violations(Row.from_dict(row), {}) == []
        answers = cell["rejected"] + cell["others"]
        assert answers == row["batch_size"] * (row["num_rounds"] - 1)
        hits = cell["rejected_hits"] + cell["other_hits"]
        assert hits / answers == pytest.approx(row["hit_rate"], abs=1e-5)
        last_round = sum(row["accept_histogram"][:-1]) - cell["rejected"]
        assert 0 <= last_round <= row["batch_size"]


def test_the_laws_quoted_are_those_of_the_row(script: ModuleType) -> None:
    (row,) = (r for r in script.entries(script.ROWS) if (r["saguaro_c"], r["fan_out"][0]) == (1, 8))
    laws = [row["learned"][f"hit_law_{name}"] for name in ("rejected", "all_accepted")]
    quoted = " against ".join(f"A = {law['hit_a']:.2f}, r = {law['hit_r']:.2f}" for law in laws)
    assert quoted.replace("0.", ".") in " ".join(DOCUMENT.split())


def test_answers_are_told_by_the_outcome_before_them(script: ModuleType) -> None:
    """Two sequences, K = 2, rounds in turn: (round, id, epoch, k, t*, source, hit, k')."""
    rows = [(0, 1, 0, 1, 0, 2, 0, 2), (0, 2, 0, 2, 0, 2, 0, 2), (1, 1, 0, 2, 0, 1, 1, 2)]
    rows += [(1, 2, 0, 0, 0, 2, 0, 2), (2, 1, 0, 0, 0, 2, 0, 2), (2, 2, 0, 0, 0, 1, 1, 2)]
    found = script.counts(np.array(rows))
    assert found == {"rejected": 2, "rejected_hits": 2, "others": 2, "other_hits": 0}
