"""The value of a hit rate: SSD over SD with imposed p_hit from 0 to 1."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import GAINS, caption, draw_gains, need, no_claim
from analysis.gain import gains_over
from analysis.imposed import price
from analysis.load import Data
from analysis.select import Case, cases, plain, richest
from analysis.style import BLACK, BLUE, RED, SKY, Poster, parity
from analysis.times import Times


def cache_hits(data: Data) -> Poster:
    """x = imposed hit rate; y = gain over SD on the same GPUs, over SD without a draft GPU (raw and
    per GPU), and by the closed formula with the rows' own times."""
    rows = data.rows
    wanted = (
        plain(rows) & (rows["batch_size"] == 1) & (rows["p_hit"].notna() | (rows["mode"] != "ssd"))
    )
    shown = [(case, _sweep(case)) for case in cases(data, wanted, ["p_hit"])]
    shown = [(case, ssd) for case, ssd in shown if ssd["p_hit"].nunique() >= 3]
    shown = shown[:3]
    need(shown, "SSD with imposed hit rates, three or more, and SD")
    poster = Poster(7.4)
    grid = poster.panels(1, len(shown), sharey=True)[0]
    used: list[pd.DataFrame] = []
    for ax, (case, ssd) in zip(grid, shown, strict=True):
        used += _panel(poster, ax, case, ssd)
    grid[0].set_ylabel("SSD's gain over SD, ×")
    imposed = [price(data, case, ssd) for case, ssd in shown]
    terms = "Equal K, alpha and fan-out; per GPU counts the draft GPU"
    text = caption(data, used, terms, *imposed, GAINS, no_claim(used))
    return poster.finish("What cache hits are worth: SSD over SD", text)


def _sweep(case: Case) -> pd.DataFrame:
    ssd = case.method("SSD")
    ssd = ssd[ssd["p_hit"].notna() & (ssd["batch_size"] == 1)]
    return richest(ssd, ["alpha", "lookahead", "policy"], ["p_hit"])


def _panel(poster: Poster, ax: Axes, case: Case, ssd: pd.DataFrame) -> list[pd.DataFrame]:
    alpha, lookahead = ssd["alpha"].iloc[0], int(ssd["lookahead"].iloc[0])
    ax.set_title(f"{case.label}+1, K={lookahead}, α={alpha:g}")
    used = [ssd]
    alone, inline = (
        case.method(name, alpha=alpha, lookahead=lookahead, batch_size=1)
        for name in ("SD", "SD inline")
    )
    share = case.tp / (case.tp + 1)
    for name, base, factor, look in (
        ("over SD on the same GPUs", alone, 1.0, {"color": RED, "marker": "^"}),
        ("over SD inline, raw", inline, 1.0, {"color": BLUE, "marker": "s"}),
        ("over SD inline, per GPU", inline, share, {"color": SKY, "marker": "D"}),
    ):
        if len(base):
            draw_gains(poster, ax, name, gains_over(ssd, base, "p_hit", factor), **look)
            used.append(base)
    times = Times.of(case)
    if times is not None:
        hits = np.linspace(0, 1, 51)
        sd = times.sd(alpha, lookahead)
        y = [times.ssd(alpha, lookahead, float(h)) / sd for h in hits]
        poster.line(
            ax, "closed formula, over SD", hits, y, color=BLACK, linestyle="--", linewidth=1.5
        )
    parity(ax)
    ax.set_xlabel("imposed cache-hit rate p_hit")
    return used
