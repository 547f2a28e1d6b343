"""The tables in the documentation are what their commands print of the committed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import load

DOCS = Path(__file__).resolve().parents[2] / "docs"
tables = load("docs/tables.py")

PAGES = [page for page in sorted(DOCS.glob("*.md")) if tables.commands(page.read_text())]


def test_the_predictions_have_their_tables() -> None:
    assert DOCS / "predictions.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_committed_table_is_what_its_command_prints(page: Path) -> None:
    assert tables.rewritten(page.read_text()) == page.read_text(), f"docs/tables.py {page.name}"


def test_a_table_that_is_not_its_command_s_is_rewritten() -> None:
    command = "-m mpissd predict --rows=results/h200-tables"
    text = f"before\n<!-- python {command} -->\nold\n<!-- end -->\nafter\n"
    found = tables.rewritten(text)
    assert found.startswith(f"before\n<!-- python {command} -->\n| machine | T |")
    assert "old" not in found and found.endswith("<!-- end -->\nafter\n") and "{" not in found
