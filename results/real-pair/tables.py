#!/usr/bin/env python3
"""Prints what the scripts here found, as Markdown: results/real-pair/tables.py FOLDER [TABLE].

Without a table's name it prints all of which FOLDER has rows, each under its name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

import numpy as np  # noqa: E402
from pages import PROMPTS, between, head, line, share  # noqa: E402

from mpissd.common.output import read_rows  # noqa: E402

Row = dict[str, Any]
RESAMPLES = 1000
TIMED = ("b", "method", "backup", "late hits", "tok/s", "theorem 17", "recurrence", "hits")
TIMED += ("growth / verification", "runs")


def saguaro(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each C: acceptance, hits behind a rejection and in all, tokens a round."""
    yield "| T | F | C | tokens a round | alpha | hits behind a rejection | hits in all |"
    yield "|---|---|---|---|---|---|---|"
    for row in sorted(rows, key=lambda r: (-r["temperature"], -r["fan_out"], -r["saguaro_c"])):
        rng = np.random.default_rng(17)  # other rows do not move a row's interval
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
    """Yields a line for each list: what theorem 12's sum predicts, and what the replay hits; by the
    laws of the same prompts, and on the second half of the prompts by the laws of the first."""
    yield (
        "| recording | budget | list | predicted hit rate | replayed | inside | list of the first"
        " half | predicted | replayed on the second half | inside |"
    )
    yield "|---" * 10 + "|"
    tested = {kind: [r for r in rows if r["fitted_on"] == kind] for kind in ("same", "first half")}
    for same, other in zip(*tested.values(), strict=True):
        assert all(same[key] == other[key] for key in ("recording", "budget", "fan_out"))
        name = f"{same['recording']} | {same['budget']} | `{same['fan_out']}`"
        yield f"| {name} {' | '.join(_listed(row) for row in (same, other))} |"
    yield ""
    said = [f"by the laws of the {kind} prompts {_inside(of)}" for kind, of in tested.items()]
    yield f"Predictions inside the interval: {'; '.join(said)}.".replace("half prompts", "half")


def _inside(rows: Sequence[Row]) -> str:
    known = [row for row in rows if row["predicted"] is not None]
    inside = sum(low <= r["predicted"] <= high for r in known for low, high in [r["hit_rate_95"]])
    errors = [row["predicted"] - row["hit_rate"] for row in known]
    worst = max(errors, key=abs)
    return f"{inside} of {len(known)}, mean error {np.mean(errors):+.3f}, largest {worst:+.3f}"


def _listed(row: Row) -> str:
    low, high = row["hit_rate_95"]
    known = row["predicted"]
    predicted = "" if known is None else f"{known:.3f}"
    inside = "" if known is None else "yes" if low <= known <= high else "no"
    return (
        f"{row['list']} | {predicted} | {row['hit_rate']:.3f} ({low:.3f} to {high:.3f}) | {inside}"
    )


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


def laws(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each recording: acceptance, the laws of misses and correlations."""
    ends = [
        name for end in ("a rejection", "K accepted") for name in (f"A behind {end}", "r", "floor")
    ]
    last = ("accepted: lag 1, between sequences", "misses: lag 1, between")
    yield from head("prompts", "tokens a round", "alpha", *ends, *last)
    for row in rows:
        cells = [between(row["tokens_a_round"], row["tokens_a_round_95"])]
        cells.append(f"{row['alpha']:.3f}")
        for fit in (row["fit_rejected"], row["fit_complete"]):
            cells += [between(fit[key], fit[f"{key}_95"]) for key in ("A", "r")]
            cells.append(f"{fit['floor']:.3f}")
        for of in (row["correlation"]["accepted"], row["correlation"]["missed"]):
            cells.append(f"{of['lag1']:.2f}, {of['between']:.2f}")
        yield line([_prompts(row), *cells])


def positions(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each recording and range of positions: acceptance, and misses by F."""
    names = [f"{end}, F = {f}" for end in ("miss behind a rejection", "K accepted") for f in _FS]
    yield from head("prompts", "context", "rounds", "tokens a round", "alpha", *names)
    for row in (r for r in rows if r["position"] and not r["temperature"]):
        low, high = row["position"]
        cells = [PROMPTS[row["prompts"]], f"{low} to {high - 1}", str(row["rounds"])]
        cells.append(between(row["tokens_a_round"], row["tokens_a_round_95"]))
        yield line([*cells, f"{row['alpha']:.3f}", *_missed(row)])


def warm(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each kind of prompts and temperature: acceptance, and laws of misses."""
    ends = ("a rejection", "K accepted")
    names = [name for end in ends for name in (f"A behind {end}", "r", *(f"F = {f}" for f in _FS))]
    yield from head("prompts", "T", "rounds", "tokens a round", "alpha", *names)
    warmed = {row["prompts"] for row in rows if row["temperature"]}
    found = [row for row in rows if not row["position"] and row["prompts"] in warmed]
    for row in sorted(found, key=lambda r: (list(PROMPTS).index(r["prompts"]), r["temperature"])):
        cells = [PROMPTS[row["prompts"]], f"{row['temperature']:g}", str(row["rounds"])]
        cells += [between(row[key], row[f"{key}_95"]) for key in ("tokens_a_round", "alpha")]
        for end in ("rejected", "complete"):
            fit, missed = row[f"fit_{end}"], row["misses"][end]
            cells += (
                [between(fit[key], fit[f"{key}_95"]) for key in ("A", "r")] if fit else ["–"] * 2
            )
            cells += [f"{missed[f]:.3f}" for f in _FS]
        yield line(cells)


_FS = ("1", "4")  # what recordings and rows both have, of the fan-outs that are listed


def _missed(row: Row) -> Iterator[str]:
    """Yields misses behind a rejection and behind K accepted tokens."""
    for end in ("rejected", "complete"):
        yield from (f"{row['misses'][end][f]:.3f}" if row["misses"][end] else "–" for f in _FS)


def _prompts(row: Row) -> str:
    return PROMPTS[row["recording"].removeprefix("smollm2-").removesuffix(".npz")]


def lookup(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each recording and K: tokens a round of the draft and of the lookups."""
    names = ("prompts", "of the answer in the prompt", "K")
    yield from head(*names, "draft model", "prompt lookup", "suffix automaton")
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((_prompts(row), row["lookahead"]), {})[row["draft"]] = row
    for (name, lookahead), of in cells.items():
        if lookahead in (4, 8):
            found = [of[draft] for draft in ("draft model", "prompt", "suffix")]
            rates = [between(r["tokens_a_round"], (r["low"], r["high"])) for r in found]
            yield line([name, f"{found[0]['repeats_prompt']:.0%}", lookahead, *rates])


def pays(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each T, F and C < 1: tokens a second over those of C = 1, by T_SD.

    A round takes 1 + (1 − h)·T_SD verifications, as drafting behind a hit takes no time. Prompts
    are resampled in pairs.
    """
    each = (0.25, 0.5, 1.0)
    yield from head("T", "F", "C", *(f"T_SD = {share(t_sd, 2)}" for t_sd in each))
    cells = {(r["temperature"], r["fan_out"], r["saguaro_c"]): np.array(r["prompts"]) for r in rows}
    for temperature, fan_out, c in sorted(cells, reverse=True):
        if c < 1:
            both = cells[temperature, fan_out, c], cells[temperature, fan_out, 1.0]
            found = (_over(both, t_sd, rows[0]["lookahead"] + 1) for t_sd in each)
            yield line([temperature, fan_out, c, *(between(*ratio) for ratio in found)])


def _over(both: Any, t_sd: float, width: int) -> tuple[float, list[float]]:
    """Returns the ratio of tokens a second of two cells [prompts, …], and its 95% interval."""
    rng, count = np.random.default_rng(17), len(both[0])
    picks = np.concatenate([np.arange(count)[None], rng.integers(0, count, (RESAMPLES, count))])
    tokens, hits = np.array(
        [_rates(cell[picks].sum(axis=1), width)[:, [0, 3]].T for cell in both]
    ).transpose(1, 0, 2)
    speeds = tokens / (1 + (1 - hits) * t_sd)
    ratios = speeds[0] / speeds[1]
    return float(ratios[0]), np.percentile(ratios[1:], [2.5, 97.5]).tolist()


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


TABLES = {"saguaro": saguaro, "pays": pays, "lists": lists, "backups": backups, "cpu": cpu}
TABLES |= {"laws": laws, "lookup": lookup, "positions": positions, "warm": warm}
FILES = {"pays": "saguaro", "positions": "parts", "warm": "parts"}


def main() -> int:
    """Prints every table whose rows are there, or the one that is named."""
    folder, *wanted = sys.argv[1:]
    for name, table in TABLES.items():
        if wanted and name not in wanted:
            continue
        rows = read_rows(Path(folder, f"{FILES.get(name, name)}.jsonl"))
        if rows:
            title = () if wanted else ("", f"**{name}**", "")
            print("\n".join([*title, *table(rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
