#!/usr/bin/env python3
"""Prints a stream's curves and the share of each gap that was closed: table.py CURVES.jsonl.

The gap of a stage is that between the static draft's agreement and the offline one's best. Online
points are of the version in use; beside them stands the agreement of the weights as trained, and
whether they were refused as the next version or not judged (none was due, or too little held out).
A later stage's point at 0 prompts has what earlier stages taught of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mpissd.online.judging import gap_of, share_of  # noqa: E402

Point = dict[str, Any]
COLUMNS = ["stage", "schedule", "learned from", "rate", "times", "seen", "agreement", "alpha"]
COLUMNS += ["K=4", "K=7", "as trained", "of the gap"]


def table(points: list[Point]) -> list[str]:
    """Returns the lines of a Markdown table, a point of a curve each, stage after stage."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for stage in dict.fromkeys(point["stage"] for point in points):
        own = [point for point in points if point["stage"] == stage]
        lines += [_line(point, gap_of(own)) for point in own]
    return lines


def _line(point: Point, gap: tuple[float, float] | None) -> str:
    closed = ""
    if gap is not None and point["schedule"] == "online":
        closed = f"{share_of(point['agreement'], gap):.2f}"
    seen = point["prompts"] * point.get("epoch", 1)
    cells = [point["stage"], point["schedule"], *_how(point), str(seen)]
    cells += [f"{point[name]:.4f}" for name in ("agreement", "alpha")]
    cells += [f"{point[f'tokens_per_round_{k}']:.3f}" for k in (4, 7)]
    return f"| {' | '.join([*cells, _trained(point), closed])} |"


def _how(point: Point) -> tuple[str, ...]:
    """Returns what was learned from, the rate, and how often a prompt was learned from so far."""
    about = point["about"]
    if point["schedule"] == "static":
        return "", "", ""
    online = about["batch"] * about["steps_a_prompt"]
    times = online if point["schedule"] == "online" else point.get("epoch", 1)
    return about["learn_from"], f"{about['rate']:g}", f"{times:g}"


def _trained(point: Point) -> str:
    if "trained" not in point:
        return ""
    told = point["trained"]
    found = "not finite" if told is None else f"{told['agreement']:.4f}"
    verdict = {None: ", not judged", False: ", refused", True: ""}[point["published"]]
    return f"{found}{verdict}"


def main() -> int:
    """Prints the table."""
    points = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    print("\n".join(table(points)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
