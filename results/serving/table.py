"""Prints a table of the rows of loads.jsonl, one line a way to decode and rate.

    python results/serving/table.py OUT/loads.jsonl

Speedups are of mean latency, over the row of AR at T = 1 and the same rate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAD = (
    "| way | rate, 1/s | answered | together | tok/s | first token, ms p50, p99 "
    "| each, ms p50, p99 | goodput, 1/s | accepted | hits | speedup |"
)
Row = Mapping[str, Any]


def way(row: Row) -> str:
    """Returns the name of a row's way to decode."""
    inline = " inline" * (not row["num_drafts"] and row["mode"] != "ar")
    return f"{row['mode']}{inline}, T={row['tp']}"


def share(part: int | None, whole: int | None) -> str:
    """Returns a share of a count, or a dash where nothing was counted."""
    return f"{part / whole:.2f}" if part and whole else "–"


def line(row: Row, ar: Mapping[float, Row]) -> str:
    """Returns a row's line. ar: the rows of AR, by rate."""
    first, each = row["ttft_s"] or {}, row["tpot_s"] or {}
    told = [f"{1e3 * part.get(p, 0):.3g}" for part in (first, each) for p in ("p50", "p99")]
    over = ar.get(row["rate"])
    faster = f"{over['latency_s']['mean'] / row['latency_s']['mean']:.2f}" if over else "–"
    cells = (
        way(row), f"{row['rate']:g}", f"{row['num_answered']}/{row['num_requests']}",
        row["most_together"], f"{row['tok_per_s']:.4g}", f"{told[0]}, {told[1]}",
        f"{told[2]}, {told[3]}", f"{row['goodput_per_s']:.3g}",
        share(row["accepted"], row["drafted"]), share(row["hits"], row["rounds"]), faster,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    rows = [json.loads(text) for text in Path(sys.argv[1]).read_text().splitlines()]
    ar = {row["rate"]: row for row in rows if row["mode"] == "ar" and row["tp"] == 1}
    print(HEAD, "|---" * HEAD.count(" | ") + "|---|", sep="\n")
    for row in rows:
        print(line(row, ar))


if __name__ == "__main__":
    main()
