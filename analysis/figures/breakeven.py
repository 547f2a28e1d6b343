"""The gain of the extra GPU: SSD on T+1 GPUs against the best other use, over alpha and p_hit."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from analysis.figures.common import caption, need, no_claim
from analysis.load import Data
from analysis.select import Case, cases, plain
from analysis.style import BLACK, GREY, Poster
from analysis.times import Times
from analysis.uses import best_a_gpu, best_rows, claim_of, over_strongest
from mpissd.common.compare import Comparison

_ALPHAS = np.linspace(0.3, 0.98, 35)
_HITS = np.linspace(0.0, 1.0, 41)
_NORM = TwoSlopeNorm(1.0, 0.4, 2.0)


def break_even(data: Data) -> Poster:
    """Colour: the gain by the closed formulas with measured times. Dots: measured rows."""
    rows = data.rows
    candidates = cases(data, plain(rows) & (rows["batch_size"] == 1), ["alpha", "hit_law"])
    shown = [(c, t) for c in candidates if (t := Times.of(c)) is not None]
    shown = [(c, t) for c, t in shown if len(_measured(c, per_gpu=False)) >= 3]
    shown = shown[:2]
    need(
        shown,
        "AR, SD and SSD of a pair at batch 1, SSD at three alphas or hit laws, with t_growth_s",
    )
    poster = Poster(8.0 if len(shown) == 1 else 13.4)
    grid = poster.panels(len(shown), 2, sharex=True, sharey=True)
    image: Any = None
    for line, (case, times) in zip(grid, shown, strict=True):
        for ax, per_gpu in zip(line, (False, True), strict=True):
            image = _panel(poster, ax, case, times, per_gpu)
        line[0].set_ylabel("cache-hit rate")
    for ax in grid[-1]:
        ax.set_xlabel("acceptance α")
    bar = poster.colorbar(
        image, ax=list(grid.flat), pad=0.01, ticks=[0.4, 0.6, 0.8, 1, 1.25, 1.5, 2]
    )
    bar.set_label("SSD over the best other use, ×", labelpad=12)
    bar.ax.set_yticklabels(["0.4", "0.6", "0.8", "1", "1.25", "1.5", "2"])
    used = [part for case, _ in shown for part in (case.rows, case.ar, case.wide)]
    expected = [case.label for case, times in shown if times.is_expected]
    lacking = (
        f". Expected, not measured, of {', '.join(expected)}: the uses of T + 1 GPUs as targets"
    )
    lacking *= bool(expected)
    text = caption(
        data,
        used,
        "MODELLED: the closed formulas with these rows' median times; every method at its own best "
        "K ≤ 16; a miss is drafted just in time; a lookup on all GPUs accepts .3. Black line: "
        "nothing is gained. Dots: measured SSD rows, at the best K measured with their hits, over "
        "the fastest use of as many GPUs, measured on any visit or expected from measured times; "
        f"squares: imposed hits, which cost no branches; grey rims: no difference{lacking}",
        no_claim(used),
    )
    return poster.finish("Where the extra GPU pays", text, legend=False)


def _panel(poster: Poster, ax: Axes, case: Case, times: Times, per_gpu: bool) -> Any:
    gpus = f"{case.tp} GPU{'s' * (case.tp > 1)}"
    rivals = f"per GPU, over AR or SD on {gpus}" if per_gpu else _rivals(case, times)
    ax.set_label(f"{case.label}+1: {rivals}")
    ax.set_title(f"{case.label}+1\n{rivals}", fontsize=14)
    share = case.tp / (case.tp + 1) if per_gpu else 1.0
    rates = [max(1.0, times.best_sd(a)) if per_gpu else times.best_other(a) for a in _ALPHAS]
    values = np.array(
        [
            [share * times.best_ssd(a, h) / rate for a, rate in zip(_ALPHAS, rates, strict=True)]
            for h in _HITS
        ]
    )
    image = ax.pcolormesh(_ALPHAS, _HITS, values, cmap="PuOr_r", norm=_NORM, rasterized=True)
    if values.min() < 1 < values.max():
        ax.contour(_ALPHAS, _HITS, values, [1.0], colors=BLACK, linewidths=2.2)
    for alpha, hits, gain, imposed in _measured(case, per_gpu):
        ax.scatter(
            alpha,
            hits,
            c=[gain.speedup],
            cmap="PuOr_r",
            norm=_NORM,
            s=95,
            marker="s" if imposed else "o",
            edgecolors=BLACK if gain.is_real else GREY,
            linewidths=1.4,
            zorder=4,
            clip_on=False,
        )
        series = "measured, hits imposed" if imposed else "measured"
        ends = {"low": gain.low, "high": gain.high, "headline": gain.is_headline}
        poster.keep(ax, series, x=alpha, y=hits, gain=gain.speedup, **ends)
    for i, j in np.ndindex(values.shape):
        if not i % 5 and not j % 4:
            poster.keep(ax, "formula", x=_ALPHAS[j], y=_HITS[i], gain=values[i, j])
    ax.grid(False)
    return image


def _rivals(case: Case, times: Times) -> str:
    gpus = case.tp + 1
    expected = f" (T={gpus}: expected)" if times.is_expected else ""
    return f"raw, over the best other use of {gpus} GPUs{expected}"


def _measured(case: Case, per_gpu: bool) -> list[tuple[float, float, Comparison, bool]]:
    """Returns (alpha, hit rate, gain, whether hits were imposed) of SSD at its best K.

    There is one for each alpha, hit law and fan-out.
    """
    rows = case.rows[(case.rows["batch_size"] == 1) & case.rows["alpha"].notna()]
    measured = []
    for alpha, group in rows.groupby("alpha"):
        ssd = group[group["method"] == "SSD"].dropna(subset=["hit_rate"])
        for _, cell in ssd.groupby(["hit_law", "policy"]):
            best = best_rows(cell)
            hits, imposed = float(best["hit_rate"].median()), bool(best["p_hit"].notna().all())
            claim = claim_of(case, best)
            gain = None if claim is None else over_strongest(claim)
            if claim is not None and per_gpu:
                gain = best_a_gpu(claim)
            if gain is None:
                continue
            measured.append((float(alpha), hits, gain, imposed))
    return measured
