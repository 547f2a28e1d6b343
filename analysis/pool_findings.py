"""Summarises the figure of pools: how many targets a draft serves, and what that is worth."""

from __future__ import annotations

import pandas as pd

from analysis.figures.pools import ANY, POOL

LATER = 1.1  # times a draft of its own: tokens that come no more than a tenth later


def pools(numbers: pd.DataFrame) -> str:
    """Reports of each panel the best number of targets a draft, and beside what it stands."""
    rates = numbers[~numbers["panel"].str.endswith("time a token")]
    panels = rates.groupby("panel", sort=False)
    return " ".join(f"{panel}: {_best(part)}{_within(numbers, panel)}." for panel, part in panels)


def _best(part: pd.DataFrame) -> str:
    ssd = part[part["series"] == POOL].set_index("x")
    best = ssd.loc[ssd["y"].idxmax()]
    beside = [("a draft each", ssd["y"].get(1.0))]
    beside += [
        (name, part.loc[part["series"] == name, "y"].max()) for name in ("SD inline, same T", ANY)
    ]
    gains = [f"{best['y'] / y:.2f}× {name}" for name, y in beside if pd.notna(y)]
    return f"most tok/s a GPU at {best.name:g} targets a draft, {', '.join(gains)}"


def _within(numbers: pd.DataFrame, panel: str) -> str:
    """Returns how many targets a draft serves before tokens come a tenth later."""
    times = numbers[numbers["panel"] == f"{panel}, time a token"]
    ssd = times[times["series"] == POOL].sort_values("x")
    if ssd.empty or ssd["x"].iloc[0] != 1:
        return ""
    late = ssd.loc[ssd["y"] > LATER * ssd["y"].iloc[0], "x"]
    served = ssd.loc[ssd["x"] < late.min(), "x"].max() if len(late) else ssd["x"].max()
    hits = ssd.set_index("x")["hit_rate"]
    return (
        f"; up to {served:g} with tokens at most {LATER - 1:.0%} later, "
        f"hits {hits[1.0]:.2f} → {hits[served]:.2f}"
    )
