"""Batch scaling and the p_hit^b cliff: a round waits for every sequence that misses."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis.model import Times, over_batch, price
from analysis.rows import Data
from analysis.select import Case, cases, gains, plain, richest, where
from analysis.style import (
    BLACK,
    GAINS,
    ORANGE,
    PURPLE,
    RED,
    Poster,
    caption,
    look,
    need,
    parity,
)

_RHO = 0.5
_LOOKS = [{"color": c, "marker": m} for c, m in zip((ORANGE, RED, PURPLE), "v^P", strict=True)]


def batch_scaling(data: Data) -> Poster:
    """Above: SSD over SD on the same GPUs, by b. Below: every method's tok/s per GPU over AR's."""
    shown = [(c, *_sweep(c)) for c in cases(data, plain(data.rows), ["batch_size"])]
    shown = [item for item in shown if all(p["batch_size"].nunique() >= 3 for p in item[1:])][:3]
    need(shown, "SD and SSD of one alpha and K at three or more batch sizes")
    poster = Poster(9.6)
    grid = poster.panels(2, len(shown), sharex="col", sharey="row")
    for (above, below), (case, ssd, sd) in zip(grid.T, shown, strict=True):
        alpha, lookahead = ssd["alpha"].iloc[0], int(ssd["lookahead"].iloc[0])
        title = f"{case.label}+1, K={lookahead}, α={alpha:g}"
        above.set_title(title)
        above.set_label(f"{title}: over SD")
        below.set_label(f"{title}: per GPU over AR")
        _gain(poster, above, case, ssd, sd)
        _per_gpu(poster, below, case, ssd, sd)
        below.set_xlabel("sequences b")
        below.set_xticks(sorted(ssd["batch_size"].unique()))
        below.xaxis.set_major_formatter("{x:.0f}")
        below.minorticks_off()
    grid[0, 0].set_ylabel("SSD's gain over SD, ×\n(equal GPUs: raw and per GPU)")
    grid[1, 0].set_ylabel("gain per GPU over AR\nat the same b, ×")
    text = caption(
        [part for case, ssd, sd in shown for part in (ssd, sd, case.own_ar)],
        *(price(case, ssd[ssd["p_hit"].notna()]) for case, ssd, _ in shown),
        "Dashed: the closed formula with P(all hit) = p_hit^b, from the rows' own times at each b. "
        f"Dotted: hits correlated, {_RHO:.0%} of rounds hit or miss together (modelled)",
        GAINS,
    )
    return poster.finish("Batch scaling and the p_hit^b cliff", text)


def _sweep(case: Case) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns SSD rows of the alpha and K with most batch sizes, and the SD rows to compare."""
    ssd = richest(case.method("SSD"), ["alpha", "lookahead"], ["batch_size", "hit_law"])
    if not len(ssd):
        return ssd, ssd
    many = ssd.groupby(["hit_law", "policy"])["batch_size"].transform("nunique") >= 3
    alike = {name: ssd[name].iloc[0] for name in ("alpha", "lookahead")}
    return ssd[many], where(case.rows, mode="sd", **alike)


def _laws(ssd: pd.DataFrame) -> list[tuple[str, float, pd.DataFrame]]:
    """Returns (label, hit rate of a sequence, rows) of the three hit models with the most hits."""
    laws = []
    for (law, _), group in ssd.groupby(["hit_law", "policy"]):
        rate = float(group["p_hit"].fillna(group["hit_rate"].mean()).iloc[0])
        kind = "imposed p_hit" if str(law).startswith("p_hit") else "hit rate"
        laws.append((f"SSD, {kind} {rate:.2g}", rate, group))
    return sorted(laws, key=lambda item: item[1])[-3:]


def _gain(poster: Poster, ax: Axes, case: Case, ssd: pd.DataFrame, sd: pd.DataFrame) -> None:
    times = {int(b): Times.of(case, int(b)) for b in sorted(case.rows["batch_size"].unique())}
    at = float(ssd["alpha"].iloc[0]), int(ssd["lookahead"].iloc[0])
    for (label, rate, group), style in zip(_laws(ssd), _LOOKS, strict=False):
        poster.gains(ax, label, gains(group, where(sd, method="SD"), "batch_size"), **style)
        for rho, dashes in ((0.0, "--"), (_RHO, ":")):
            model = {b: over_batch(t, *at, rate, b, rho) for b, t in times.items() if t is not None}
            line = {"color": style["color"], "linestyle": dashes, "linewidth": 1.5}
            name = f"_{label}, formula, ρ={rho:g}"
            poster.line(ax, name, model.keys(), model.values(), **line)
    ax.plot([], [], "--", color=BLACK, linewidth=1.5, label="closed formula, hits independent")
    ax.plot([], [], ":", color=BLACK, linewidth=1.5, label=f"the same, hits correlated, ρ={_RHO:g}")
    parity(ax)
    ax.set_xscale("log", base=2)


def _per_gpu(poster: Poster, ax: Axes, case: Case, ssd: pd.DataFrame, sd: pd.DataFrame) -> None:
    """Draws tok/s per GPU over AR's on the targets' GPUs at the same b."""
    lines = [(m, where(sd, method=m), look(m)) for m in ("SD inline", "SD")]
    lines += [(of[0], of[2], style) for of, style in zip(_laws(ssd), _LOOKS, strict=False)]
    for label, rows, style in lines:
        if len(rows):
            share = case.tp / rows["gpus"].iloc[0]
            poster.gains(ax, label, gains(rows, case.own_ar, "batch_size", share), **style)
    parity(ax, 1.0, "AR")
