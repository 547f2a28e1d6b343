"""Draft pools: tok/s a GPU and ms a token, by the number of targets that share a draft."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.rows import Data
from analysis.select import richest, where
from analysis.style import BLACK, METHODS, Poster, look, need

_CAPTION = (
    "{device}: simulated frame by frame from the device's profile (GEMM-only, no LM head; larger "
    "forwards than were probed are extrapolated). No pool ran on GPUs. Every point at its own best "
    "K, fan-out and backup; all lines at equal GPUs, b sequences a target. {laws}."
)


def pools(data: Data) -> Poster:
    """Draws tok/s a GPU, for up to two b, and ms a token at the smallest, over targets a draft."""
    rows = richest(data.pools, ("acceptance", "hit_law"), ("pair", "tp", "batch_size", "targets"))
    shown = _cases(rows)
    need(shown, "pools of two or more sizes, with AR and SD inline")
    batches = sorted({int(b) for _, part in shown for b in part["batch_size"]})[:2]
    poster = Poster(2.2 + 2.7 * (len(batches) + 1))
    grid = poster.panels(len(batches) + 1, len(shown), sharex="col")
    for (*above, below), (name, part) in zip(grid.T, shown, strict=True):
        for ax, batch in zip(above, batches, strict=True):
            ax.set_title(f"{name}, b={batch}")
            here = where(part, batch_size=batch)
            _lines(poster, ax, here, "per_gpu")
            best = where(rows, pair=part["pair"].iloc[0], batch_size=batch)
            best = best.loc[best["method"] != "SSD", "per_gpu"]
            if len(best):  # drawn last, as it may cover another line
                ends, style = _ends(part), {"color": BLACK, "linestyle": "--", "linewidth": 1.6}
                poster.line(ax, "AR or SD inline, any T", ends, [best.max()] * 2, **style)
        below.set_title(f"{name}, b={batches[0]}")
        below.set_label(f"{name}, b={batches[0]}, time a token")
        _lines(poster, below, where(part, batch_size=batches[0]), "token_ms")
        below.set_xlabel("targets a draft")
        for ax in (*above, below):
            ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
    for ax in grid[:-1, 0]:
        ax.set_ylabel("tok/s per GPU")
    grid[-1, 0].set_ylabel("ms a token\nof a sequence")
    first = rows.iloc[0]
    laws = f"Acceptance {first['acceptance']}, hits of {first['hit_law']}"
    text = _CAPTION.format(device=first["device_name"], laws=laws)
    return poster.finish("How many targets should share a draft?", text)


def _cases(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Returns (pair and T, rows) of the smallest and the largest T of each pair that has pools and
    rivals."""
    by_pair: dict[str, list[tuple[str, pd.DataFrame]]] = {}
    for (pair, tp), part in rows.groupby(["pair", "tp"], sort=True):
        sizes = part.loc[part["targets"] > 1, "targets"].nunique()
        if sizes >= 2 and {"AR", "SD inline"} <= set(part["method"]):
            by_pair.setdefault(pair, []).append((f"{pair.upper()}, T={tp}", part))
    return [case for of in by_pair.values() for case in (of if len(of) < 3 else [of[0], of[-1]])]


def _lines(poster: Poster, ax: Axes, part: pd.DataFrame, column: str) -> None:
    """Draws the pools, a draft each included, and AR and SD inline on the same T."""
    ssd = where(part, method="SSD").sort_values("targets")
    also = {"hit_rate": ssd["hit_rate"], "lookahead": ssd["lookahead"]}
    label = "a shared draft (1: a draft each)"
    poster.line(ax, label, ssd["targets"], ssd[column], also=also, **look("SSD"))
    for method in ("SD inline", "AR"):
        rows = where(part, method=method)
        if len(rows):
            values = [float(rows[column].iloc[0])] * 2
            style = {"color": METHODS[method][0], "linewidth": 2.0}
            poster.line(ax, f"{method}, same T", _ends(part), values, **style)
    ax.set_xscale("log")
    ticks = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= ssd["targets"].max()]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter("{x:g}")


def _ends(part: pd.DataFrame) -> tuple[int, int]:
    return part["targets"].min(), part["targets"].max()
