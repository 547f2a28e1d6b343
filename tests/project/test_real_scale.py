"""The Saguaro paper's table beside ours: committed rows, and the lines that are made of them."""

from __future__ import annotations

from pathlib import Path

from mpissd.common.row import Row
from tests.scripts import load

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "results" / "real-scale"
paper = load("results/real-scale/paper.py")


def row(method: str, rate: float, **changed: object) -> Row:
    flags = {"mode": method.partition(" ")[0], "inline_draft": method == "sd inline"}
    told = {"tp": 4, "num_drafts": 1, "lookahead": 6, "num_rounds": 9, "acceptance_length": 4.2}
    return Row.from_dict({**flags, **told, "tok_per_s": rate, "hit_rate": 0.8, **changed})


def test_every_use_has_a_line_and_ssd_stands_over_the_best_other_one() -> None:
    expected = dict.fromkeys(paper.METHODS, 100.0)
    rows = [row("ssd", 260.0), row("sd", 160.0), row("sd inline", 165.0)]
    rows.append(row("sd inline", 200.0, mode="sd", backup="fast"))
    lines = list(paper.table(rows, expected))
    assert "| ssd | 5 | 6 | 9 | 4.20 | 0.800 | 260.0 | 100.0 | 255.8 |" in lines
    assert "| sd | 5 | 6 | 9 | 4.20 | – | 160.0 | 100.0 | 161.8 |" in lines
    assert "| ar | – | – | – | – | – | not measured | – | 54.7 |" in lines
    assert "other use of five GPUs (lookup): 1.300" in lines[-1]


def test_the_readme_has_the_table_of_its_rows() -> None:
    said = (FOLDER / "README.md").read_text()
    rows = paper.rows_of(FOLDER)
    for line in paper.table(rows, paper.predicted(FOLDER / "cells.jsonl")):
        assert line in said, line
    assert {paper.method_of(row) for row in rows} == set(paper.METHODS)
