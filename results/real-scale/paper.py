#!/usr/bin/env python3
"""The Saguaro paper's table (70B/1B, T = 4 + 1) beside ours, with ranks and a recording's own hits.

    results/real-scale/paper.py OUT [--table]

Runs paper.grid on five emulated ranks (two minutes) and prints OUT/runs.jsonl as a table, the best
other use of as many GPUs included; --table only prints. Forwards are the built-in h100's, a
datasheet profile; loops, messages, caches, lookups and hits are real. What is there is not run
again. PYTHON, MPIRUN: launch/env.sh.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT)]  # study, mpissd

from study import LOCAL, rows_of  # noqa: E402

from mpissd.common.row import Row  # noqa: E402

PAPER = {"ar": 54.7, "sd": 161.8, "ssd": 255.8}  # Kumar, Dao, May 2026: 70B/1B, H100s, T = 4 (+ 1)
METHODS = ("ar", "lookup", "sd inline", "sd", "ssd")


def method_of(row: Row) -> str:
    """The use that a row is of, as real_scale.py names them."""
    if row.mode == "sd" and row.inline_draft:
        return "lookup" if row.backup == "fast" else "sd inline"
    return row.mode


def predicted(cells: Path) -> dict[str, float]:
    """Tokens a second of each use at its best K, by the recurrence over the whole recording."""
    found: dict[str, float] = {}
    for line in map(json.loads, cells.read_text().splitlines()):
        if line["machine"] == ["h100", "70b/1b", 4] and "humaneval" in line["recording"]:
            found[line["method"]] = max(line["rate"], found.get(line["method"], 0.0))
    return found


def table(rows: Sequence[Row], expected: dict[str, float]) -> Iterator[str]:
    """Yields the Markdown lines: every use, and SSD over the best other one."""
    yield "| use | GPUs | K | rounds | tokens a round | hits | tok/s | predicted | paper |"
    yield "|---|---|---|---|---|---|---|---|---|"
    found = {method_of(row): row for row in rows}
    for method in METHODS:
        if (row := found.get(method)) is None:
            yield f"| {method} | – | – | – | – | – | not measured | – | {PAPER.get(method, '–')} |"
            continue
        hits = "–" if row.hit_rate is None or method != "ssd" else f"{row.hit_rate:.3f}"
        rounds = f"{row.num_rounds} | {row.acceptance_length:.2f} | {hits}"
        rates = f"{row.tok_per_s:.1f} | {expected[method]:.1f} | {PAPER.get(method, '–')}"
        yield f"| {method} | {row.tp + row.num_drafts} | {row.lookahead} | {rounds} | {rates} |"
    others = {name: row.tok_per_s for name, row in found.items() if name != "ssd"}
    if "ssd" in found and others:
        best = max(others, key=lambda name: others[name])
        ratio = found["ssd"].tok_per_s / others[best]
        yield ""
        yield f"SSD over the best other use of five GPUs ({best}): {ratio:.3f}, one run of each."


def main() -> int:
    """Runs and prints; returns the sweep's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--table", action="store_true")
    given, code = parser.parse_args(), 0
    if not given.table:
        flags = ["--grid=results/real-scale/paper.grid", "--backend=emulated", "--device=h100"]
        flags += [f"--out={os.path.relpath(given.out, ROOT)}", "--num_drafts=1"]
        flags += ["--repeats=1", "--progress=off"]
        code = subprocess.run(
            [str(LOCAL), "5", *flags],
            check=False,
            cwd=ROOT,
            env={**os.environ, "COMMAND": "sweep", "PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        ).returncode
    print("\n".join(table(rows_of(given.out), predicted(HERE / "cells.jsonl"))))
    return code


if __name__ == "__main__":
    sys.exit(main())
