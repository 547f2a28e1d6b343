#!/usr/bin/env python3
"""Prints how long the target waited between two verifications, behind hits and behind misses.

    results/idle.py OUT/t1 …     # folders with runs.jsonl and rounds/ of SSD, b = 1

A round without its forward: the acceptance rule, both messages, the draft's answer, and the launch.
`ready`: hits whose branch had all K tokens when the outcome came. A run whose rounds were not kept
has its median round instead. Behind each run stands why: a draft that is never idle bounds the
rounds itself; else the wait is host work and the link.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def idles(folder: Path, row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (kind of round, idle µs of each) of one run."""
    with np.load(folder / "rounds" / f"{row['run_id']}.npz") as file:
        arrays = dict(file)
    idle = 1e6 * (arrays["round_s"] - arrays["t_target_s"])
    hit = np.zeros(len(idle), bool)
    hit[arrays["sequences"][:, 0]] = arrays["sequences"][:, 6] > 0
    columns = arrays["draft_columns"].tolist()
    steps = dict(arrays["draft_rounds"][:, [columns.index("round"), columns.index("steps_ready")]])
    first = min(steps) if steps else 0
    ready = np.array([steps.get(first + n, 0) >= row["lookahead"] for n in range(len(idle))])
    for name, chosen in (("hit", hit), ("hit, ready", hit & ready), ("miss", ~hit)):
        yield name, idle[1:][chosen[1:]]


def waits(folder: Path, row: dict[str, Any]) -> str:
    """Returns the idle times of one run's rounds, or its median round's where none were kept."""
    if not (folder / "rounds" / f"{row['run_id']}.npz").exists():
        beyond = row["round_us"]["p50"] - 1e6 * row["t_target_s"]
        return f"median round: {beyond:.0f} µs beyond the verification (no raw rounds)"
    return "; ".join(
        f"{name} {len(us)}: p50 {np.median(us):.0f}, p90 {np.quantile(us, 0.9):.0f} µs"
        for name, us in idles(folder, row)
        if len(us)
    )


def growth(row: dict[str, Any]) -> str:
    """Returns what glue and growth take: t_growth_s, or what they got where all were cut short."""
    if row["t_growth_s"] is not None:
        return f"glue and growth take {1e3 * row['t_growth_s']:.2f} ms"
    draft = row["phases_us"]["draft"]
    spent = 1e-3 * sum(draft[name] for name in ("glue", "keys", "grow"))
    return f"glue and growth, cut short in every round, get {spent:.2f} ms"


def is_draft_bound(row: dict[str, Any]) -> bool:
    """Returns whether the draft always had an outcome to answer: it waits for less than a tenth of
    a verification in the median round."""
    return bool(1e-6 * row["phases_us"]["draft"]["wait"] < 0.1 * row["t_target_s"])


def why(row: dict[str, Any]) -> str:
    """Returns what a run's rounds wait for behind a hit."""
    lead, draft = row["phases_us"]["lead"], row["phases_us"]["draft"]
    if is_draft_bound(row):
        return (
            f"the draft: {growth(row)}, the verification {1e3 * row['t_target_s']:.2f}, "
            f"and it waits {draft['wait']:.0f} µs a round"
        )
    host = {name: lead[name] for name in ("sample", "record", "send", "upload", "launch")}
    parts = ", ".join(f"{name} {us:.0f}" for name, us in host.items())
    return f"host and link (the draft waits {1e-3 * draft['wait']:.1f} ms a round): {parts} µs"


def main() -> int:
    """Prints a line for each run of SSD."""
    for folder in map(Path, sys.argv[1:]):
        runs = folder / "runs.jsonl"
        for line in map(json.loads, runs.read_text().splitlines() if runs.exists() else ()):
            row = {**line, **line.get("configuration", {})}
            if row["mode"] != "ssd" or row["batch_size"] != 1:
                continue
            said = f"{row['target']} T={row['tp']} D={row['num_drafts']} K={row['lookahead']}"
            said += f" fan-out {sum(row['fan_out'])} {row['backup']} {row['workload']}"
            said += f" {row['recording'].split('.')[0]}" if row["recording"] else ""
            print(f"{said}: {waits(folder, row)}; {why(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
