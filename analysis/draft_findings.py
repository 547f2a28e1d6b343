"""What the plane of kinds of draft shows, in a sentence (see findings.py)."""

from __future__ import annotations

import pandas as pd


def kinds(numbers: pd.DataFrame) -> str:
    """Reports each kind's best point: tokens a round, T_SD, and the measured speed over AR's."""
    parts = []
    for kind, here in numbers.groupby("series", sort=False):
        worth = here["over_ar"] if here["over_ar"].notna().all() else here["y"] / (1 + here["x"])
        best = here.loc[worth.idxmax()]
        told = f"{kind} {best['y']:.2f} tokens at T_SD {best['x']:.2f} (K={best['lookahead']:g}"
        measured = f", {best['over_ar']:.2f} of AR" if pd.notna(best["over_ar"]) else ""
        parts.append(f"{told}{measured})")
    return "Best of each kind of draft: " + "; ".join(parts) + "."
