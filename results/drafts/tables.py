"""Prints a table of docs/drafts.md from rows in this folder: python -m results.drafts.tables NAME

before.json and single.json are the reports of the two drafts that were shipped before.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.output import read_rows
from results import pages
from results.pages import PROMPTS, Lines, head, line, share

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
Row = dict[str, Any]
SHIPPED = ROOT / "mpissd/engine/model/shipped/smollm2_draft/report.json"
DITTO = '"'
KINDS = ("chat", "humaneval")
ONE_FORWARD = ("chains", "4"), ("trees", "15")


def rows(name: str) -> list[Row]:
    """Returns the lines of the file `name` (in this script's folder) as dictionaries."""
    return read_rows(HERE / f"{name}.jsonl")


def report(path: Path) -> Row:
    """Reads the JSON report on a draft model that its training wrote."""
    return dict(json.loads(path.read_text()))


def evaluation(row: Row, kind: str) -> Row:
    """Returns the part of a draft's report that evaluates it on one kind of prompts."""
    by_kind = row["evaluation"]
    return dict(by_kind.get(f"smollm2-{kind}") or by_kind[kind])


def tokens(row: Row, kind: str, lookahead: int) -> float:
    """Returns the mean tokens a round of SD with the draft of report `row`, on one kind of prompts,
    at K = lookahead."""
    return float(evaluation(row, kind)["by_lookahead"][str(lookahead)]["tokens_per_round"])


def shipped() -> Lines:
    """Yields the table that compares the shipped draft model with the one shipped before."""
    drafts = {"earlier": report(HERE / "single.json"), "both ways": report(SHIPPED)}
    names = ("prompts", "draft", "greedy agreement", "overlap at T=1", "tokens a round, K=4", "K=7")
    yield from head(*names, "one forward: chain, K=4", "tree of 15")
    for kind in KINDS:
        prompts = f"{evaluation(drafts['both ways'], kind)['answers']} {PROMPTS[kind]}"
        for name, draft in drafts.items():
            of = evaluation(draft, kind)
            cells = [name, share(of["greedy_agreement"]), share(of["alpha"])]
            cells += [f"{tokens(draft, kind, k):.2f}" for k in (4, 7)]
            told = of.get("parallel")
            cells += [f"{told[part][size]:.2f}" if told else "" for part, size in ONE_FORWARD]
            yield line([prompts if name == "earlier" else "", *cells])


def recipe() -> Lines:
    """Yields the table of four drafts that differ in layers, head, optimiser, and use of the
    target's hidden states."""
    names = ("layers", "head", "optimiser", "states", "chat: agreement", "alpha")
    yield from head(*names, "tokens a round, K=7", "own conversations")
    before = [""] * 4
    spelled = {"adamw": "AdamW", "muon": "Muon"}
    for row in rows("variants"):
        layers = row["origin"].removeprefix("the target's layers ").replace(",", ", ")
        owner = "own" if row["head"] == "own" else "target's"
        states = "target's"
        if row["on_policy"]:
            assert row["on_policy"] == 0.25
            states = "a quarter of the later ones proposed"
        names = [layers, f"{owner}, {row['head_vocab']:,}", spelled[row["optimizer"]], states]
        same = [new == old for new, old in zip(names[:3], before, strict=False)]
        shown = [DITTO if s else name for s, name in zip([*same, False], names, strict=True)]
        of = evaluation(row, "chat")
        cells = [share(of["greedy_agreement"]), share(of["alpha"])]
        own_agreement = evaluation(row, "own")["greedy_agreement"]
        yield line([*shown, *cells, f"{tokens(row, 'chat', 7):.2f}", share(own_agreement)])
        before = names


def rates() -> tuple[dict[tuple[str, int], Row], Row]:
    """Returns {(shape of the draft, K): row measured on the H200}, and the row of AR."""
    by_mode = {mode: [row for row in rows("h200") if row["mode"] == mode] for mode in ("sd", "ar")}
    (ar,) = by_mode["ar"]
    return {(row["draft"], row["lookahead"]): row for row in by_mode["sd"]}, ar


def spelled(shape: str) -> str:
    """Returns a draft's shape, such as "1x18x3x3200", as the page writes it."""
    return shape.replace("x", " x ")


def kv_bytes(shape: str) -> int:
    """Returns the KV-cache bytes of one token in float16, for a draft of this shape with heads of
    64 numbers."""
    layers, _, kv_heads, _ = map(int, shape.split("x"))
    return 2 * 2 * layers * kv_heads * 64


def shapes() -> Lines:
    """Yields the table of drafts with equal numbers of parameters, wide to deep: acceptance, and
    tok/s of SD inline on one H200."""
    names = ("layers x heads x KV heads x FFN", "steps", "chat: cross-entropy", "agreement")
    names += ("alpha", "tokens a round, K=4", "K=7", "HumanEval, K=7", "KV bytes a token")
    yield from head(*names, "T_SD, K=2", "H200: tok/s, K=2", "K=4", "K=7")
    by_shape, ar = rates()
    cells = []
    for row in rows("distilled"):
        of = evaluation(row, "chat")
        name = row["draft"]
        cell = [spelled(name), f"{row['steps']:,}", f"{of['cross_entropy']:.3f}"]
        cell += [share(of["greedy_agreement"]), share(of["alpha"])]
        cell += [f"{tokens(row, 'chat', k):.2f}" for k in (4, 7)]
        cell += [f"{tokens(row, 'humaneval', 7):.2f}", f"{kv_bytes(name):,}"]
        cell += [share(by_shape[name, 2]["T_SD"])]
        cells.append([*cell, *(f"{by_shape[name, k]['tok_per_s']:,.0f}" for k in (2, 4, 7))])
    columns = [list(column) for column in zip(*cells, strict=True)]
    pages.best(columns, {2: min, **dict.fromkeys((3, 4, 5, 6, 7, 10), max)})
    yield from map(line, zip(*columns, strict=True))
    yield line(["AR", *[""] * 4, *"111", "", "", f"{ar['tok_per_s']:,.0f}", "", ""])


def steps() -> Lines:
    """Yields the table of the time of a draft step on one CPU core for each draft's shape, and of
    the tok/s of SD inline."""
    names = ("shape", "a step, ms", "T_SD, K=4", "K=7", "KV bytes a token")
    yield from head(*names, "predicted tok/s at K=4: chat", "HumanEval")
    for row in rows("steps"):
        assert row["kv_bytes"] == kv_bytes(row["shape"])
        at = row["predicted"]
        cells = [share(row["step_ms"], 2), share(at["4"]["T_SD"]), share(at["7"]["T_SD"])]
        cells += [f"{row['kv_bytes']:,}"]
        cells += [f"{at['4'][f'smollm2-{kind}']:.0f}" for kind in KINDS]
        yield line([spelled(row["shape"]), *cells])


def halves() -> Lines:
    """Yields the table of rates and KV bytes of drafts with half the layers, relative to all."""
    yield from head(
        "wide over deep", "H200, K=2, measured", "CPU core, chat at K=4, predicted", "KV bytes"
    )
    by_shape, _ = rates()
    cpu = {row["shape"]: row["predicted"]["4"]["smollm2-chat"] for row in rows("steps")}
    layers = {int(name.split("x")[0]): name for name in cpu}
    for wide in sorted(n for n in layers if 2 * n in layers):
        both = layers[wide], layers[2 * wide]
        measured = [by_shape[shape, 2]["tok_per_s"] for shape in both]
        predicted = [cpu[shape] for shape in both]
        sizes = [kv_bytes(shape) for shape in both]
        cells = [half / full for half, full in (measured, predicted, sizes)]
        yield line([f"{wide} of {2 * wide} layers", *map(pages.gain, cells)])


def spearman(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Returns Spearman's correlation of x and y, and the ends of its 95% interval.

    The interval is Fisher's, with the variance (1 + r²/2) / (n − 3) of Bonett and Wright (2000,
    Psychometrika 65, equation 4). Drafts count as independent, although those of one training are
    not. If both orders are the same, there is no interval (NaN)."""
    ranks = _ranks(x), _ranks(y)
    r = float(np.corrcoef(*ranks)[0, 1])
    if np.array_equal(*ranks):
        return 1.0, math.nan, math.nan
    middle = math.atanh(r)
    wide = 1.96 * math.sqrt((1 + r * r / 2) / (len(x) - 3))
    return r, math.tanh(middle - wide), math.tanh(middle + wide)


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    """Returns the ranks of values, from 1; equal values have the mean of their ranks."""
    array = np.asarray(values, float)
    below = (array[:, None] > array).sum(axis=1)
    equal = (array[:, None] == array).sum(axis=1)
    return below + (equal + 1) / 2


def all_drafts() -> list[Row]:
    """Returns the reports of all drafts that were evaluated on both kinds of prompts."""
    other = read_rows(ROOT / "results/tasks/distilled.jsonl")
    earlier = (report(HERE / name) for name in ("before.json", "single.json"))
    reports = [*earlier, report(SHIPPED)]
    return [*rows("distilled"), *rows("variants"), *other, *reports]


def accuracy() -> Lines:
    """Yields the table of Spearman's correlations of drafts' accuracy with their acceptance."""
    yield from head("accuracy", "tokens a round, K=4, on", "the five shapes", "all drafts")
    sets: Sequence[Sequence[Row]] = (rows("distilled"), all_drafts())
    for key, name in (("greedy_agreement", "agreement"), ("cross_entropy", "− cross-entropy")):
        for kind, other in product(KINDS, KINDS):
            cells = [_correlation(drafts, key, kind, other) for drafts in sets]
            yield line([f"{name}, {PROMPTS[kind]}", PROMPTS[other], *cells])


def _correlation(drafts: Sequence[Row], key: str, kind: str, other: str) -> str:
    sign = -1 if key == "cross_entropy" else 1
    rows = [row for row in drafts if key in evaluation(row, kind)]
    pairs = [(sign * evaluation(row, kind)[key], tokens(row, other, 4)) for row in rows]
    r, low, high = spearman(*zip(*pairs, strict=True))
    bounds = f"{_signed(low)} to {_signed(high)}" if r < 1 else "one order"
    return f"{_signed(r)} ({bounds}), n = {len(pairs)}"


def _signed(value: float) -> str:
    return share(value, 2).replace("-", "−")


def longer() -> Lines:
    """Yields the table of tokens a round by the number of tokens already answered."""
    yield from head("tokens before the round", "answers", "repeated", "K=4", "K=7")
    parts: dict[tuple[int, int | None], dict[int, Row]] = {}
    for row in read_rows(ROOT / "results/recordings/longer.jsonl"):
        parts.setdefault((row["from"], row["to"]), {})[row["lookahead"]] = row
    for (low, high), at in parts.items():
        name = "all" if (low, high) == (0, None) else f"{low} to {350 if high is None else high}"
        cells = [pages.between(at[k]["tokens_a_round"], at[k]["tokens_a_round_95"]) for k in (4, 7)]
        yield line([name, at[4]["prompts"], share(at[4]["repeats"], 2), *cells])


TABLES = {of.__name__: of for of in (shipped, recipe, shapes, steps, halves, accuracy, longer)}

if __name__ == "__main__":
    sys.exit(pages.printed(TABLES, __doc__))
