"""Tables of docs/ssd.md and docs/performance.md that no command prints are what their rows say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from mpissd.lab.limits import bars as limit_bars

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ssd.md").read_text()
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
LIMIT = ROOT / "results" / "h200-limit"
SOURCE = ROOT / "results" / "h200-ssd" / "runs.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in SOURCE.read_text().splitlines()]


def one(**wanted: Any) -> dict[str, Any]:
    """The only row with these keys."""
    (row,) = (row for row in ROWS if all(row[key] == value for key, value in wanted.items()))
    return row


def late(on_late: str, short: int) -> str:
    row = one(on_late=on_late, lookahead=7, tp=1, backup_lookahead=short, num_drafts=1)
    return f"{row['tok_per_s']:.0f}"


def late_hits() -> Iterator[str]:
    yield f"| SD | {one(mode='sd', lookahead=7, tp=1)['tok_per_s']:.0f} | |"
    for on_late in ("finish", "serve", "auto"):
        yield f"| `{on_late}` | {late(on_late, 7)} | {late(on_late, 3)} |"


def backups() -> Iterator[str]:
    for batch in (1, 4, 16, 64):
        found = [one(batch_size=batch, backup=way, lookahead=4) for way in ("jit", "fast", "auto")]
        yield f"| {batch} | " + " | ".join(f"{row['tok_per_s']:.0f}" for row in found) + " |"


@pytest.mark.parametrize("lines", [late_hits, backups])
def test_a_measured_table_is_what_its_rows_say(lines: Any) -> None:
    for line in lines():
        assert line in PAGE


def test_the_ten_bars_are_what_their_rows_say(capsys: pytest.CaptureFixture[str]) -> None:
    """Each median that the rows give stands, rounded, in a line of its bar."""
    limit_bars.main([str(LIMIT)])
    page = PERFORMANCE.partition("## The ten bars")[2]
    said: dict[str, list[str]] = {}
    for line in re.findall(r"^\| [\d|].*\|$", page.partition("**Where bars")[0], re.M):
        cells = line.split("|")
        bar = cells[1].strip() or [*said][-1]
        said.setdefault(bar, []).extend(re.findall(r"[\d.]+", cells[4]))
    told = re.findall(r"^ ?(\d+)  .*[<>]= [\d.]+ +([\d.]+)", capsys.readouterr().out, re.M)
    assert len(told) == 33
    for bar, value in told:
        rounded = {f"{float(value):.{places}f}".removeprefix("0") for places in range(4)}
        assert rounded & set(said[bar]), (bar, value)


def phases() -> Iterator[str]:
    rows = [json.loads(line) for line in (LIMIT / "runs.jsonl").read_text().splitlines()]
    runs = [
        ("ar", "8b", 1),
        ("ar", "70b", 4),
        ("ar", "70b", 2),
        ("ssd", "8b", 1),
        ("ssd", "70b", 2),
    ]
    for phase in ("sample", "commit", "launch", "draft_wait"):
        cells = []
        for mode, target, tp in runs:
            us = [
                row["phases_us"]["lead"][phase]
                for row in rows
                if (row["mode"], row["target"], row["tp"]) == (mode, f"llama-3.1-{target}", tp)
                and row["provenance"]["commit"] is None  # the first job
            ]
            shown = f"{fmean(us):.1f}" if fmean(us) < 9.5 else f"{fmean(us):.0f}"
            cells.append("–" if (phase, mode) == ("draft_wait", "ar") else shown)
        yield f"| {phase} | {' | '.join(cells)} |"


def test_the_lead_s_phases_are_what_their_rows_say() -> None:
    for line in phases():
        assert line in PERFORMANCE
