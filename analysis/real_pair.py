"""The tok/s that SSD rows would have with the hits of a real pair, shown next to the measured
rows."""

from __future__ import annotations

import pandas as pd

from mpissd.common.real_pairs import BESIDE, BESIDE_SOURCE

REAL = tuple(f"real_{name}" for name in BESIDE)  # The columns of a frame of rows.
_START = "The hit law of these rows is assumed: predicted with hits as"


def sentence(rows: pd.DataFrame) -> str:
    """Returns the sentence on these rows' SSD with a real pair's hits, relative to measured tok/s.

    Returns "" if no row uses the assumed law, or none has the values that the prediction needs.
    """
    parts = []
    for name, pair in BESIDE.items():
        share = (rows[f"real_{name}"] / rows["tok_per_s"]).dropna()
        if len(share):
            low, high = f"{share.min():.2f}", f"{share.max():.2f}"
            span = low if low == high else f"{low} to {high}"
            parts.append(f"{span}× ({pair.prompts})")
    return f"{_START} {BESIDE_SOURCE}, SSD's tok/s are {', '.join(parts)} of these" if parts else ""
