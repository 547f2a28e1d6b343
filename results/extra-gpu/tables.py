"""Prints the tables of docs/study.md from rows and cells: python -m results.extra-gpu.tables

measured   every measured use of as many GPUs, beside what `plan` predicts of it
laws       SSD over the strongest other use, by prompts, temperature and GPUs
closed     the closed form beside measured gains
five       70B/1B on five H100s, beside the paper
answers    README's three lines
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.figures.study import (
    FITTED,
    best_shapes,
    errors,
    gains_of,
    on_gpus,
    pays,
    used,
    whole_pays,
)
from analysis.rows import load
from analysis.select import SHAPE, key, where
from analysis.select import gain as gain_of
from results.pages import Lines, head, line, printed, share

HERE = Path(__file__).resolve().parent
PAPER = {"AR, T=4": "54.7", "SD inline, T=4": "161.8", "SSD, T=4": "255.8"}
_NAMES = "AR", "SD inline", "tree inline", "lookup", "SSD", "SSD tree"
_CELL = {
    "chat": "chat, temp. 0",
    "code": "humaneval, temp. 0",
    "code at temp. 0.7": "humaneval, temp. 0.7",
}


def cells(device: str = "NVIDIA H200") -> pd.DataFrame:
    """Returns the predicted cells of a device."""
    return where(pd.read_json(HERE / "cells.jsonl", lines=True), device_name=device)


def rows() -> pd.DataFrame:
    """Returns all measured rows of H200s."""
    return where(load([HERE.parent]).rows, device_name="NVIDIA H200")


def measured() -> Lines:
    """Yields a line a pair, prompts and GPUs: tok/s of each use, in brackets the prediction."""
    yield from head("pair, prompts, GPUs", *_NAMES, *_ENDS)
    for setting, texts, _, ends in _settings():
        yield line([setting, *texts, *ends])


_ENDS = "SSD over the strongest", "predicted", "at most"
Setting = tuple[str, list[str], str, list[str]]


def _settings() -> Iterator[Setting]:
    """Yields (setting, tok/s of each use as text, the strongest other use, the cells of _ENDS)."""
    whole, predicted = used(rows()), cells()
    is_shared = whole["setting"].isin(whole.loc[whole["mode"] == "ssd", "setting"])
    whole = whole[is_shared & (whole["ranks"] > 1)].sort_values(["ranks", "law"])
    for setting, here in whole.groupby("setting", sort=False):
        first = here.iloc[0]
        cell = {"pair": f"{first['pair'].lower()}/1b", "law": _CELL[first["law"]]}
        at = on_gpus(where(predicted, batch_size=1, host=1.0, **cell), int(first["ranks"]))
        known = at.set_index("use")["tok_per_s"]
        if where(at, use="SSD")["tree"].notna().any():
            known = known.rename({"SSD": "SSD tree"})
        texts, kinds = [], {**dict.fromkeys(_NAMES, here.iloc[:0]), **best_shapes(here)}
        for use in _NAMES:
            of = where(here, use=use)
            rates = -np.sort(-of["tok_per_s"])
            runs = ", ".join(dict.fromkeys(f"{rate:.0f}" for rate in rates)) or "–"
            texts.append(runs + (f" ({known[use]:.0f})" if len(of) and use in known else ""))
        ssd = max((kinds.pop(use) for use in ("SSD", "SSD tree")), key=_median)
        strongest = max(kinds, key=lambda use: _median(kinds[use]))
        other = kinds[strongest]
        over, gain = gain_of(ssd, other), gains_of(where(predicted, **cell), int(first["ranks"]))
        told = share(_median(ssd) / _median(other), 2)
        if over is not None and over.is_headline:
            told = f"{share(over.speedup, 2)} ({share(over.low, 2)} to {share(over.high, 2)})"
        expected = where(gain, batch_size=1, host=1.0)["gain"].iloc[0]
        most = _prompt(where(here, mode="ssd")).max() / _median(other)
        yield str(setting), texts, strongest, [told, share(expected, 2), share(most, 2)]


def _prompt(lines: pd.DataFrame) -> pd.Series[float]:
    """Returns tok/s of SSD if its draft were never late and a round's host took .1 ms, by shape."""
    missed_s = (1 - lines["hit_rate"]) * lines["t_draft_s"] * (lines["backup"] != "fast")
    rates = lines["acceptance_length"] / (lines["t_target_s"] + missed_s + 1e-4)
    return rates.groupby(key(lines, SHAPE)).median()


def _median(lines: pd.DataFrame) -> float:
    return float(lines["tok_per_s"].median()) if len(lines) else 0.0


def laws() -> Lines:
    """Yields a line a law: alpha, SSD's hit rate, and gains with the strongest other use."""
    one = where(cells(), batch_size=1, host=1.0)
    shown = [("8b/1b", 2), ("8b/1b", 3), ("8b/1b", 4), ("70b/1b", 2), ("70b/1b", 3), ("70b/1b", 4)]
    names = [f"{pair.upper()}, {gpus} GPUs" for pair, gpus in shown]
    yield from head("prompts", "alpha", "hits", *names, "per GPU, at most")
    every = {n: gains_of(one, n).set_index(["pair", "law"]) for n in (2, 3, 4)}
    rates = one.assign(rate=one["tok_per_s"] / (one["tp"] + one["num_drafts"]))
    is_ssd = rates["mode"] == "ssd"
    a_gpu = [rates[of].groupby(["pair", "law"])["rate"].max() for of in (is_ssd, ~is_ssd)]
    share_a_gpu = (a_gpu[0] / a_gpu[1]).groupby("law").max()
    for law in sorted({*one["law"]}):
        alpha, hits = where(one, law=law)["alpha"].iloc[0], every[2]["hits"][("8b/1b", law)]
        at = [every[n].loc[(pair, law)] for pair, n in shown]
        gains = [f"{share(of['gain'], 2)} {of['other'].removesuffix(' inline')}" for of in at]
        yield line([law, share(alpha, 2), share(hits, 2), *gains, share(share_a_gpu[law], 2)])


def closed() -> Lines:
    """Yields how far the closed form is from measured gains."""
    every = rows()
    products = [*pays(every)]
    groups = {
        f"products, {FITTED}, whose host gaps were taken": [
            p for p in products if p.folder == FITTED
        ],
        "products, other visits": [p for p in products if p.folder != FITTED],
        "whole transformers, chained inline rounds": [*whole_pays(every)],
    }
    yield from head("rows", "gains", "error, median", "largest", "right side of 1", "by the rule")
    for name, some in groups.items():
        off = errors(some)
        same = sum((one.predicted > 1) == (one.measured > 1) for one in some)
        rule = sum((one.hidden_s > one.saved_s) == (one.measured > 1) for one in some)
        yield line([name, len(some), f"{np.median(off):.1%}", f"{off.max():.1%}", same, rule])


def five() -> Lines:
    """Yields tok/s of each use of five H100s by law; the paper's are of its own prompts."""
    every, columns = cells("NVIDIA H100 80GB SXM"), {}
    for use in ("AR", "SD inline"):
        columns[f"{use}, T=4"] = on_gpus(every[every["tp"] == 4], 4), use
    columns |= {f"{use}, T=5": (on_gpus(every, 5), use) for use in _NAMES[:4]}
    columns["SSD, T=4"] = on_gpus(every, 5), "SSD"
    yield from head("prompts", *columns)
    for law in dict.fromkeys(every["law"]):
        at = [where(lines, law=law, use=use)["tok_per_s"] for lines, use in columns.values()]
        yield line([law, *(f"{rates.iloc[0]:.0f}" if len(rates) else "–" for rates in at)])
    yield line(["the paper", *(PAPER.get(name, "–") for name in columns)])


def answers() -> Lines:
    """Yields README's lines: the paper's setting first, then what was measured."""
    every = cells("NVIDIA H100 80GB SXM")
    four, five_gpus = on_gpus(every[every["tp"] == 4], 4), on_gpus(every, 5)

    def rate(uses: pd.DataFrame, law: str, use: str) -> float:
        return float(where(uses, law=law, use=use)["tok_per_s"].iloc[0])

    chain = rate(five_gpus, "alpha .8", "SSD") / rate(four, "alpha .8", "SD inline")
    trees = [rate(five_gpus, n, "SSD") / rate(five_gpus, n, "tree inline") for n in {*every["law"]}]
    paper = float(PAPER["SSD, T=4"]) / float(PAPER["SD inline, T=4"])
    yield (
        "- **70B/1B on 4 + 1 H100s, the paper's setting: not measured here.** Predicted, of "
        f"products only, at alpha .8: SSD makes {chain:.2f}× of SD on four GPUs (the paper: "
        f"{paper:.2f}×). Of a tree on all five it makes {min(trees):.2f} to {max(trees):.2f}× by "
        "prompts, each ±30%: undecided."
    )
    told: dict[str, list[str]] = {}
    for setting, _, strongest, ends in _settings():
        pair, _, asked = setting.partition(" ")
        prompts, _, gpus = asked.rpartition(", ")
        strongest = strongest.removesuffix(" inline")
        part = f"{ends[0]} of a {strongest} on {prompts}"
        told.setdefault(f"{pair}/1B on {gpus} H200s", []).append(part)
    for name, parts in told.items():
        yield f"- **{name}, measured: no.** SSD makes {', '.join(parts)}."


TABLES = {
    "measured": measured,
    "laws": laws,
    "closed": closed,
    "five": five,
    "answers": answers,
}

if __name__ == "__main__":
    sys.exit(printed(TABLES, __doc__))
