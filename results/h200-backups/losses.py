#!/usr/bin/env python3
"""Prints what --backup=auto loses to the better of jit and fast, by batch size, as Markdown.

    results/h200-backups/losses.py [OUT]      (default: the rows beside this script)

Rows of one seed are compared as pairs (mpissd.common.compare). The better one is chosen by the same
rows: where both are equal but for their draws, the loss is too large by that luck.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpissd.common.compare import compare_rows
from mpissd.lab.tables.load import load_rows

WAYS = ("jit", "fast", "auto")


def line(batch: int, rows: list[dict[str, Any]]) -> str:
    """One batch size; "" unless all three were measured."""
    rows_by_way = {
        w: [r for r in rows if (r["batch_size"], r["backup"]) == (batch, w)] for w in WAYS
    }
    if not all(rows_by_way.values()):
        return ""
    rates = {way: fmean(row["tok_per_s"] for row in rows_by_way[way]) for way in WAYS}
    better = max("jit", "fast", key=rates.__getitem__)
    pairs = compare_rows(rows_by_way[better], rows_by_way["auto"], {})
    loss = f"{1 - pairs.speedup:.1%} ({1 - pairs.high:.1%} to {1 - pairs.low:.1%})"
    cells = [str(batch), *(f"{rates[way]:.0f}" for way in WAYS), better, loss]
    return f"| {' | '.join(cells)} | {pairs.num_seeds} × {pairs.num_rounds} |\n"


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each batch size."""
    batches = sorted({row["batch_size"] for row in rows})
    heads = "b | jit | fast | auto | better | loss of auto (95%) | seeds × rounds"
    return f"| {heads} |\n{'|---' * 7}|\n" + "".join(line(batch, rows) for batch in batches)


if __name__ == "__main__":
    print(table(load_rows([sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent])), end="")
