"""A draft device slower or faster than the targets': only its step time changes the round."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.model import Times
from analysis.rows import Data
from analysis.select import Case, best_rows, cases, gain, plain, points, richest, where
from analysis.style import BLUE, GREEN, GREY, RED, SKY, Poster, caption, need, note, parity

_FACTORS = np.geomspace(0.25, 8, 61)
_LAW = ["hit_law", "policy"]


def heterogeneity(data: Data) -> Poster:
    """x = draft step time over this machine's; y = gain of SD and SSD over AR, raw and per GPU."""
    wanted = plain(data.rows) & (data.rows["batch_size"] == 1)
    every = cases(data, wanted, ["other_draft", "method", "hit_law"], ["other_draft"])
    every = [_named(case) for case in every]
    shown = [(c, t) for c in every if (t := Times.of(c.only(other_draft=""))) is not None][:2]
    need(shown, "AR, SD and SSD of one pair at batch 1, with t_target_s, t_draft_s, t_growth_s")
    poster = Poster(7.8)
    grid = poster.panels(1, len(shown), sharey=True)[0]
    used = []
    for ax, (case, times) in zip(grid, shown, strict=True):
        used += [case.ar, _panel(poster, ax, case, times)]
    grid[0].set_ylabel("gain over AR on the target GPUs, ×")
    used = [rows.assign(other_draft=rows["other_draft"].replace("", None)) for rows in used]
    text = caption(
        used,
        "Lines: MODELLED by the closed formulas from these rows' times, the draft's multiplied by "
        "x, each method at its own best K ≤ 16. Points: measured rows, at their own draft step; "
        "open: the draft's device is another than the targets'",
    )
    return poster.finish("Heterogeneity: a slower or faster draft device", text)


def _named(case: Case) -> Case:
    """Returns the case with "" as other_draft of drafts on a device like the targets'."""
    rows = case.rows.assign(other_draft=case.rows["other_draft"].fillna(""))
    return Case(**{**vars(case), "rows": rows})


def _panel(poster: Poster, ax: Axes, case: Case, times: Times) -> pd.DataFrame:
    """Draws a case; returns the measured rows."""
    rows = case.rows[case.rows["alpha"].notna()]
    sweep = where(rows, other_draft="", method="SSD")
    sweep = richest(richest(sweep, ["alpha"], [*_LAW, "lookahead"]), _LAW, ["lookahead"])
    alpha, hits = float(sweep["alpha"].iloc[0]), float(sweep["hit_rate"].median())
    share = case.tp / (case.tp + 1)
    expected = f"\nAR and SD inline on {case.tp + 1} GPUs: not measured, expected"
    ax.set_title(f"{case.label}+1, α={alpha:g}, hit rate {hits:.2f}" + expected * times.is_expected)
    for name, color, values in (
        ("SSD", RED, [times.drafting(x).best_ssd(alpha, hits) for x in _FACTORS]),
        ("SD", BLUE, [times.drafting(x).best_sd(alpha) for x in _FACTORS]),
    ):
        y = np.array(values)
        poster.line(ax, f"{name}, raw", _FACTORS, y, color=color)
        poster.line(ax, f"{name}, per GPU", _FACTORS, y * share, color=color, linestyle=":")
    for name, value, color in (
        ("SD inline", times.best_sd_wide(alpha), SKY),
        ("lookup at .3", times.lookup_wide, GREEN),
        ("AR", times.ar / times.ar_wide, GREY),
    ):
        label = f"{name} with the extra GPU as a target"
        ax.axhline(value, color=color, linestyle="--", linewidth=1.6, label=label)
        poster.keep(ax, label + f" (T={case.tp + 1}: expected)" * times.is_expected, y=value)
    parity(ax, 1.0, "AR")
    is_swept = (rows[_LAW] == sweep[_LAW].iloc[0]).all(axis=1)
    used = rows[(rows["alpha"] == alpha) & ((rows["method"] == "SD") | is_swept)]
    for method, color in (("SSD", RED), ("SD", BLUE)):
        here = where(used, method=method).dropna(subset=["step_s"])
        for _, group in here.groupby("other_draft"):
            _point(poster, ax, case, times, best_rows(group, ["lookahead"]), (method, color))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("draft step, over this machine's own")
    return used


def _point(
    poster: Poster, ax: Axes, case: Case, times: Times, best: pd.DataFrame, look: tuple[str, str]
) -> None:
    """Draws the best measured K of a method on one draft device."""
    over = gain(best, where(case.own_ar, batch_size=1))
    if over is None:
        return
    (method, color), device = look, str(best["other_draft"].iloc[0])
    x = float(points(best, ["lookahead"])["step_s"].iloc[0]) / times.step
    if device and method == "SSD":
        name = device.removeprefix("NVIDIA ").removesuffix(" (emulated)")
        note(ax, name, x, over.high, dx=0, dy=6, ha="center", fontsize=9)
    style = {"color": color, "markerfacecolor": "white" if device else color, "marker": "o"}
    ends = {"low": [over.low], "high": [over.high], "also": {"headline": [over.is_headline]}}
    label = f"{method}, measured"
    poster.line(ax, label, [x], [over.speedup], linestyle="none", markersize=10, **ends, **style)
