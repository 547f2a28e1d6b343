"""Prints the tables of docs/study.md from rows and cells: python -m results.extra-gpu.tables

measured   every measured use of as many GPUs, beside what `plan` predicts of it
laws       SSD over the strongest other use, by prompts, temperature and GPUs
closed     the closed form beside measured gains
five       70B/1B on five H100s, beside the paper
answers    README's three lines
alone      every measured use of one GPU
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.figures.study import (
    FITTED,
    ONE_FORWARD,
    best_shapes,
    gains_of,
    on_gpus,
    pays,
    used,
    whole_pays,
    with_ssd,
)
from analysis.rows import load
from analysis.select import SHAPE, key, ratio, where
from mpissd.lab.tables.compare import Comparison
from results.pages import Lines, head, line, printed, share

HERE = Path(__file__).resolve().parent
PAPER = {"AR, T=4": "54.7", "SD inline, T=4": "161.8", "SSD, T=4": "255.8"}
_NAMES = "AR", "SD inline", "tree inline", "lookup", "SSD"
_DRAFTED = ["mode", *SHAPE, "is_dynamic", "is_parallel", "recording"]


@dataclass(frozen=True)
class Answer:
    """What the rows of one pair, prompts and number of GPUs say. cells: {use: its tok/s as text}.
    strongest: the fastest use but SSD. gain: SSD over it. everywhere: the same over all prompts of
    the recording. stepwise: there without drafts of one forward. alone: the fastest use of one GPU
    over SSD there. NaN: unknown."""

    pair: str
    prompts: str
    gpus: int
    cells: dict[str, str]
    strongest: str
    gain: Comparison
    everywhere: float
    stepwise: float
    alone: float

    @property
    def gain_text(self) -> str:
        ends = f" ({share(self.gain.low, 2)} to {share(self.gain.high, 2)})"
        return share(self.gain.speedup, 2) + ends * self.gain.has_interval


def cells(device: str = "NVIDIA H200") -> pd.DataFrame:
    """Returns the predictions of `plan` for a device (cells.jsonl) as a frame."""
    return where(pd.read_json(HERE / "cells.jsonl", lines=True), device_name=device)


def rows() -> pd.DataFrame:
    """Returns all result rows measured on H200s as a frame."""
    return where(load([HERE.parent]).rows, device_name="NVIDIA H200")


def measured() -> Lines:
    """Yields the table of measured tok/s of each use, in brackets over all prompts, a line for each
    model pair, prompts and number of GPUs."""
    ones = [f"{name}{ONE_FORWARD}" for name in ("SD inline", "tree inline", "SSD")]
    names = *_NAMES, *(name.replace(" inline", "") for name in ones)
    yield from head("pair, prompts, GPUs", *names, "SSD over the strongest", "over all prompts")
    for answer in _answers():
        cells = [answer.cells.get(use, "–") for use in (*_NAMES, *ones)]
        place = f"{answer.pair} {answer.prompts}, {answer.gpus}"
        yield line([place, *cells, answer.gain_text, _share(answer.everywhere)])


def _share(value: float) -> str:
    return share(value, 2) if value > 0 else "–"


def over_all_prompts(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the tokens a round over all prompts of each row's recording (tokens), and the tok/s
    there (rate); NaN if unknown. Tokens and hits are those of a replay of all prompts (all.jsonl),
    which has no times: a round takes the time measured, changed by the drafting after misses."""
    of_all = load(sorted(HERE.parent.glob("*/all.jsonl"))).rows
    there = of_all.set_index(_drafted(of_all)).reindex(_drafted(rows)).set_axis(rows.index)
    tokens = (there["num_tokens"] / there["num_rounds"]).mask(rows["mode"] == "ar", 1.0)
    miss_s = rows["t_draft_s"] * rows["backup_lookahead"] / rows["lookahead"]
    more_s = miss_s * (rows["hit_rate"] - there["hit_rate"]) * (rows["backup"] != "fast")
    return pd.DataFrame({"tokens": tokens, "rate": tokens / (rows["round_s"] + more_s.fillna(0.0))})


def _drafted(rows: pd.DataFrame) -> pd.Series:
    """Returns how each row drafted, and under which recording, as one tuple."""
    is_dynamic, is_parallel = rows["tree_shape"].eq("dynamic"), rows["parallel_drafting"].eq(True)
    return key(rows.assign(is_dynamic=is_dynamic, is_parallel=is_parallel), _DRAFTED)


def _answers() -> Iterator[Answer]:
    every = used(rows())
    every = every.assign(everywhere=over_all_prompts(every)["rate"], shape=_drafted(every))
    wanted = with_ssd(every).groupby(["ranks", "law", "pair"])
    for (gpus, law, pair), here in wanted:
        best = best_shapes(here)  # the fastest first
        ssd = next(runs for use, runs in best.items() if use.startswith("SSD"))
        strongest = next(use for use in best if not use.startswith("SSD"))
        one = where(every, pair=pair, law=law, ranks=1)
        steps = here[~here["use"].str.endswith(ONE_FORWARD)]
        shares = (
            _at_best(where(of, mode="ssd")) / _at_best(of[of["mode"] != "ssd"])
            for of in (here, steps)
        )
        cells = {use: _cell(runs) for use, runs in best.items()}
        alone = _at_best(one) / _at_best(where(here, mode="ssd"))
        over = ratio(ssd, best[strongest])
        yield Answer(pair, law, gpus, cells, strongest, over, *shares, alone)


def _at_best(rows: pd.DataFrame) -> float:
    """Returns the tok/s over all prompts at the best settings."""
    return float(rows.groupby("shape")["everywhere"].median().max())


def _cell(runs: pd.DataFrame) -> str:
    """Returns the median tok/s of a use's runs, and in brackets that over all prompts."""
    rate, all_prompts = runs["tok_per_s"].median(), runs["everywhere"].median()
    is_known = runs["mode"].iloc[0] != "ar" and all_prompts > 0
    return f"{rate:,.0f}" + f" ({all_prompts:,.0f})" * bool(is_known)


def laws() -> Lines:
    """Yields the table of predictions, a line for each kind of prompts and temperature: acceptance
    rate, SSD's hit rate, and SSD's speedup over the strongest alternative, which is named."""
    single = where(cells(), batch_size=1, host=1.0)
    shown = [(pair, gpus) for pair in ("8b/1b", "70b/1b") for gpus in (2, 3, 4)]
    names = [f"{pair.upper()}, {gpus} GPUs" for pair, gpus in shown]
    yield from head("prompts", "alpha", "hits", *names)
    gains = {n: gains_of(single, n).set_index(["pair", "law"]) for n in (2, 3, 4)}
    for law in sorted({*single["law"]}):
        alpha = where(single, law=law)["alpha"].iloc[0]
        hits = gains[2]["hits"][("8b/1b", law)]
        at = [gains[n].loc[(pair, law)] for pair, n in shown]
        texts = [f"{share(of['gain'], 2)} {of['other'].removesuffix(' inline')}" for of in at]
        yield line([law, share(alpha, 2), share(hits, 2), *texts])


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
    places: dict[str, list[Answer]] = {}
    for answer in _answers():
        places.setdefault(f"{answer.pair}/1B on {answer.gpus} H200s", []).append(answer)
    for place, found in places.items():
        gains = [one.gain.speedup for one in found] + [one.everywhere for one in found]
        verdict = "no" if np.nanmax(gains) < 1 else "undecided"
        parts = (
            f"{one.gain_text} of a {one.strongest.replace(' inline', '')} on {one.prompts}"
            for one in found
        )
        yield f"- **{place}, measured: {verdict}.** SSD makes {', '.join(parts)}. {_rest(found)}"


def _rest(found: Sequence[Answer]) -> str:
    """Returns the sentences of an answer on all prompts, drafts of one forward and one GPU."""
    everywhere, steps, alone = (
        " and ".join(_share(getattr(one, of)) for one in found if one.everywhere > 0)
        for of in ("everywhere", "stepwise", "alone")
    )
    if not any(ONE_FORWARD in use for one in found for use in one.cells):
        return f"Over all prompts, derived: {everywhere}. Drafts of one forward were not measured."
    return (
        f"Over all prompts, derived: {everywhere}; by drafts of K forwards: {steps}. One "
        f"GPU without SSD makes {alone} times as much."
    )


def alone() -> Lines:
    """Yields the table of each use of one GPU but AR, at its fastest settings over all prompts."""
    here = where(used(rows()), ranks=1, mode="sd")
    here = here.assign(**over_all_prompts(here), seen=here["num_tokens"] / here["num_rounds"])
    here = here.rename(columns={"tok_per_s": "measured", "rate": "tok_per_s"})
    names = "K", "ms a round", "tokens a round", "of all", "tok/s", "of all"
    yield from head("prompts", "use", *names)
    for law, runs in here.groupby("law"):
        for use, part in best_shapes(runs).items():
            middle = part[["round_s", "seen", "tokens", "measured", "tok_per_s"]].median()
            ms, *tokens = 1e3 * middle["round_s"], middle["seen"], middle["tokens"]
            rates = f"{middle['measured']:.0f}", f"{middle['tok_per_s']:.0f}"
            k = part["lookahead"].iloc[0]
            texts = [f"{ms:.2f}", *(f"{number:.2f}" for number in tokens), *rates]
            yield line([law, use.replace(f" inline{ONE_FORWARD}", ONE_FORWARD), k, *texts])


TABLES = {of.__name__: of for of in (measured, laws, closed, five, answers, alone)}

if __name__ == "__main__":
    sys.exit(printed(TABLES, __doc__))
