#!/usr/bin/env python3
"""Prints what saguaro.py and decide.py found, as Markdown: results/real-pair/tables.py FOLDER."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from mpissd.common.output import read_rows  # noqa: E402

Row = dict[str, Any]
RESAMPLES = 1000
TIMED = ("b", "method", "backup", "late hits", "tok/s", "theorem 17", "recurrence", "hits")
TIMED += ("growth / verification", "runs")


def saguaro(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each C: acceptance, hits behind a rejection and in all, tokens a round."""
    yield "| T | F | C | tokens a round | alpha | hits behind a rejection | hits in all |"
    yield "|---|---|---|---|---|---|---|"
    rng = np.random.default_rng(17)
    for row in sorted(rows, key=lambda r: (-r["temperature"], -r["fan_out"], -r["saguaro_c"])):
        counts, width = np.array(row["prompts"]), row["lookahead"] + 1
        picks = rng.integers(0, len(counts), (RESAMPLES, len(counts)))
        found = _rates(counts.sum(axis=0)[None], width), _rates(counts[picks].sum(axis=1), width)
        bounds = [np.percentile(column, [2.5, 97.5]) for column in found[1].T]
        cells = [
            f"{value:.3f} ({low:.3f} to {high:.3f})"
            for value, (low, high) in zip(found[0][0], bounds, strict=True)
        ]
        setting = f"{row['temperature']} | {row['fan_out']} | {row['saguaro_c']}"
        yield f"| {setting} | {' | '.join(cells)} |"


def _rates(total: Any, width: int) -> Any:
    """Returns [n, 4]: tokens a round, alpha, hits behind a rejection, hits; of counts [n, …]."""
    k = total[:, :width]
    accepted, rounds = k @ np.arange(width), k.sum(axis=1)
    rejected = k[:, :-1].sum(axis=1)
    asked, hit, whole, whole_hit = total[:, width : width + 4].T
    alpha = accepted / (accepted + rejected)
    rates = 1 + accepted / rounds, alpha, hit / asked, (hit + whole_hit) / (asked + whole)
    return np.stack(rates, axis=1)


def lists(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each list: what theorem 12's sum predicts, and what the replay hits."""
    yield "| recording | budget | list | predicted hit rate | replayed | inside the interval |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        low, high = row["hit_rate_95"]
        known = row["predicted"]
        predicted = "" if known is None else f"{known:.3f}"
        inside = "" if known is None else "yes" if low <= known <= high else "no"
        rate = f"{row['hit_rate']:.3f} ({low:.3f} to {high:.3f})"
        name = f"`{row['fan_out']}` {row['list']}"
        yield f"| {row['recording']} | {row['budget']} | {name} | {predicted} | {rate} | {inside} |"


def backups(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each batch: tok/s by backup, and theorem 17's b*."""
    yield "| recording | b | jit | fast, prompt lookup | fast, suffix | faster | b* by theorem 17 |"
    yield "|---|---|---|---|---|---|---|"
    for recording, batch in dict.fromkeys((r["recording"], r["batch_size"]) for r in rows):
        own = [r for r in rows if (r["recording"], r["batch_size"]) == (recording, batch)]
        jit, *fast = own
        rates = [r["tok_per_s"] for r in own]
        best = ("jit", "prompt", "suffix")[int(np.argmax(rates))]
        cells = " | ".join(f"{rate:.0f}" for rate in rates)
        yield f"| {recording} | {batch} | {cells} | {best} | {_crossing(jit, fast[-1])} |"


def _crossing(slow: Row, fast: Row) -> str:
    """Returns theorem 17's b*, from this batch's times and the hit rate behind jit backups."""
    h, verify = slow["hit_rate"], slow["t_verify_s"]
    n_slow, n_fast = (h * r["tokens_hit"] + (1 - h) * r["tokens_miss"] for r in (slow, fast))
    t_slow = slow["t_draft_s"] / verify  # and 0 for the fast one, in verifications
    # b* = ln[1 − (N_s − N_f) / (N_f·T_s − N_s·T_f)] / ln h, with T_f = 0.
    inside = 1 - (n_slow - n_fast) / (n_fast * t_slow)
    if not 0 < inside < 1:
        return "jit always" if inside <= 0 else "fast always"
    return f"{math.log(inside) / math.log(h):.2f}"


def cpu(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each cell that was timed on CPU cores: medians of its repeats."""
    yield f"| {' | '.join(TIMED)} |"
    yield "|---" * len(TIMED) + "|"
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        name = (row["mode"] != "ssd", row["batch_size"], row["on_late"], row["backup"], row["tp"])
        cells.setdefault(name, []).append(row)
    for name in sorted(cells):
        yield _timed(cells[name])


def _timed(runs: list[Row]) -> str:
    """Returns a cell's line; in brackets its only run's interval, or its lowest and highest run."""
    row, rates = runs[0], sorted(run["tok_per_s"] for run in runs)
    low, high = (row["low"], row["high"]) if len(runs) == 1 else (rates[0], rates[-1])
    is_ssd = row["mode"] == "ssd"
    method = "SSD, T=1 D=1" if is_ssd else f"SD inline, T={row['tp']}"
    how = (row["backup"], row["on_late"]) if is_ssd else ("", "")
    cells = [str(row["batch_size"]), method, *how]
    cells.append(f"{median(rates):.0f} ({low:.0f} to {high:.0f})")
    for key, form in (("theorem_17", ".0f"), ("recurrence", ".0f"), ("hit_rate", ".2f")):
        cells.append(format(median(r[key] for r in runs), form) if row[key] else "")
    growth = [run["t_growth_s"] / run["t_verify_s"] for run in runs if run["t_growth_s"]]
    cells.append(f"{median(growth):.1f}" if growth else "")
    return f"| {' | '.join([*cells, str(len(runs))])} |"


def main() -> int:
    """Prints every table whose rows are there."""
    folder = Path(sys.argv[1])
    tables = {"saguaro": saguaro, "lists": lists, "backups": backups, "cpu": cpu}
    for name, table in tables.items():
        if rows := read_rows(folder / f"{name}.jsonl"):
            print("\n".join(["", f"**{name}**", "", *table(rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
