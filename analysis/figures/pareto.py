"""Throughput against latency: tok/s/GPU over tok/s/sequence, draft GPUs counted."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import caption, look, need, no_claim
from analysis.imposed import price
from analysis.load import Data
from analysis.select import Case, cases, plain, points, richest
from analysis.style import BLACK, Poster, plain_ticks

IMPOSED = "SSD, hits imposed"
_SSD = ("alpha", "lookahead", "hit_law", "policy")


def pareto(data: Data) -> Poster:
    """Draws a point for each method and batch size; the line joins the Pareto-optimal ones."""
    shown = [(case, _rows(case)) for case in cases(data, plain(data.rows), ["batch_size"])]
    shown = [(case, rows) for case, rows in shown if _is_sweep(rows)]
    shown = shown[:2]
    need(shown, "AR, SD and SSD at three or more batch sizes")
    poster = Poster(8.2)
    grid = poster.panels(1, len(shown))[0]
    for ax, (case, rows) in zip(grid, shown, strict=True):
        _panel(poster, ax, case, rows)
    grid[0].set_ylabel("tok/s per GPU (throughput)")
    laws = {str(law) for _, rows in shown for law in rows["hit_law"].dropna()}
    imposed = [price(data, case, rows[rows["method"] == IMPOSED]) for case, rows in shown]
    text = caption(
        data,
        [rows for _, rows in shown],
        *imposed,
        f"Hits of SSD: {', '.join(sorted(laws))}; imposed ones, dashed, are not on the frontier. "
        "Number: sequences b. Medians of repeats; the 95% interval of each is drawn as a cross of "
        "thin lines",
        no_claim(rows for _, rows in shown),
    )
    return poster.finish("Throughput against latency, every GPU counted", text)


def _rows(case: Case) -> pd.DataFrame:
    """Returns the rows of one alpha and K; SSD with the hit law of most batch sizes, and imposed
    hits."""
    ssd = case.method("SSD")
    law = richest(ssd[ssd["p_hit"].isna()], _SSD, ["batch_size"])
    law = law if law["batch_size"].nunique() >= 3 else law.iloc[:0]
    alike = ssd[ssd["p_hit"].notna()]
    for name in ("alpha", "lookahead") if len(law) else ():
        alike = alike[alike[name] == law[name].iloc[0]]
    both = pd.concat([law, richest(alike, _SSD, ["batch_size"]).assign(method=IMPOSED)])
    if not len(both):
        return both
    first = both.iloc[0]
    here = (case.rows["alpha"] == first["alpha"]) & (case.rows["lookahead"] == first["lookahead"])
    sd = case.rows[here & case.rows["method"].isin(["SD", "SD inline"])]
    wide = case.wide[(case.wide["alpha"] == first["alpha"]) & (case.wide["gpus"] == case.tp + 1)]
    return pd.concat([case.ar, sd, wide[wide["lookahead"] == first["lookahead"]], both])


def _is_sweep(rows: pd.DataFrame) -> bool:
    sizes = rows.groupby("method")["batch_size"].nunique()
    both = "AR" in sizes.index and bool({"SSD", IMPOSED} & set(sizes.index))
    return bool(both and (sizes >= 3).sum() >= 3)


def _panel(poster: Poster, ax: Axes, case: Case, rows: pd.DataFrame) -> None:
    first = rows[rows["mode"] == "ssd"].iloc[0]
    ax.set_title(f"{case.label}, K={first['lookahead']}, α={first['alpha']:g}")
    every = []
    for (method, gpus), group in rows.groupby(["method", "gpus"], sort=True):
        medians = points(group, ["batch_size"])
        style = look("SSD" if method == IMPOSED else method)
        more = int(gpus) - case.tp
        label = f"{method}, T{f'+{more}' if more else ''} GPUs"
        wide = more > 0 and method in ("AR", "SD inline")
        x, y = medians["per_sequence"].to_numpy(), medians["per_gpu"].to_numpy()
        below, above = (
            (medians[end] / medians["tok_per_s"] - 1).abs().to_numpy() for end in ("low", "high")
        )
        ax.errorbar(
            x,
            y,
            xerr=[x * below, x * above],
            yerr=[y * below, y * above],
            fmt="none",
            color=style["color"],
            elinewidth=1,
            zorder=2,
        )
        poster.line(
            ax,
            label,
            x,
            y,
            also={"b": medians["batch_size"], "low": y * (1 - below), "high": y * (1 + above)},
            linewidth=1.4,
            linestyle=":" if wide else "--" if method == IMPOSED else "-",
            markerfacecolor="white" if wide or method == IMPOSED else style["color"],
            **style,
        )
        for _, p in medians.iterrows():
            ax.annotate(
                f"{p['batch_size']:.0f}",
                (p["per_sequence"], p["per_gpu"]),
                fontsize=9.5,
                xytext=(6, 5),
                textcoords="offset points",
                color=style["color"],
            )
        every += list(zip(x, y, strict=True)) if method != IMPOSED else []
    front = _frontier(every)
    poster.line(
        ax, "frontier", *zip(*front, strict=True), color=BLACK, linewidth=6, alpha=0.13, zorder=1
    )
    ax.set(yscale="log", xlabel="tok/s per sequence (1 / latency)")
    plain_ticks(ax.yaxis)


def _frontier(points_: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points that no other exceeds in both values, fastest sequence first."""
    frontier: list[tuple[float, float]] = []
    for x, y in sorted(points_, reverse=True):
        if not frontier or y > frontier[-1][1]:
            frontier.append((x, y))
    return frontier
