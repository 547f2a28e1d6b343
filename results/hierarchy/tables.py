#!/usr/bin/env python3
"""Prints a table of docs/drafts.md from the rows beside it: results/hierarchy/tables.py NAME"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

import pages  # noqa: E402
from pages import PROMPTS, Lines, head, line, share  # noqa: E402

from mpissd.common.output import read_rows  # noqa: E402

Row = dict[str, Any]
RATES_RUN = 2  # 10 prompts of 96 tokens


def rows(name: str) -> list[Row]:
    """Returns the rows of a file beside this script."""
    return read_rows(HERE / f"{name}.jsonl")


def counted(kind: str, lookahead: int) -> Row:
    """Returns what K tokens take with the suffix automaton, counted on a recording."""
    wanted = (f"smollm2-{kind}.npz", lookahead, "suffix")
    (row,) = (
        r for r in rows("forwards") if (r["recording"], r["lookahead"], r["draft_lookup"]) == wanted
    )
    return row


def staged() -> Lines:
    """Forwards and time of K tokens, counted on all recordings and by theory."""
    names = ("prompts", "K", "forwards: counted", "theory")
    yield from head(*names, "time over K single steps: counted", "theory")
    for lookahead in (4, 7):
        for kind, name in PROMPTS.items():
            row = counted(kind, lookahead)
            cells = [f"{row['forwards']:.2f}", f"{row['theory_forwards']:.2f}"]
            cells += [share(row[key] / lookahead) for key in ("time", "theory_time")]
            yield line([name, lookahead, *cells])


def expected(kind: str) -> float:
    """Returns the gain at K = 4 by the forwards' times: the draft's counted time for four steps."""
    by_rows: dict[tuple[bool, int], float] = {
        (row["model"] == "smollm2-draft", row["rows"]): row["cpu_ms"] for row in rows("costs")
    }
    step, verify = by_rows[True, 1], by_rows[False, 5]
    return (verify + 4 * step) / (verify + counted(kind, 4)["time"] * step)


def decoded() -> Lines:
    """Tokens a second of one core's own time, and gains in three runs."""
    names = ("prompts", "AR", "lookup alone", "draft", "draft + suffix", "forwards of 4")
    yield from head(*names, "gain, three runs", "expected", "over the lookup alone")
    every = {(row["run"], row["prompts"], row["method"]): row for row in rows("decoded")}
    runs = sorted({run for run, _, _ in every})

    def over(kind: str, other: str) -> list[float]:
        key = "tok_per_core_s"
        both = ((every[n, kind, "draft4+suffix"], every[n, kind, other]) for n in runs)
        return [mine[key] / theirs[key] for mine, theirs in both]

    for kind, name in PROMPTS.items():
        methods = ("ar", "lookup", "draft4", "draft4+suffix")
        cells = [f"{every[RATES_RUN, kind, of]['tok_per_core_s']:.1f}" for of in methods]
        cells.append(f"{every[RATES_RUN, kind, 'draft4+suffix']['draft_forwards']:.2f}")
        cells.append(", ".join(map(pages.gain, over(kind, "draft4"))))
        cells.append(pages.gain(expected(kind)))
        cells.append(", ".join(share(ratio, 2) for ratio in over(kind, "lookup")))
        yield line([name, *cells])


def h200() -> Lines:
    """SD inline on one H200: the lookup alone, the draft alone, the draft over the lookup."""
    names = ("prompts", "lookup alone, K=5")
    for k in (4, 7):
        names += (f"draft, K={k}", f"draft + suffix, K={k} (of it; medians)", f"forwards of {k}")
    yield from head(*names)
    every: dict[tuple[str, int, str | None], Row] = {}
    for row in rows("h200"):
        kind = Path(row["provenance"]["sweep"]["flags"]["prompts"]).stem
        every[kind, row["lookahead"], row["draft_lookup"]] = row
    for kind, name in PROMPTS.items():
        cells = [f"{every[kind, 5, None]['tok_per_s']:,.0f}"]
        for k in (4, 7):
            alone, both = every[kind, k, None], every[kind, k, "suffix"]
            ratio = share(both["tok_per_s"] / alone["tok_per_s"], 2)
            middle = share(alone["round_us"]["p50"] / both["round_us"]["p50"], 2)
            told = f"{both['tok_per_s']:,.0f} ({ratio}; {middle})"
            cells += [f"{alone['tok_per_s']:,.0f}", told, f"{both['draft_forwards']:.2f}"]
        yield line([name, *cells])


TABLES = {of.__name__: of for of in (staged, decoded, h200)}

if __name__ == "__main__":
    sys.exit(pages.printed(TABLES, __doc__))
