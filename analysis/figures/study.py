"""The figures of docs/study.md: what an extra GPU for the draft is worth.

Four are of cells (results/extra-gpu), every use of up to five GPUs as `plan` predicts it; `hidden`
compares measured rows with the closed form of the study.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.rows import Data
from analysis.select import best_rows, plain, where
from analysis.style import GREY, METHODS, SERIES, Poster, caption, look, need, parity
from mpissd.common.theory import accept_probabilities, expected_tokens
from mpissd.engine.spec.acceptance import named_hit_law

_ERROR = 0.05  # of the predictor, whose differences within it are none
_NAMES = {"ar": "AR", "sd": "SD inline", "tree": "tree inline", "lookup": "lookup", "ssd": "SSD"}
_CELLS = (
    "{device}, predicted by mpissd plan from its profile: whole transformers, 512 tokens of "
    "context, laws of SmolLM2-135M-Instruct and its shipped draft. {more}"
)


def use_of(cells: pd.DataFrame) -> pd.Series:
    """Returns the name of each line's use: a draft GPU's is marked."""
    names = cells["mode"].map(_NAMES)
    apart = (cells["num_drafts"] > 0) & (cells["mode"] != "ssd")
    return names.where(~apart, names.str.removesuffix(" inline") + ", draft GPU")


def on_gpus(cells: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Returns each use's fastest line on at most so many GPUs, by cell."""
    fitting = cells[cells["tp"] + cells["num_drafts"] <= gpus]
    fitting = fitting.assign(use=use_of(fitting)).sort_values("tok_per_s")
    return fitting.groupby([*_CELL, "use"]).last().reset_index()


_CELL = ["pair", "law", "batch_size", "host"]


def gains_of(cells: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Returns SSD's tok/s over the fastest other use's, by cell, and that use's name."""
    uses = on_gpus(cells, gpus)
    ssd = where(uses, use="SSD").set_index(_CELL)["tok_per_s"]
    others = uses[uses["use"] != "SSD"].sort_values("tok_per_s").groupby(_CELL).last()
    gain = ssd / others["tok_per_s"]
    return pd.DataFrame({"gain": gain, "other": others["use"], "gpus": gpus}).dropna().reset_index()


def uses(data: Data) -> Poster:
    """x = tok/s; y = laws; a mark is a use of all GPUs."""
    cells = where(data.cells, batch_size=1, host=1.0)
    shown = [(pair, gpus) for pair, gpus in (("8b/1b", 2), ("70b/1b", 4)) if pair in {*cells["pair"]}]
    need(shown, "cells of results/extra-gpu")
    poster = Poster(6.4)
    for ax, (pair, gpus) in zip(poster.panels(1, len(shown), sharey=True)[0], shown, strict=True):
        ax.set_title(f"{pair.upper()} on {gpus} GPUs")
        here = on_gpus(where(cells, pair=pair), gpus)
        laws = [*dict.fromkeys(cells["law"])][::-1]
        for use, style in _STYLES.items():
            part = where(here, use=use)
            y = [laws.index(law) for law in part["law"]]
            poster.line(ax, use, part["tok_per_s"], y, linestyle="none", **style)
        ax.set_yticks(range(len(laws)), laws)
        ax.set(xlabel="tok/s", xlim=(0, 1.05 * here["tok_per_s"].max()))
    return poster.finish("Which use of the GPUs is fastest?", _text(cells, "Best K, tree, fan-out."))


_STYLES = {
    name: {"color": METHODS[name][0], "marker": METHODS[name][1]}
    for name in ("AR", "SD inline", "tree inline", "lookup", "SSD")
}


def over_gpus(data: Data) -> Poster:
    """x = GPUs; y = SSD over the strongest other use; a line is a law."""
    cells = where(data.cells, batch_size=1, host=1.0)
    need(len(cells), "cells of results/extra-gpu")
    every = pd.concat([gains_of(cells, gpus) for gpus in range(2, 6)])
    text = _text(cells, "Grey: within the predictor's error of 5%.")
    return _lines(every, "gpus", "law", "GPUs, one of them the draft's", "Does it pay?", text)


def over_batch(data: Data) -> Poster:
    """x = sequences; y = SSD over the strongest other use of three GPUs; a line is a law."""
    cells = where(data.cells, host=1.0)
    laws = cells.loc[cells["batch_size"] > 1, "law"].unique()
    need(len(laws), "cells of results/extra-gpu at several batch sizes")
    every = gains_of(cells[cells["law"].isin(laws)], 3)
    text = _text(cells, "Three GPUs. Grey: within the predictor's error of 5%.")
    return _lines(every, "batch_size", "law", "sequences b", "Does it pay in a batch?", text)


def host_path(data: Data) -> Poster:
    """x = the host's costs over the measured ones; y = SSD over the strongest other use of two."""
    cells = where(data.cells, batch_size=1)
    hosted = cells.loc[cells["host"] != 1, ["pair", "law"]].drop_duplicates()
    need(len(hosted), "cells of results/extra-gpu with several hosts")
    every = gains_of(cells.merge(hosted), 2)
    text = _text(cells, "Two GPUs. Rounds without a draft GPU are chained: no host is in them.")
    what = "host's time in a round, × the measured one"
    return _lines(every, "host", "law", what, "What does the host cost SSD?", text)


def _lines(every: pd.DataFrame, x: str, by: str, label: str, heading: str, text: str) -> Poster:
    pairs = [*dict.fromkeys(every["pair"])]
    poster = Poster(5.6)
    grid = poster.panels(1, len(pairs), sharey=True)[0]
    for ax, pair in zip(grid, pairs, strict=True):
        ax.set_title(pair.upper())
        ax.axhspan(1 - _ERROR, 1 + _ERROR, color="#dddddd", zorder=0)
        parity(ax)
        for (name, part), colour in zip(where(every, pair=pair).groupby(by, sort=False), _COLOURS):
            also = {"other": part["other"]}
            poster.line(ax, str(name), part[x], part["gain"], also=also, color=colour, marker="o")
        ticks = sorted({*every[x]})
        ax.set_xlabel(label)
        if ticks[-1] > 8:
            ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(FixedLocator(ticks))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter("{x:g}")
    grid[0].set_ylabel("SSD's tok/s over the\nstrongest other use's")
    return poster.finish(heading, text)


_COLOURS = (*SERIES, GREY)


def _text(cells: pd.DataFrame, more: str) -> str:
    return _CELLS.format(device=cells["device_name"].iloc[0], more=more)


HOST_S = 0.25e-3  # the host's share of a round of SSD, measured: results/h200-pairs
INLINE_S = 0.15e-3  # that of a round of SD inline over two GPUs whose rounds the host issues


@dataclass(frozen=True)
class Pays:
    """One measured gain of SSD (T) over SD inline (T + 1), and what the closed form says of it.

    hidden_s: drafting that hits hide, p·K·d. saved_s: of a round by T + 1 GPUs in place of T.
    """

    alpha: float
    lookahead: int
    hidden_s: float
    saved_s: float
    predicted: float
    measured: float


def pays(rows: pd.DataFrame) -> Iterator[Pays]:
    """Yields the closed form beside SSD's best K of each alpha of each pair at batch 1.

    Per round: SSD E(K)/(v_T + g + (1 − p)·K·d), SD inline E(K′)/(v_{T+1} + c + K′·d), with the
    times of verifications v and draft steps d of rows of SD inline, p of the hit law.
    """
    rows = rows[plain(rows) & (rows["batch_size"] == 1) & rows["tree_nodes"].isna()]
    inline = rows[(rows["method"] == "SD inline") & (rows["backup"] != "fast")]
    ssd = rows[(rows["method"] == "SSD") & (rows["backup"] == "jit") & rows["p_hit"].isna()]
    keys = ["target", "draft", "lm_head", "context", "fuse", "alpha"]
    wide = inline.groupby([*keys, "tp", "lookahead"])["tok_per_s"].median().reset_index()
    for (*key, tp, law), every in ssd.groupby([*keys, "tp", "hit_law"]):
        part = best_rows(every)
        k = int(part["lookahead"].iloc[0])
        rivals = where(wide, tp=tp + 1, **dict(zip(keys, key, strict=True)))
        alike = where(inline, **dict(zip(keys[:-1], key[:-1], strict=True)))
        v = [alike.loc[alike["tp"] == t, "t_target_s"].median() for t in (tp, tp + 1)]
        v[0] = part["t_target_s"].median() if np.isnan(v[0]) else v[0]
        step, alpha = float(alike["step_s"].median()), key[-1]
        if rivals.empty or not np.isfinite([*v, step]).all() or not str(law).startswith("power"):
            continue
        best = rivals.loc[rivals["tok_per_s"].idxmax()]
        lists = part["fan_out"].iloc[0]
        ends = named_hit_law(str(law)).hit_probabilities(max(lists))
        chances = zip(accept_probabilities([alpha] * k), lists, strict=True)
        p = sum(w * ends[-(n == k)][f] for n, (w, f) in enumerate(chances))
        own = expected_tokens(alpha, k) / (v[0] + HOST_S + (1 - p) * k * step)
        other_k = int(best["lookahead"])
        other = expected_tokens(alpha, other_k) / (v[1] + INLINE_S + other_k * step)
        measured = float(part["tok_per_s"].median() / best["tok_per_s"])
        saved = v[0] - v[1] + HOST_S - INLINE_S
        yield Pays(alpha, k, p * k * step, saved, own / other, measured)


def hidden(data: Data) -> Poster:
    """x = drafting that hits hide, less what another target GPU saves; y = SSD over SD inline."""
    points = [*pays(data.rows)]
    need(len(points) > 2, "SSD of T and SD inline of T + 1 GPUs at batch 1, jit, and hits of a law")
    poster = Poster(6.0)
    left, right = poster.panels(1, 2)[0]
    left.set_title("what decides")
    x = [1e3 * (one.hidden_s - one.saved_s) for one in points]
    y = [one.measured for one in points]
    alphas = {"alpha": [one.alpha for one in points]}
    poster.line(left, "measured", x, y, also=alphas, linestyle="none", **look("SSD"))
    left.axvline(0, color=GREY)
    left.set(xlabel="p·K·d − (v(T) − v(T+1) + g − c), ms", ylabel="SSD's tok/s over SD inline's")
    right.set_title("the closed form")
    predicted = [one.predicted for one in points]
    poster.line(right, "measured", predicted, y, also=alphas, linestyle="none", **look("SSD"))
    ends = min(predicted + y), max(predicted + y)
    poster.line(right, "equal", ends, ends, color=GREY, linestyle="--")
    right.set(xlabel="predicted", ylabel="measured")
    parity(left)
    errors = np.abs(np.array(predicted) / y - 1)
    off = f"Closed form off by {np.median(errors):.1%} in the median, {errors.max():.1%} at most"
    return poster.finish("When does SSD beat SD inline?", caption([data.rows], off))
