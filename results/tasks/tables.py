#!/usr/bin/env python3
"""Prints a table of docs/drafts.md from the rows beside it: results/tasks/tables.py NAME"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

import pages  # noqa: E402
from pages import PROMPTS, Lines, head, line  # noqa: E402

from mpissd.common.output import read_rows  # noqa: E402

Row = dict[str, Any]
SHIPPED = ROOT / "mpissd/engine/model/shipped/smollm2_draft/report.json"
TASKS = ("chat", "code", "text")
TASK_OF = {"chat": "chat", "humaneval": "code", "edit": "code", "summarise": "text"}


def drafts() -> Lines:
    """Tokens a round at K = 4 on all recorded answers, by each draft."""
    rows = {row["draft"]: row for row in read_rows(HERE / "distilled.jsonl")}
    counts = {kind: rows["any"]["evaluation"][f"smollm2-{kind}"]["answers"] for kind in PROMPTS}
    yield from head("draft", *(f"{counts[kind]} {name}" for kind, name in PROMPTS.items()))
    named = {name: rows[name] for name in (*TASKS, "any")}
    named["the shipped one, untrained further"] = json.loads(SHIPPED.read_text())
    cells = [[name, *(_tokens(row, kind) for kind in PROMPTS)] for name, row in named.items()]
    replayed = _replayed()
    cells[-1] = [
        replayed[kind] if cell == "–" else cell
        for kind, cell in zip(("", *PROMPTS), cells[-1], strict=True)
    ]
    columns = [list(column) for column in zip(*cells, strict=True)]
    for column in columns[1:]:
        most = max(cell for cell in column if cell != "–")
        column[:] = [f"**{cell}**" if cell == most else cell for cell in column]
    for told in zip(*columns, strict=True):
        yield line(told)


def _replayed() -> dict[str, str]:
    """Returns what the shipped draft gives at K = 4 in a replay of the recordings, by prompts."""
    rows = read_rows(ROOT / "results/hierarchy/forwards.jsonl")
    at = [row for row in rows if (row["lookahead"], row["draft_lookup"]) == (4, "prompt")]
    lengths = {row["recording"]: row["tokens_a_round"] for row in at}
    return {kind: f"{lengths[f'smollm2-{kind}.npz']:.2f}" for kind in PROMPTS}


def _tokens(row: Row, kind: str) -> str:
    of = row["evaluation"].get(f"smollm2-{kind}")
    return "–" if of is None else f"{of['by_lookahead']['4']['tokens_per_round']:.2f}"


def rates() -> Lines:
    """What SD inline made of them: the shipped draft, its task's own, and the worst choice."""
    names = ("prompts", "shipped: tokens a round", "its task's own", "gain", "worst choice")
    names = (*names, "the same, instead of the right one")
    yield from head(*names, "tok/s: shipped", "its task's own alone", "the same by the router")
    every: dict[tuple[str, str], Row] = {}
    for row in read_rows(HERE / "h200.jsonl"):
        kind = Path(row["provenance"]["sweep"]["flags"]["prompts"]).stem
        every[kind, Path(row["draft"]).name] = row
    for kind, name in PROMPTS.items():
        of = {draft: row for (own, draft), row in every.items() if own == kind}
        shipped, own, routed = of["smollm2_draft"], of[TASK_OF[kind]], of["drafts"]
        length = {draft: row["acceptance_length"] for draft, row in of.items()}
        worst = min(length[task] for task in TASKS)
        cells = [f"{row['acceptance_length']:.2f}" for row in (shipped, own)]
        cells.append(pages.gain(own["acceptance_length"] / shipped["acceptance_length"]))
        cells.append(pages.gain(worst / shipped["acceptance_length"]))
        cells.append(pages.gain(worst / own["acceptance_length"]))
        cells += [f"{row['tok_per_s']:,.0f}" for row in (shipped, own, routed)]
        yield line([name, *cells])


TABLES = {of.__name__: of for of in (drafts, rates)}

if __name__ == "__main__":
    sys.exit(pages.printed(TABLES, __doc__))
