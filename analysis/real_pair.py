"""What SSD rows would have given with the hits of a real pair, beside a figure's rows."""

from __future__ import annotations

import pandas as pd

from mpissd.common.real_pairs import REAL_PAIRS, SOURCE

REAL = tuple(f"real_{name}" for name in REAL_PAIRS)  # a frame's columns
_BESIDE = "The default hit law is assumed: predicted with hits as"


def sentence(rows: pd.DataFrame) -> str:
    """What these rows' SSD would give with the real pair's hits, over what it gives; "" where no
    row rests on the default law, or none can tell."""
    parts = []
    for name, pair in REAL_PAIRS.items():
        share = (rows[f"real_{name}"] / rows["tok_per_s"]).dropna()
        if len(share):
            low, high = f"{share.min():.2f}", f"{share.max():.2f}"
            span = low if low == high else f"{low} to {high}"
            parts.append(f"{span}× ({pair.prompts})")
    return f"{_BESIDE} {SOURCE}, SSD's tok/s are {', '.join(parts)} of these" if parts else ""


def beside(caption: str) -> str:
    """That sentence of a caption, for the finding beside the figure."""
    found = [part for part in caption.split(". ") if part.startswith(_BESIDE)]
    return f" {found[0].rstrip('.')}." if found else ""
