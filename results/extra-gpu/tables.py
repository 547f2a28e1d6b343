#!/usr/bin/env python3
"""Prints the tables of docs/study.md from rows and cells: results/extra-gpu/tables.py NAME

measured   every measured use of as many GPUs, beside what `plan` predicts of it
laws       SSD over the strongest other use, by prompts, temperature and GPUs
closed     the closed form beside measured gains
five       70B/1B on five H100s, beside the paper
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from pages import Lines, head, line, printed, share  # noqa: E402

from analysis.figures.study import FITTED, errors, gains_of, on_gpus, pays, used, whole_pays  # noqa: E402  # noqa: E402
from analysis.rows import load  # noqa: E402
from analysis.select import where  # noqa: E402

PAPER = {"AR": "54.7", "SD inline": "161.8", "SSD": "255.8"}
_NAMES = "AR", "SD inline", "tree inline", "lookup", "SSD", "SSD tree"
_CELL = {"chat": "chat, T=0", "code": "humaneval, T=0"}


def cells(device: str = "NVIDIA H200") -> pd.DataFrame:
    """Returns the predicted cells of a device."""
    return where(pd.read_json(HERE / "cells.jsonl", lines=True), device_name=device)


def rows() -> pd.DataFrame:
    """Returns all measured rows of H200s."""
    return where(load([HERE.parent]).rows, device_name="NVIDIA H200")


def measured() -> Lines:
    """Yields a line a pair, prompts and GPUs: tok/s of each use, in brackets the prediction."""
    whole, predicted = used(rows()), cells()
    is_shared = whole["setting"].isin(whole.loc[whole["mode"] == "ssd", "setting"])
    whole = whole[is_shared & (whole["ranks"] > 1)].sort_values(["ranks", "law"])
    yield from head("pair, prompts, GPUs", *_NAMES, "SSD over the strongest")
    for setting, here in whole.groupby("setting", sort=False):
        first = here.iloc[0]
        cell = {"pair": f"{first['pair'].lower()}/1b", "law": _CELL[first["law"]]}
        at = on_gpus(where(predicted, batch_size=1, host=1.0, **cell), int(first["ranks"]))
        known = at.set_index("use")["tok_per_s"]
        texts, best = [], {}
        for use in _NAMES:
            of = where(here, use=use)["tok_per_s"]
            best[use] = of.median() if len(of) else 0.0
            runs = ", ".join(f"{rate:.0f}" for rate in sorted(of, reverse=True)[:3]) or "–"
            texts.append(runs + (f" ({known[use]:.0f})" if len(of) and use in known else ""))
        ssd = max(best.pop("SSD"), best.pop("SSD tree"))
        gain = where(
            gains_of(where(predicted, **cell), int(first["ranks"])), batch_size=1, host=1.0
        )
        told = f"{share(ssd / max(best.values()), 2)} ({share(gain['gain'].iloc[0], 2)})"
        yield line([setting, *texts, told])


def laws() -> Lines:
    """Yields a line a law: alpha, SSD's hit rate, and gains with the strongest other use."""
    one = where(cells(), batch_size=1, host=1.0)
    shown = [("8b/1b", 2), ("8b/1b", 3), ("8b/1b", 4), ("70b/1b", 3), ("70b/1b", 4), ("70b/1b", 5)]
    names = [f"{pair.upper()}, {gpus} GPUs" for pair, gpus in shown]
    yield from head("prompts", "alpha", "hits", *names, "per GPU, at most")
    every = {n: gains_of(one, n).set_index(["pair", "law"]) for n in (2, 3, 4, 5)}
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
    yield from head("rows", "gains", "error, median", "largest", "same side of 1")
    for name, some in groups.items():
        off = errors(some)
        same = sum((one.predicted > 1) == (one.measured > 1) for one in some)
        count = len(some)
        yield line([name, count, f"{pd.Series(off).median():.1%}", f"{off.max():.1%}", same])


def five() -> Lines:
    """Yields tok/s of each use of five H100s by law; the paper's are of its own prompts."""
    at = on_gpus(cells("NVIDIA H100 80GB SXM"), 5).set_index(["law", "use"])["tok_per_s"]
    uses = [*_NAMES[:5], "copies"]
    yield from head("prompts", *(use + ", in all" * (use == "copies") for use in uses))
    for law in [*dict.fromkeys(at.index.get_level_values("law"))]:
        yield line([law, *(f"{at[(law, use)]:.0f}" if (law, use) in at else "–" for use in uses)])
    yield line(["the paper", *(PAPER.get(use, "–") for use in uses)])


TABLES = {"measured": measured, "laws": laws, "closed": closed, "five": five}

if __name__ == "__main__":
    sys.exit(printed(TABLES, __doc__))
