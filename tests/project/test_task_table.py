"""The table of drafts by task, from the reports that distill writes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.scripts import load

table = load("results/tasks/table.py")
TOKENS = {"any": (2.0, 3.0), "chat": (2.2, 2.4), "code": (1.5, 3.6)}


def test_a_right_and_a_wrong_choice_are_read_off_the_reports(tmp_path: Path) -> None:
    for name, values in TOKENS.items():
        folder = tmp_path if name == "any" else tmp_path / name
        folder.mkdir(exist_ok=True)
        told = {
            prompts: {"by_lookahead": {"4": {"tokens_per_round": value}}}
            for prompts, value in zip(("chat", "humaneval"), values, strict=True)
        }
        (folder / "report.json").write_text(json.dumps({"evaluation": told}))
    lines = table.table(table.reports(tmp_path))
    assert lines[0] == "| draft | chat | humaneval |" and len(lines) == 7
    assert "| code | 1.500 | 3.600 |" in lines
    assert lines[-2:] == [
        "| best over any | +10.0% | +20.0% |",
        "| worst over any | -25.0% | -20.0% |",
    ]
