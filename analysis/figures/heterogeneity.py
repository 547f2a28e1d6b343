"""A draft device slower or faster than the targets': only its step time changes the round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import caption, need, no_claim
from analysis.gain import gain
from analysis.load import Data
from analysis.select import Case, best_point, cases, plain, richest
from analysis.style import BLUE, GREEN, GREY, RED, SKY, Poster, parity
from analysis.times import Times

_FACTORS = np.geomspace(0.25, 8, 61)
_LAW = ("hit_law", "policy")


def heterogeneity(data: Data) -> Poster:
    """x = draft step time over this machine's; y = gain of SD and SSD over AR, raw and per GPU."""
    wanted = plain(data.rows) & (data.rows["batch_size"] == 1)
    every = cases(data, wanted, ["other_draft", "method", "hit_law"], ["other_draft"])
    shown = [(c, t) for c in every if (t := Times.of(_own(c))) is not None]
    shown = shown[:2]
    need(shown, "AR, SD and SSD of one pair at batch 1, with t_target_s, t_draft_s, t_growth_s")
    poster = Poster(7.8)
    grid = poster.panels(1, len(shown), sharey=True)[0]
    used = []
    for ax, (case, times) in zip(grid, shown, strict=True):
        used += _panel(poster, ax, case, times)
    grid[0].set_ylabel("gain over AR on the target GPUs, ×")
    text = caption(
        data,
        used,
        "Lines: MODELLED by the closed formulas from these rows' times, the draft's multiplied by "
        "x, each method at its own best K ≤ 16. Points: measured rows, at their own draft step; "
        "open: the draft's device is another than the targets'",
        no_claim(used),
    )
    return poster.finish("Heterogeneity: a slower or faster draft device", text)


def _own(case: Case) -> Case:
    """Returns the rows whose draft runs on a device like the targets'."""
    return replace(case, rows=case.rows[case.rows["other_draft"].isna()])


def _panel(poster: Poster, ax: Axes, case: Case, times: Times) -> list[pd.DataFrame]:
    rows = case.rows[(case.rows["batch_size"] == 1) & case.rows["alpha"].notna()]
    own = rows[rows["other_draft"].isna()]
    sweep = richest(own[own["method"] == "SSD"], ["alpha"], [*_LAW, "lookahead"])
    sweep = richest(sweep, _LAW, ["lookahead"])
    alpha = float(sweep["alpha"].iloc[0])
    hits = float(sweep["hit_rate"].median())
    ax.set_title(f"{case.label}+1, α={alpha:g}, hit rate {hits:.2f}")
    share = case.tp / (case.tp + 1)
    curves = {
        "SSD": ([times.drafting(x).best_ssd(alpha, hits) for x in _FACTORS], RED),
        "SD": ([times.drafting(x).best_sd(alpha) for x in _FACTORS], BLUE),
    }
    for name, (values, color) in curves.items():
        y = np.array(values)
        poster.line(ax, f"{name}, raw", _FACTORS, y, color=color)
        poster.line(ax, f"{name}, per GPU", _FACTORS, y * share, color=color, linestyle=":")
    of = " (T=3: expected)" if times.is_expected else ""
    rivals = (
        ("SD inline", times.best_sd_wide(alpha), SKY),
        ("lookup at .3", times.lookup_wide, GREEN),
        ("AR", times.ar / times.ar_wide, GREY),
    )
    for name, value, color in rivals:
        label = f"{name} with the extra GPU as a target"
        ax.axhline(value, color=color, linestyle="--", linewidth=1.6, label=label)
        poster.keep(ax, label + of, y=value)
    if times.is_expected:
        ax.set_title(
            f"{ax.get_title()}\nAR and SD inline on {case.tp + 1} GPUs: not measured, expected"
        )
    parity(ax, 1.0, "AR")
    grown = (rows[list(_LAW)] == sweep[list(_LAW)].iloc[0]).all(axis=1)
    measured = rows[(rows["alpha"] == alpha) & ((rows["method"] == "SD") | grown)]
    used = _points(poster, ax, case, times, measured)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("draft step, over this machine's own")
    return [case.ar, *used]


def _points(
    poster: Poster, ax: Axes, case: Case, times: Times, rows: pd.DataFrame
) -> list[pd.DataFrame]:
    """Returns the best measured K of each method, for each draft device."""
    ar = case.ar[(case.ar["gpus"] == case.tp) & (case.ar["batch_size"] == 1)]
    used = [rows]
    for method, color in (("SSD", RED), ("SD", BLUE)):
        here = rows[rows["method"] == method].dropna(subset=["step_s"])
        for device, group in here.groupby(here["other_draft"].fillna("")):
            best = best_point(group, ["lookahead"])
            over = gain(group[group["lookahead"] == best["lookahead"]], ar)
            y, low, high = over.speedup, over.low, over.high
            x = best["step_s"] / times.step
            if device and method == "SSD":
                _name(ax, str(device), x, high)
            poster.line(
                ax,
                f"{method}, measured",
                [x],
                [y],
                low=[low],
                high=[high],
                also={"headline": [over.is_headline]},
                color=color,
                marker="o",
                linestyle="none",
                markerfacecolor="white" if device else color,
                markersize=10,
            )
    return used


def _name(ax: Axes, device: str, x: float, y: float) -> None:
    """Writes the draft device's name above its point."""
    label = device.removeprefix("NVIDIA ").removesuffix(" (emulated)")
    ax.annotate(label, (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=9)
