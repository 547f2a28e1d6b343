"""The gain from an extra GPU, by closed formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from analysis.model import Times
from analysis.rows import Data
from analysis.select import (
    Case,
    best_a_gpu,
    best_rows,
    cases,
    claim_of,
    over_strongest,
    plain,
)
from analysis.style import BLACK, GREY, Poster, caption, look, need
from mpissd.common.compare import Comparison
from mpissd.lab.tables.claims import Claim

Dot = tuple[Comparison | None, float, float, bool]  # gain, alpha, hit rate, whether imposed
_ALPHAS = np.linspace(0.3, 0.98, 35)
_HITS = np.linspace(0.0, 1.0, 41)
_TICKS = (0.4, 0.6, 0.8, 1, 1.25, 1.5, 2)
_COLOURS: dict[str, Any] = {"cmap": "PuOr_r", "norm": TwoSlopeNorm(1.0, 0.4, 2.0)}


def break_even(data: Data) -> Poster:
    """Colour: the gain by the closed formulas with measured times. Dots: measured rows."""
    wanted = plain(data.rows) & (data.rows["batch_size"] == 1)
    candidates = cases(data, wanted, ["alpha", "hit_law"])
    shown = [(c, t, _measured(c)) for c in candidates if (t := Times.of(c)) is not None]
    shown = [item for item in shown if len(item[2]) >= 3][:2]
    need(
        shown,
        "AR, SD and SSD of a pair at batch 1, SSD at three alphas or hit laws, with t_growth_s",
    )
    poster = Poster(6.2 if len(shown) == 1 else 10.4)
    grid = poster.panels(len(shown), 2, sharex=True, sharey=True)
    image: Any = None
    for line, (case, times, measured) in zip(grid, shown, strict=True):
        ssd = np.array([[times.best_ssd(a, h) for a in _ALPHAS] for h in _HITS])
        best = np.array([times.best_other(a) for a in _ALPHAS])
        rivals = f"raw, over the best other use of {case.tp + 1} GPUs"
        dots = [(over_strongest(claim), *at) for claim, *at in measured]
        _map(poster, line[0], f"{case.label}+1", rivals, ssd / best, dots)
        best = np.array([max(1.0, times.best_sd(a)) for a in _ALPHAS])
        rivals = f"per GPU, over AR or SD on {case.tp} GPU{'s' * (case.tp > 1)}"
        dots = [(best_a_gpu(claim), *at) for claim, *at in measured]
        per_gpu = case.tp / (case.tp + 1) * ssd / best
        image = _map(poster, line[1], f"{case.label}+1", rivals, per_gpu, dots)
        line[0].set_ylabel("cache-hit rate")
    for ax in grid[-1]:
        ax.set_xlabel("acceptance α")
    bar = poster.colorbar(image, ax=list(grid.flat), pad=0.01, ticks=_TICKS, format="{x:g}")
    bar.set_label("SSD over the best other use, ×", labelpad=12)
    text = caption(
        [part for case, *_ in shown for part in (case.rows, case.ar, case.wide)],
        "Colour: MODELLED, every method at its best measured K. Black line: no gain. Triangles: "
        "measured, hits drawn (up) or imposed (down); grey rims: no difference",
    )
    return poster.finish("Where does the extra GPU pay?", text, legend=False)


def _map(poster: Poster, ax: Axes, name: str, rivals: str, values: Any, dots: list[Dot]) -> Any:
    """Draws a map of gains [hit rates, alphas] and measured ones; returns its image."""
    ax.set_label(f"{name}: {rivals}")
    ax.set_title(f"{name}\n{rivals}", fontsize=13)
    image = ax.pcolormesh(_ALPHAS, _HITS, values, rasterized=True, **_COLOURS)
    if values.min() < 1 < values.max():
        ax.contour(_ALPHAS, _HITS, values, [1.0], colors=BLACK, linewidths=2.2)
    for over, alpha, hits, imposed in dots:
        if over is None:
            continue
        marker = look("SSD, hits imposed" if imposed else "SSD")["marker"]
        rim = BLACK if over.is_real else GREY
        dot = {"marker": marker, "edgecolors": rim, "s": 95, "linewidths": 1.4}
        ax.scatter(alpha, hits, c=[over.speedup], zorder=4, clip_on=False, **dot, **_COLOURS)
        series = "measured, hits imposed" if imposed else "measured"
        ends = {"low": over.low, "high": over.high, "headline": over.is_headline}
        poster.keep(ax, series, x=alpha, y=hits, gain=over.speedup, **ends)
    for i, j in np.ndindex(values.shape):
        if not i % 5 and not j % 4:
            poster.keep(ax, "formula", x=_ALPHAS[j], y=_HITS[i], gain=values[i, j])
    ax.grid(False)
    return image


def _measured(case: Case) -> list[tuple[Claim, float, float, bool]]:
    """Returns (claim, alpha, hit rate, whether hits were imposed) of SSD at its best K.

    There is one for each alpha, hit model and fan-out.
    """
    ssd = case.method("SSD", batch_size=1).dropna(subset=["alpha", "hit_rate"])
    measured = []
    for (alpha, _, _), cell in ssd.groupby(["alpha", "hit_law", "policy"]):
        best = best_rows(cell)
        if (claim := claim_of(case, best)) is not None:
            hits, imposed = float(best["hit_rate"].median()), bool(best["p_hit"].notna().all())
            measured.append((claim, float(alpha), hits, imposed))
    return measured
