"""Draft pools: what a GPU and a sequence get, by the number of targets that share a draft."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.figures.common import need
from analysis.load import Data
from analysis.select import richest
from analysis.style import BLACK, METHODS, Poster

POOL, THEORY, ANY = (
    "a shared draft (1: a draft each)",
    "by queueing theory",
    "AR or SD inline, any T",
)
_CAPTION = (
    "Simulated frame by frame from the durations of the device's profile (GEMM-only, no LM head; "
    "forwards of more rows than were probed are extrapolated); no pool ran on GPUs. Every point at "
    "its own best K, fan-out and backup. {laws}. A GPU: of the targets' T each and of their draft; "
    "b sequences a target. Copies of any use fill the same GPUs, so all lines are at equal GPUs. "
    "Theory: common/queueing.py"
)


def pools(data: Data) -> Poster:
    """Draws tok/s a GPU, for up to two b, and ms a token at the smallest, over targets a draft."""
    rows = richest(data.pools, ("acceptance", "hit_law"), ("pair", "tp", "batch_size", "targets"))
    shown = _cases(rows)
    need(shown, "pools of two or more sizes, with AR and SD inline")
    batches = sorted({int(b) for _, part in shown for b in part["batch_size"]})[:2]
    poster = Poster(3.0 + 3.7 * (len(batches) + 1))
    grid = poster.panels(len(batches) + 1, len(shown), sharex="col")
    for column, (name, part) in zip(grid.T, shown, strict=True):
        pair = rows[rows["pair"] == part["pair"].iloc[0]]
        for ax, batch in zip(column, batches, strict=False):
            ax.set_title(f"{name}, b = {batch}")
            _rates(poster, ax, *(p[p["batch_size"] == batch] for p in (part, pair)))
        column[-1].set_title(f"{name}, b = {batches[0]}")
        column[-1].set_label(f"{name}, b = {batches[0]}, time a token")
        _times(poster, column[-1], part[part["batch_size"] == batches[0]])
        column[-1].set_xlabel("targets a draft")
        for ax in column:
            ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
    for ax in grid[:-1, 0]:
        ax.set_ylabel("tok/s a GPU")
    grid[-1, 0].set_ylabel("ms a token of a sequence")
    first = rows.iloc[0]
    laws = f"Acceptance {first['acceptance']}, hits as of {first['hit_law']}"
    return poster.finish("Targets that share a draft", _CAPTION.format(laws=laws))


def _cases(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Returns (pair and T, rows) of the smallest and the largest T of each pair that has pools and
    rivals."""
    found = []
    for (pair, tp), part in rows.groupby(["pair", "tp"], sort=True):
        sizes = part.loc[part["targets"] > 1, "targets"].nunique()
        if sizes >= 2 and {"AR", "SD inline"} <= set(part["method"]):
            found.append((str(pair), int(tp), part))
    every = {pair: [tp for name, tp, _ in found if name == pair] for pair, _, _ in found}
    ends = {pair: (min(tps), max(tps)) for pair, tps in every.items()}
    return [(f"{pair}, T = {tp}", part) for pair, tp, part in found if tp in ends[pair]]


def _rates(poster: Poster, ax: Axes, part: pd.DataFrame, pair: pd.DataFrame) -> None:
    """Draws tok/s a GPU; pair: the rows of every T."""
    _pool(poster, ax, part, "per_gpu")
    theory = part[part["theory"].notna()].sort_values("targets")
    look: dict[str, Any] = {"color": BLACK, "linestyle": ":", "linewidth": 1.6}
    poster.line(ax, THEORY, theory["targets"], theory["theory"], **look)
    _rivals(poster, ax, part, "per_gpu")
    ends = part["targets"].min(), part["targets"].max()
    rivals = pair[pair["method"] != "SSD"]
    if len(rivals):  # last: where the best T is this one, it lies on that one's line
        best = [float(rivals["per_gpu"].max())] * 2
        poster.line(ax, ANY, ends, best, color=BLACK, linestyle="--", linewidth=1.6)


def _times(poster: Poster, ax: Axes, part: pd.DataFrame) -> None:
    """Draws the time a token."""
    _pool(poster, ax, part, "token_ms")
    _rivals(poster, ax, part, "token_ms")


def _pool(poster: Poster, ax: Axes, part: pd.DataFrame, column: str) -> None:
    """Draws the line of pools, a draft each included, and the axis that all share."""
    ssd = part[part["method"] == "SSD"].sort_values("targets")
    color, marker = METHODS["SSD"]
    also = {"hit_rate": ssd["hit_rate"], "lookahead": ssd["lookahead"]}
    poster.line(ax, POOL, ssd["targets"], ssd[column], also=also, color=color, marker=marker)
    ax.set_xscale("log")
    ticks = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= ssd["targets"].max()]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter("{x:g}")


def _rivals(poster: Poster, ax: Axes, part: pd.DataFrame, column: str) -> None:
    """Draws AR and SD inline on the same T, whatever the number of targets."""
    ends = part["targets"].min(), part["targets"].max()
    for method in ("SD inline", "AR"):
        color, _ = METHODS[method]
        rows = part[part["method"] == method]
        if len(rows):
            value = [float(rows[column].iloc[0])] * 2
            poster.line(ax, f"{method}, same T", ends, value, color=color, linewidth=2.0)
