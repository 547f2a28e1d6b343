#!/usr/bin/env python3
"""Prints the table of Saguaro's C by the fan-out (docs/ssd.md) from the rows that are kept.

    results/saguaro/table.py [OUT]

OUT: what `measure.sh OUT` left; its rows are copied to runs_table.jsonl beside this script, and of
its rounds the counts behind each hit rate to cells.jsonl. Without it the table is of what is there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROWS, CELLS = HERE / "runs_table.jsonl", HERE / "cells.jsonl"


def entries(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def counts(sequences: np.ndarray) -> dict[str, int]:
    """Answers behind a rejected token and behind all others, and how many of them the cache held.

    sequences: [n, 8], RoundRecords.sequences(). A sequence's first answer follows no outcome.
    """
    rows = sequences[np.lexsort((sequences[:, 0], sequences[:, 1]))]
    follows = rows[1:, 1] == rows[:-1, 1]
    before, hit = rows[:-1][follows], rows[1:][follows, 6]
    rejected = before[:, 3] < before[:, 7]
    return {
        "rejected": int(rejected.sum()),
        "rejected_hits": int(hit[rejected].sum()),
        "others": int((~rejected).sum()),
        "other_hits": int(hit[~rejected].sum()),
    }


def keep(out: Path) -> None:
    """Copies the rows of OUT, and reduces its rounds."""
    rows = entries(out / "runs.jsonl")
    ROWS.write_text((out / "runs.jsonl").read_text())
    cells = []
    for row in rows:
        sequences = np.load(out / "rounds" / f"{row['run_id']}.npz")["sequences"]
        cells.append({"run_id": row["run_id"], **counts(sequences)})
    CELLS.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


def acceptance(row: dict[str, Any]) -> float:
    """Accepted of the drafted tokens that were looked at."""
    histogram = np.array(row["accept_histogram"])
    accepted = int(histogram @ np.arange(len(histogram)))
    return float(accepted / (accepted + histogram[:-1].sum()))


def text(row: dict[str, Any], cell: dict[str, Any]) -> str:
    """alpha, tokens a round, hits behind a rejection, hits."""
    behind = cell["rejected_hits"] / cell["rejected"]
    values = f"{acceptance(row):.3f} {row['acceptance_length']:.2f} {behind:.3f}"
    return f"{values} {row['hit_rate']:.3f}".replace("0.", ".")


def table() -> str:
    """The table as Markdown, a line for each C."""
    cells = {cell["run_id"]: cell for cell in entries(CELLS)}
    texts = {(r["saguaro_c"], r["fan_out"][0]): text(r, cells[r["run_id"]]) for r in entries(ROWS)}
    fans = sorted({fan for _, fan in texts})
    shown = [["C", *(f"F = {fan}" for fan in fans)]]
    for c in sorted({c for c, _ in texts}, reverse=True):
        shown.append([f"{c:g}".replace("0.", "."), *(texts[c, fan] for fan in fans)])
    first, *others = (f"| {' | '.join(cells)} |" for cells in shown)
    return "\n".join([first, "|---" * (1 + len(fans)) + "|", *others])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        keep(Path(sys.argv[1]))
    print(table())
