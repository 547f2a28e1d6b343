"""Summarises the figures of loads in a sentence or two, as analysis.findings does those of runs."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd


def load_speedup(numbers: pd.DataFrame) -> str:
    """Reports each use's speedup over AR at the lowest and the highest rate."""
    return " ".join(f"{name}: {_ends(part)}." for name, part in _panels(numbers))


def _ends(part: pd.DataFrame) -> str:
    told = []
    for series, points in part.groupby("series", sort=False):
        ends = points.loc[[points["x"].idxmin(), points["x"].idxmax()]]
        told.append(f"{series} {', '.join(_gain(point) for _, point in ends.iterrows())}")
    return "; ".join(told)


def _gain(point: pd.Series) -> str:
    return f"{point['y']:.2f}× ({point['low']:.2f}–{point['high']:.2f}) at {point['x']:g}/s"


def load_times(numbers: pd.DataFrame) -> str:
    """Reports the use with the shortest p50 of each time at the highest rate."""
    medians = numbers[~numbers["series"].str.endswith(", p99")]
    told = []
    for name, part in _panels(medians):
        last = part[part["x"] == part["x"].max()]
        best = last.loc[last["y"].idxmin()]
        told.append(
            f"{name} at {best['x']:g}/s: shortest p50 {best['y']:.0f} ms, {best['series']}."
        )
    return " ".join(told)


def load_goodput(numbers: pd.DataFrame) -> str:
    """Reports the best use of each number of GPUs, and of all per GPU."""
    told = []
    for name, part in _panels(numbers):
        best = part.loc[part.groupby("x")["y"].idxmax()]
        uses = ", ".join(_good(point) for _, point in best.iterrows())
        most = part.loc[part["per_gpu"].idxmax()]
        told.append(f"{name}: {uses}; most per GPU: {most['series']}.")
    return " ".join(told)


def _good(point: pd.Series) -> str:
    gpus = "1 GPU" if point["x"] == 1 else f"{point['x']:g} GPUs"
    return f"{gpus} {point['y']:.2f}/s ({point['series']})"


def load_frontier(numbers: pd.DataFrame) -> str:
    """Reports which use is fastest for one request, and which gives most per GPU."""
    told = []
    for name, part in _panels(numbers):
        fast, most = part.loc[part["x"].idxmax()], part.loc[part["y"].idxmax()]
        ends = f"{fast['series']} ({fast['x']:.0f} tok/s), most per GPU {most['series']}"
        told.append(f"{name}: fastest for one request {ends} ({most['y']:.0f} tok/s).")
    return " ".join(told)


def _panels(numbers: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(name), part) for name, part in numbers.groupby("panel", sort=False)]


LOAD_FINDINGS: dict[str, Callable[[pd.DataFrame], str]] = {
    f.__name__: f for f in (load_speedup, load_times, load_goodput, load_frontier)
}
