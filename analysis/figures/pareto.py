"""Throughput against latency: tok/s/GPU over tok/s/sequence, draft GPUs counted."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis.model import price
from analysis.rows import Data
from analysis.select import Case, cases, plain, points, richest, where
from analysis.style import BLACK, Poster, caption, look, need, note, plain_ticks

IMPOSED = "SSD, hits imposed"
_SSD = ("alpha", "lookahead", "hit_law", "policy")


def pareto(data: Data) -> Poster:
    """Draws a point for each method and batch size; the line joins the Pareto-optimal ones."""
    shown = [(case, _rows(case)) for case in cases(data, plain(data.rows), ["batch_size"])]
    shown = [(case, rows) for case, rows in shown if _is_sweep(rows)][:2]
    need(shown, "AR, SD and SSD at three or more batch sizes")
    poster = Poster(8.2)
    grid = poster.panels(1, len(shown))[0]
    for ax, (case, rows) in zip(grid, shown, strict=True):
        _panel(poster, ax, case, rows)
    grid[0].set_ylabel("tok/s per GPU (throughput)")
    laws = {str(law) for _, rows in shown for law in rows["hit_law"].dropna()}
    text = caption(
        [rows for _, rows in shown],
        *(price(case, where(rows, method=IMPOSED)) for case, rows in shown),
        f"Hits of SSD: {', '.join(sorted(laws))}; imposed ones, dashed, are not on the frontier. "
        "Number: sequences b. Medians of repeats; the 95% interval of each is drawn as a cross of "
        "thin lines",
    )
    return poster.finish("Throughput against latency, every GPU counted", text)


def _rows(case: Case) -> pd.DataFrame:
    """Returns the rows of one alpha and K; SSD with the hit model of most batch sizes, and imposed
    hits."""
    ssd = case.method("SSD")
    law = richest(ssd[ssd["p_hit"].isna()], _SSD, ["batch_size"])
    law = law if law["batch_size"].nunique() >= 3 else law.iloc[:0]
    imposed = ssd[ssd["p_hit"].notna()]
    if len(law):
        imposed = where(imposed, **{name: law[name].iloc[0] for name in _SSD[:2]})
    both = pd.concat([law, richest(imposed, _SSD, ["batch_size"]).assign(method=IMPOSED)])
    if not len(both):
        return both
    alike = {name: both[name].iloc[0] for name in _SSD[:2]}
    wide = where(case.wide, gpus=case.tp + 1, **alike)
    return pd.concat([case.ar, where(case.rows, mode="sd", **alike), wide, both])


def _is_sweep(rows: pd.DataFrame) -> bool:
    sizes = rows.groupby("method")["batch_size"].nunique()
    both = "AR" in sizes.index and bool({"SSD", IMPOSED} & set(sizes.index))
    return bool(both and (sizes >= 3).sum() >= 3)


def _panel(poster: Poster, ax: Axes, case: Case, rows: pd.DataFrame) -> None:
    first = rows[rows["mode"] == "ssd"].iloc[0]
    ax.set_title(f"{case.label}, K={first['lookahead']}, α={first['alpha']:g}")
    front: list[tuple[float, float]] = []
    for (method, gpus), group in rows.groupby(["method", "gpus"], sort=True):
        is_imposed, more = method == IMPOSED, int(gpus) - case.tp
        is_wide = more > 0 and method in ("AR", "SD inline")
        medians, style = points(group, ["batch_size"]), look("SSD" if is_imposed else method)
        x, y = medians["per_sequence"], medians["per_gpu"]
        low, high = (medians[end] / medians["tok_per_s"] for end in ("low", "high"))
        thin = {"fmt": "none", "color": style["color"], "elinewidth": 1, "zorder": 2}
        ax.errorbar(x, y, xerr=[x - x * low, x * high - x], **thin)
        poster.line(
            ax,
            f"{method}, T{f'+{more}' if more else ''} GPUs",
            x,
            y,
            low=y * low,
            high=y * high,
            also={"b": medians["batch_size"]},
            linewidth=1.4,
            linestyle=":" if is_wide else "--" if is_imposed else "-",
            markerfacecolor="white" if is_wide or is_imposed else style["color"],
            **style,
        )
        for b, at, up in zip(medians["batch_size"], x, y, strict=True):
            note(ax, f"{b:.0f}", at, up, color=style["color"])
        front += [] if is_imposed else list(zip(x, y, strict=True))
    front.sort(reverse=True)
    front = [at for n, at in enumerate(front) if all(at[1] > up for _, up in front[:n])]
    style = {"color": BLACK, "linewidth": 6, "alpha": 0.13, "zorder": 1}
    poster.line(ax, "frontier", *zip(*front, strict=True), **style)
    ax.set(yscale="log", xlabel="tok/s per sequence (1 / latency)")
    plain_ticks(ax.yaxis)
