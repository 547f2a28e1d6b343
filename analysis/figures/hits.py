"""What cache hits are worth: SSD over SD with imposed p_hit, and the fan-out that buys hits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.model import Times, price
from analysis.rows import Data
from analysis.select import Case, cases, gains, plain, points, richest, where
from analysis.style import BLACK, BLUE, GAINS, RED, SKY, Poster, caption, need, parity

_KINDS: dict[str, dict[str, Any]] = {
    "uniform": {"color": BLUE, "marker": "s"},
    "geometric": {"color": RED, "marker": "^"},
}


def cache_hits(data: Data) -> Poster:
    """x = imposed hit rate; y = gain over SD on the same GPUs, over SD without a draft GPU (raw and
    per GPU), and by the closed formula with the rows' own times."""
    rows = data.rows
    wanted = plain(rows) & (rows["batch_size"] == 1)
    wanted &= rows["p_hit"].notna() | (rows["mode"] != "ssd")
    by = ["alpha", "lookahead", "policy"]
    every = cases(data, wanted, ["p_hit"])
    shown = [(case, richest(case.method("SSD"), by, ["p_hit"])) for case in every]
    shown = [(case, ssd) for case, ssd in shown if ssd["p_hit"].nunique() >= 3][:3]
    need(shown, "SSD with imposed hit rates, three or more, and SD")
    poster = Poster(7.4)
    grid = poster.panels(1, len(shown), sharey=True)[0]
    used: list[pd.DataFrame] = []
    for ax, (case, ssd) in zip(grid, shown, strict=True):
        used += _hits(poster, ax, case, ssd)
    grid[0].set_ylabel("SSD's gain over SD, ×")
    imposed = [price(case, ssd) for case, ssd in shown]
    terms = "Equal K, alpha and fan-out; per GPU counts the draft GPU"
    text = caption(used, terms, *imposed, GAINS)
    return poster.finish("What cache hits are worth: SSD over SD", text)


def _hits(poster: Poster, ax: Axes, case: Case, ssd: pd.DataFrame) -> list[pd.DataFrame]:
    alpha, lookahead = float(ssd["alpha"].iloc[0]), int(ssd["lookahead"].iloc[0])
    ax.set_title(f"{case.label}+1, K={lookahead}, α={alpha:g}")
    same, inline = (
        case.method(name, alpha=alpha, lookahead=lookahead) for name in ("SD", "SD inline")
    )
    share = case.tp / (case.tp + 1)
    for name, base, factor, look in (
        ("over SD on the same GPUs", same, 1.0, {"color": RED, "marker": "^"}),
        ("over SD inline, raw", inline, 1.0, {"color": BLUE, "marker": "s"}),
        ("over SD inline, per GPU", inline, share, {"color": SKY, "marker": "D"}),
    ):
        poster.gains(ax, name, gains(ssd, base, "p_hit", factor, one_base=True), **look)
    if (times := Times.of(case)) is not None:
        x, sd = np.linspace(0, 1, 51), times.sd(alpha, lookahead)
        y = [times.ssd(alpha, lookahead, float(h)) / sd for h in x]
        style = {"color": BLACK, "linestyle": "--", "linewidth": 1.5}
        poster.line(ax, "closed formula, over SD", x, y, **style)
    parity(ax)
    ax.set_xlabel("imposed cache-hit rate p_hit")
    return [ssd, same, inline]


def fan_out(data: Data) -> Poster:
    """x = branches ΣF; y = hit rate, growth over a verification, and gain over AR (raw and per
    GPU)."""
    rows = data.rows
    wanted = plain(rows) & (rows["batch_size"] == 1)
    wanted &= (rows["mode"] != "ssd") | (rows["hit_law"].fillna("").str.startswith("power"))
    shown = [(case, _budgets(case)) for case in cases(data, wanted, ["policy"])]
    shown = [(case, ssd) for case, ssd in shown if _is_sweep(ssd)][:3]
    need(shown, "SSD, uniform and geometric, at three or more branch budgets of one power law")
    poster = Poster(11.2)
    grid = poster.panels(3, len(shown), sharex="col", sharey="row")
    for column, (case, ssd) in zip(grid.T, shown, strict=True):
        first = ssd.iloc[0]
        law = str(first["hit_law"]).removeprefix("power:").replace(",", ", ").replace("=", " ")
        column[0].set_title(f"{case.label}+1, K={first['lookahead']}, α={first['alpha']:g}, {law}")
        for ax, what in zip(column, ("hit rate", "growth", "gain over AR"), strict=True):
            ax.set_label(f"{case.label}+1: {what}")
        for kind, look in _KINDS.items():
            _fan_out(poster, column, case, where(ssd, kind=kind), kind, look)
        if ssd["t_growth_s"].isna().all():
            reason = "never grown to its end: the outcome came first"
            place = {"transform": column[1].transAxes, "ha": "center", "fontsize": 12}
            column[1].text(0.5, 0.4, reason, **place)
        parity(column[1], 1.0, "one verification")
        parity(column[2], 1.0, "AR")
        column[2].set_xlabel("branch budget ΣF")
    grid[0, 0].set_ylim(0, 1)
    grid[1, 0].set_ylim(bottom=0)
    labels = "hit rate", "growth T_p, in\nverifications", "gain over AR, ×"
    for ax, label in zip(grid[:, 0], labels, strict=True):
        ax.set_ylabel(label)
    used = [part for case, ssd in shown for part in (ssd, case.own_ar)]
    growth = "Growth: glue and K steps over all branches, where they ran to their end"
    return poster.finish("Fan-out: what more branches buy", caption(used, growth, GAINS))


def _budgets(case: Case) -> pd.DataFrame:
    ssd = case.method("SSD")
    ssd = ssd.assign(kind=ssd["policy"].str.split(":").str[0])
    return richest(ssd, ["alpha", "lookahead", "hit_law"], ["kind", "branch_budget"])


def _is_sweep(ssd: pd.DataFrame) -> bool:
    budgets = ssd.groupby("kind")["branch_budget"].nunique()
    return bool(len(budgets) == len(_KINDS) and budgets.max() >= 3)


def _fan_out(
    poster: Poster, column: Any, case: Case, rows: pd.DataFrame, kind: str, look: dict[str, Any]
) -> None:
    medians = points(rows, ["branch_budget"])
    x, grown = medians["branch_budget"], medians["t_growth_s"] / medians["t_target_s"]
    poster.line(column[0], kind, x, medians["hit_rate"], **look)
    poster.line(column[1], kind, x[grown.notna()], grown.dropna(), **look)
    ar, share = where(case.own_ar, batch_size=1), case.tp / (case.tp + 1)
    for name, factor, style in ((kind, 1.0, "-"), (f"{kind}, per GPU", share, ":")):
        gained = gains(rows, ar, "branch_budget", factor, one_base=True)
        poster.gains(column[2], name, gained, linestyle=style, **look)
