#!/usr/bin/env python
"""Prints what OUT/pools.jsonl says, a line a device, pair, T, b and law.

results/pools/table.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LATER = 1.1  # times a draft each
HEAD = (
    "| device | pair | T | b | acceptance, hits | a draft each | most a GPU | G "
    "| over a draft each | over SD inline, same T | over AR and SD inline, any T "
    "| at most 10% later |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)
Line = dict[str, Any]


def case_of(row: Line) -> tuple[Any, ...]:
    """What a line of the table is of."""
    return (*(row[name] for name in ("device_name", "pair", "tp")), *laws_of(row))


def laws_of(row: Line) -> tuple[Any, ...]:
    """The batch and the laws of a row."""
    return tuple(row[name] for name in ("batch_size", "acceptance", "hit_law"))


def table(rows: list[Line]) -> str:
    """The table of all cases that have pools."""
    cases: dict[tuple[Any, ...], list[Line]] = {}
    for row in rows:
        cases.setdefault(case_of(row), []).append(row)
    lines = [line(part, rows) for part in cases.values() if any(r["targets"] > 1 for r in part)]
    return "\n".join([HEAD, *lines])


def line(part: list[Line], rows: list[Line]) -> str:
    """The line of one case; rows: all of them, for the uses at other T."""
    pools = {row["targets"]: row for row in part if row["mode"] == "ssd"}
    each, best = pools[1], max(pools.values(), key=rate)
    (inline,) = (row for row in part if row["mode"] == "sd")
    others = (
        row
        for row in rows
        if row["mode"] != "ssd"
        and (row["device_name"], row["pair"]) == (each["device_name"], each["pair"])
        and laws_of(row) == laws_of(each)
    )
    served = max(n for n, row in pools.items() if row["token_ms"] <= LATER * each["token_ms"])
    gains = (rate(best) / rate(row) for row in (each, inline, max(others, key=rate)))
    device = str(each["device_name"]).removeprefix("NVIDIA ").split()[0] + ", simulated"
    laws = f"{each['acceptance'].removeprefix('alpha:')}, {each['hit_law']}"
    cells = [device, each["pair"], each["tp"], each["batch_size"], laws]
    cells += [told(each), told(best), best["targets"], *(f"{gain:.2f}×" for gain in gains), served]
    return f"| {' | '.join(map(str, cells))} |"


def rate(row: Line) -> float:
    """Tokens a second and GPU."""
    return float(row["tok_per_s_per_gpu"])


def told(row: Line) -> str:
    """Tokens a second and GPU, milliseconds a token, and the hit rate."""
    digits = 0 if rate(row) >= 1000 else 1
    return f"{rate(row):.{digits}f}, {row['token_ms']:.2f} ms, {row['hit_rate']:.2f}"


if __name__ == "__main__":
    text = (Path(sys.argv[1]) / "pools.jsonl").read_text()
    print(table([json.loads(each) for each in text.splitlines()]))
