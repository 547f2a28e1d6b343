"""Batch scaling and the p_hit^b cliff: a round waits for every sequence that misses."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import GAINS, caption, draw_gains, look, need, no_claim
from analysis.gain import gains
from analysis.imposed import price
from analysis.load import Data
from analysis.select import Case, cases, plain, richest
from analysis.style import BLACK, ORANGE, PURPLE, RED, Poster, parity
from analysis.times import Times, over_batch

_RHO = 0.5
_COLORS = (ORANGE, RED, PURPLE)
_MARKERS = "v^P"


def batch_scaling(data: Data) -> Poster:
    """Above: SSD over SD on the same GPUs, by b. Below: every method's tok/s per GPU over AR's."""
    rows = data.rows
    shown = [(c, *_sweep(c)) for c in cases(data, plain(rows), ["batch_size"])]
    shown = [item for item in shown if all(p["batch_size"].nunique() >= 3 for p in item[1:])]
    shown = shown[:3]
    need(shown, "SD and SSD of one alpha and K at three or more batch sizes")
    poster = Poster(9.6)
    grid = poster.panels(2, len(shown), sharex="col", sharey="row")
    for column, (case, ssd, sd) in zip(grid.T, shown, strict=True):
        alpha, lookahead = ssd["alpha"].iloc[0], int(ssd["lookahead"].iloc[0])
        title = f"{case.label}+1, K={lookahead}, α={alpha:g}"
        column[0].set_title(title)
        column[0].set_label(f"{title}: over SD")
        column[1].set_label(f"{title}: per GPU over AR")
        _gain(poster, column[0], case, ssd, sd)
        _rates(poster, column[1], case, ssd, sd)
        column[1].set_xlabel("sequences b")
        column[1].set_xticks(sorted(ssd["batch_size"].unique()))
        column[1].xaxis.set_major_formatter("{x:.0f}")
        column[1].minorticks_off()
    grid[0, 0].set_ylabel("SSD's gain over SD, ×\n(equal GPUs: raw and per GPU)")
    grid[1, 0].set_ylabel("gain per GPU over AR\nat the same b, ×")
    used = [part for _, ssd, sd in shown for part in (ssd, sd)] + [
        c.ar[c.ar["gpus"] == c.tp] for c, _, _ in shown
    ]
    text = caption(
        data,
        used,
        *(price(data, case, ssd[ssd["p_hit"].notna()]) for case, ssd, _ in shown),
        "Dashed: the closed formula with P(all hit) = p_hit^b, from the rows' own times at each b. "
        f"Dotted: hits correlated, {_RHO:.0%} of rounds hit or miss together (modelled)",
        GAINS,
        no_claim(used),
    )
    return poster.finish("Batch scaling and the p_hit^b cliff", text)


def _sweep(case: Case) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns SSD rows of the alpha, K and backup with most batch sizes, and the SD rows to
    compare."""
    ssd = richest(case.method("SSD"), ["alpha", "lookahead"], ["batch_size", "hit_law"])
    if not len(ssd):
        return ssd, ssd
    first = ssd.iloc[0]
    many = ssd.groupby(["hit_law", "policy"])["batch_size"].transform("nunique") >= 3
    alike = {"alpha": first["alpha"], "lookahead": first["lookahead"]}
    return ssd[many], case.rows[
        case.rows["method"].isin(["SD", "SD inline"])
        & (case.rows["alpha"] == alike["alpha"])
        & (case.rows["lookahead"] == alike["lookahead"])
    ]


def _laws(ssd: pd.DataFrame) -> list[tuple[str, float, pd.DataFrame]]:
    """Returns (label, hit rate of a sequence, rows) for each hit law, the lowest hit rate first."""
    laws = []
    for (law, _policy), group in ssd.groupby(["hit_law", "policy"]):
        rate = group["p_hit"].iloc[0] if group["p_hit"].notna().all() else group["hit_rate"].mean()
        kind = "imposed p_hit" if str(law).startswith("p_hit") else "hit rate"
        laws.append((f"SSD, {kind} {rate:.2g}", float(rate), group))
    return sorted(laws, key=lambda item: item[1])[-3:]


def _gain(poster: Poster, ax: Axes, case: Case, ssd: pd.DataFrame, sd: pd.DataFrame) -> None:
    alone = sd[sd["method"] == "SD"]
    for place, (label, rate, group) in enumerate(_laws(ssd)):
        color = _COLORS[place]
        if len(alone):
            gained = gains(group, alone, "batch_size")
            draw_gains(poster, ax, label, gained, color=color, marker=_MARKERS[place])
        first = group.iloc[0]
        for rho, style in ((0.0, "--"), (_RHO, ":")):
            model = _model(case, first["alpha"], int(first["lookahead"]), rate, rho)
            poster.line(
                ax,
                f"_{label}, formula, ρ={rho:g}",
                model.keys(),
                model.values(),
                color=color,
                linestyle=style,
                linewidth=1.5,
            )
    ax.plot([], [], "--", color=BLACK, linewidth=1.5, label="closed formula, hits independent")
    ax.plot([], [], ":", color=BLACK, linewidth=1.5, label=f"the same, hits correlated, ρ={_RHO:g}")
    parity(ax)
    ax.set_xscale("log", base=2)


def _model(case: Case, alpha: float, lookahead: int, rate: float, rho: float) -> dict[int, float]:
    sizes = sorted(case.rows["batch_size"].unique())
    times = {int(b): Times.of(case, int(b)) for b in sizes}
    return {
        b: over_batch(t, alpha, lookahead, rate, b, rho) for b, t in times.items() if t is not None
    }


def _rates(poster: Poster, ax: Axes, case: Case, ssd: pd.DataFrame, sd: pd.DataFrame) -> None:
    """Draws tok/s per GPU over AR's on the targets' GPUs at the same b."""
    ar = case.ar[case.ar["gpus"] == case.tp]
    for method in ("SD inline", "SD"):
        _per_gpu(poster, ax, method, sd[sd["method"] == method], ar, look(method))
    for place, (label, _, group) in enumerate(_laws(ssd)):
        style = {"color": _COLORS[place], "marker": _MARKERS[place]}
        _per_gpu(poster, ax, label, group, ar, style)
    parity(ax, 1.0, "AR")


def _per_gpu(
    poster: Poster,
    ax: Axes,
    label: str,
    rows: pd.DataFrame,
    ar: pd.DataFrame,
    style: dict[str, Any],
) -> None:
    if not len(rows) or not len(ar):
        return
    share = ar["gpus"].iloc[0] / rows["gpus"].iloc[0]
    draw_gains(poster, ax, label, gains(rows, ar, "batch_size", share), **style)
