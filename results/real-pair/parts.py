#!/usr/bin/env python3
"""The pair's laws by position in the context, and at temperatures above 0: OUT/parts.jsonl.

    results/real-pair/parts.py OUT        (a minute on one core)

At temperature 0 from the recordings, K = 4. Above it from the rows of warm.jsonl, which `mpissd
run` measured (README.md has the command); their rounds lie in rounds/.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from pages import PROMPTS  # noqa: E402

from mpissd.common.output import read_rows  # noqa: E402
from mpissd.lab.laws.command import Source, measured, read  # noqa: E402

LOOKAHEAD = 4
KEPT = ("rounds", "tokens_a_round", "tokens_a_round_95", "alpha", "alpha_95")


def whole(source: Source, prompts: str) -> Iterator[dict[str, Any]]:
    """Yields one line of all rounds, with their laws, and a line for each range of positions."""
    document = measured([source], LOOKAHEAD)
    at = next(one for one in document["laws"] if one["lookahead"] == LOOKAHEAD)
    told = {"prompts": prompts, "temperature": source.about["temperature"] or 0.0}
    told |= {"sha256": source.about["sha256"], "position": None}
    ends = {end: at[end] for end in ("rejected", "complete")}
    fits = {f"fit_{end}": of["fit"] for end, of in ends.items()}
    misses = {end: {f: one["miss"] for f, one in of["misses"].items()} for end, of in ends.items()}
    yield {**told, **{key: at[key] for key in KEPT}, **fits, "misses": misses}
    for part in document["parts"]:
        if part["position"]:
            cut = {key: part[key] for key in ("position", *KEPT, "misses")}
            yield {**told, **cut}


def lines() -> Iterator[dict[str, Any]]:
    """Yields the lines of every recording and row."""
    for name in PROMPTS:
        (source,) = read(str(HERE.parent / "recordings" / f"smollm2-{name}.npz"))
        yield from whole(source, name)
    rows = read_rows(HERE / "warm.jsonl")
    for row, source in zip(rows, read(str(HERE / "warm.jsonl")), strict=True):
        assert str(source.about["file"]).endswith(row["run_id"])
        (given,) = (x for x in row["provenance"]["command"] if x.startswith("--prompts="))
        yield from whole(source, Path(given).stem)


def main() -> int:
    """Writes the lines."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with (out / "parts.jsonl").open("w") as file:
        for line in lines():
            file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
