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
    gains_of,
    on_gpus,
    pays,
    whole_pays,
    with_ssd,
)
from analysis.rows import load
from analysis.select import SHAPE, key, ratio, where
from results.pages import Lines, head, line, printed, share

HERE = Path(__file__).resolve().parent
PAPER = {"AR, T=4": "54.7", "SD inline, T=4": "161.8", "SSD, T=4": "255.8"}
_ENDS = "SSD over the strongest", "predicted", "at most"
_NAMES = "AR", "SD inline", "tree inline", "lookup", "SSD", "SSD tree"
_CELL = {
    "chat": "chat, temp. 0",
    "code": "humaneval, temp. 0",
    "code at temp. 0.7": "humaneval, temp. 0.7",
}


Setting = tuple[str, list[str], str, list[str]]


def cells(device: str = "NVIDIA H200") -> pd.DataFrame:
    """Returns the predictions of `plan` for a device (cells.jsonl) as a frame."""
    return where(pd.read_json(HERE / "cells.jsonl", lines=True), device_name=device)


def rows() -> pd.DataFrame:
    """Returns all result rows measured on H200s as a frame."""
    return where(load([HERE.parent]).rows, device_name="NVIDIA H200")


def measured() -> Lines:
    """Yields the table of measured tok/s of each mode, with the prediction in brackets, a line for
    each model pair, prompts and number of GPUs."""
    yield from head("pair, prompts, GPUs", *_NAMES, *_ENDS)
    for setting, texts, _, ends in _settings():
        yield line([setting, *texts, *ends])


def _settings() -> Iterator[Setting]:
    """Yields (pair with prompts and GPUs, tok/s of each mode as text, the strongest alternative to
    SSD, the cells of the columns _ENDS)."""
    predicted = where(cells(), host=1.0)
    sorted_rows = with_ssd(rows()).sort_values(["ranks", "law"])
    for setting, here in sorted_rows.groupby("setting", sort=False):
        first = here.iloc[0]
        gpus = int(first["ranks"])
        pair = f"{first['pair'].lower()}/1b"
        at = where(predicted, batch_size=1, pair=pair, law=_CELL[first["law"]])
        uses = on_gpus(at, gpus)
        rates = uses.set_index("use")["tok_per_s"]
        if where(uses, use="SSD")["tree"].notna().any():
            rates = rates.rename({"SSD": "SSD tree"})
        texts = []
        for use in _NAMES:
            runs = sorted(where(here, use=use)["tok_per_s"])
            ends = dict.fromkeys(f"{rate:.0f}" for rate in [*runs[:1], *runs[-1:]])
            text = " to ".join(ends) or "–"
            texts.append(text + (f" ({rates[use]:.0f})" if runs and use in rates else ""))
        best = best_shapes(here)  # the fastest first
        ssd = next(runs for use, runs in best.items() if use.startswith("SSD"))
        strongest = next(use for use in best if not use.startswith("SSD"))
        other = best[strongest]
        over = ratio(ssd, other)
        measured = share(over.speedup, 2)
        if over.has_interval:
            measured += f" ({share(over.low, 2)} to {share(over.high, 2)})"
        expected = gains_of(at, gpus)["gain"].iloc[0]
        limit = _prompt(where(here, mode="ssd")).max() / other["tok_per_s"].median()
        yield str(setting), texts, strongest, [measured, share(expected, 2), share(limit, 2)]


def _prompt(lines: pd.DataFrame) -> pd.Series[float]:
    """Returns the tok/s that SSD would have if its draft were never late and host work took .1 ms a
    round, for each combination of settings (K, fan-out, …) in SSD's rows."""
    missed_s = (1 - lines["hit_rate"]) * lines["t_draft_s"] * (lines["backup"] != "fast")
    rates = lines["acceptance_length"] / (lines["t_target_s"] + missed_s + 1e-4)
    return rates.groupby(key(lines, SHAPE)).median()


def laws() -> Lines:
    """Yields the table of predictions, a line for each kind of prompts and temperature: acceptance
    rate, SSD's hit rate, and SSD's speedup over the strongest alternative, which is named."""
    single = where(cells(), batch_size=1, host=1.0)
    shown = [(pair, gpus) for pair in ("8b/1b", "70b/1b") for gpus in (2, 3, 4)]
    names = [f"{pair.upper()}, {gpus} GPUs" for pair, gpus in shown]
    yield from head("prompts", "alpha", "hits", *names, "per GPU, at most")
    gains = {n: gains_of(single, n).set_index(["pair", "law"]) for n in (2, 3, 4)}
    rates = single.assign(rate=single["tok_per_s"] / (single["tp"] + single["num_drafts"]))
    is_ssd = rates["mode"] == "ssd"
    a_gpu = [rates[of].groupby(["pair", "law"])["rate"].max() for of in (is_ssd, ~is_ssd)]
    share_a_gpu = (a_gpu[0] / a_gpu[1]).groupby("law").max()
    for law in sorted({*single["law"]}):
        alpha = where(single, law=law)["alpha"].iloc[0]
        hits = gains[2]["hits"][("8b/1b", law)]
        at = [gains[n].loc[(pair, law)] for pair, n in shown]
        texts = [f"{share(of['gain'], 2)} {of['other'].removesuffix(' inline')}" for of in at]
        yield line([law, share(alpha, 2), share(hits, 2), *texts, share(share_a_gpu[law], 2)])


def closed() -> Lines:
    """Yields the table of how far the closed form's speedups are from measured ones."""
    measured_rows = rows()
    products = [*pays(measured_rows)]
    groups = {
        f"products, {FITTED}, whose host gaps were taken": [
            gain for gain in products if gain.folder == FITTED
        ],
        "products, other visits": [gain for gain in products if gain.folder != FITTED],
        "whole transformers, chained inline rounds": [*whole_pays(measured_rows)],
    }
    yield from head("rows", "gains", "error, median", "largest", "right side of 1", "by the rule")
    for name, gains in groups.items():
        errors = np.array([abs(gain.predicted / gain.measured - 1) for gain in gains])
        same = sum((gain.predicted > 1) == (gain.measured > 1) for gain in gains)
        rule = sum((gain.hidden_s > gain.saved_s) == (gain.measured > 1) for gain in gains)
        sizes = f"{np.median(errors):.1%}", f"{errors.max():.1%}"
        yield line([name, len(gains), *sizes, same, rule])


def five() -> Lines:
    """Yields the table of predicted tok/s of each mode on five H100s, by kind of prompts. The last
    line has the paper's figures, which were measured with other prompts."""
    uses = cells("NVIDIA H100 80GB SXM")
    four_gpus = on_gpus(uses[uses["tp"] == 4], 4)
    five_gpus = on_gpus(uses, 5)
    columns = {f"{use}, T=4": (four_gpus, use) for use in ("AR", "SD inline")}
    columns |= {f"{use}, T=5": (five_gpus, use) for use in _NAMES[:4]}
    columns["SSD, T=4"] = five_gpus, "SSD"
    yield from head("prompts", *columns)
    for law in dict.fromkeys(uses["law"]):
        at = [where(lines, law=law, use=use)["tok_per_s"] for lines, use in columns.values()]
        yield line([law, *(f"{rates.iloc[0]:.0f}" if len(rates) else "–" for rates in at)])
    yield line(["the paper", *(PAPER.get(name, "–") for name in columns)])


def answers() -> Lines:
    """Yields the answers that README gives: on the paper's setting, then on measured ones."""
    uses = cells("NVIDIA H100 80GB SXM")
    four_gpus = on_gpus(uses[uses["tp"] == 4], 4)
    five_gpus = on_gpus(uses, 5)

    def rate(uses: pd.DataFrame, law: str, use: str) -> float:
        return float(where(uses, law=law, use=use)["tok_per_s"].iloc[0])

    chain = rate(five_gpus, "alpha .8", "SSD") / rate(four_gpus, "alpha .8", "SD inline")
    trees = [rate(five_gpus, n, "SSD") / rate(five_gpus, n, "tree inline") for n in {*uses["law"]}]
    paper = float(PAPER["SSD, T=4"]) / float(PAPER["SD inline, T=4"])
    yield (
        "- **70B/1B on 4 + 1 H100s, the paper's setting: not measured here.** Predicted "
        f"from products alone, at alpha .8: SSD makes {chain:.2f}× the tok/s of SD on four GPUs "
        f"(the paper: {paper:.2f}×). Over a tree on all five that is {min(trees):.2f} to "
        f"{max(trees):.2f}×, depending on the prompts, and uncertain by 30%: undecided."
    )
    parts: dict[str, list[str]] = {}
    for setting, _, strongest, ends in _settings():
        pair, _, place = setting.partition(" ")
        prompts, _, gpus = place.rpartition(", ")
        part = f"{ends[0]} of a {strongest.removesuffix(' inline')} on {prompts}"
        parts.setdefault(f"{pair}/1B on {gpus} H200s", []).append(part)
    for name, gains in parts.items():
        yield f"- **{name}, measured: no.** SSD makes {', '.join(gains)}."


TABLES = {of.__name__: of for of in (measured, laws, closed, five, answers)}

if __name__ == "__main__":
    sys.exit(printed(TABLES, __doc__))
