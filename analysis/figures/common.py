"""Helpers that figures share: the caption of conditions, titles, and series of gains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.load import Data, NothingLeft
from analysis.select import best_point, points
from analysis.style import METHODS, Poster
from mpissd.common.compare import HEADLINE_ROUNDS, HEADLINE_SEEDS
from mpissd.common.real_pairs import BESIDE, BESIDE_SOURCE

BARS = "Bars: 95% interval of a run (luck of its draws, spread of its rounds), widest of repeats."
GAINS = "Bars: 95% interval of the ratio, in pairs of seeds where both have three or more"
NO_CLAIM = (
    f"FEW SEEDS: a speedup is claimed from {HEADLINE_SEEDS} seeds of {HEADLINE_ROUNDS} rounds on, "
    "and none here"
)


def caption(
    data: Data,
    parts: Iterable[pd.DataFrame],
    *extra: str,
    vary: Sequence[str] = (),
    what: str = "GEMM-only forwards, random weights, imposed acceptance and hits",
) -> str:
    """Returns the caption: hardware, what is real, LM head, context, forwards, rows and commits."""
    used = pd.concat([part for part in parts if len(part)])
    used = used[~used.index.duplicated()]
    words = [machine(used), what, _dtype(used)]
    if "lm_head" not in vary:
        words.append(f"LM head: {_several(used['lm_head'].map({True: 'yes', False: 'no'}))}")
    if "context" not in vary:
        words.append(f"context: {_several(used['context'])} tokens")
    if "fuse" not in vary and used["fuse"].any():
        partly = "" if used["fuse"].all() else "partly "
        words.append(f"{partly}fused q,k,v and gate,up")
    if len(backup := used.loc[used["mode"] == "ssd", "backup"].dropna()):
        words.append(f"backup of a miss: {_several(backup)}")
    if len(apart := used["other_draft"].dropna()):
        also = "also " if len(apart) < (used["num_drafts"] > 0).sum() else ""
        words.append(f"drafts {also}on {_several(apart)}".replace(" (emulated)", ""))
    seeds = used["seed"].nunique()
    counts = f"{len(used)} rows of {_several(used['folder'])}, {seeds} seed{'s' * (seeds > 1)}"
    commits = sorted({commit[:8] for commit in used["commit"] if commit})
    version = (
        f"mpissd {', '.join(commits[:3])}{' …' if len(commits) > 3 else ''}" if commits else ""
    )
    rows = " · ".join(filter(None, [counts, version]))
    sentences = [" · ".join(words), *extra, _with_real_hits(used), rows]
    return ". ".join(sentence.rstrip(".") for sentence in sentences if sentence) + "."


def no_claim(parts: Iterable[pd.DataFrame]) -> str:
    """Returns a sentence if none of the SSD rows allows a claimed speedup; else ""."""
    rows = pd.concat([part for part in parts if len(part)])
    ssd = rows[rows["mode"] == "ssd"]
    long = ssd[pd.to_numeric(ssd["num_rounds"]) >= HEADLINE_ROUNDS]
    return "" if long["seed"].nunique() >= HEADLINE_SEEDS else NO_CLAIM


def machine(rows: pd.DataFrame) -> str:
    """Returns the device names, marked as emulated if they are."""
    names = sorted(rows["device_name"].unique())
    emulated = all("emulated" in name for name in names)
    state = "EMULATED: durations from a device profile, slept" if emulated else "measured"
    if set(rows["backend"]) == {"numpy"}:
        state = "CPU"
    return f"{', '.join(names)} ({state})".replace(" (emulated)", "")


def _dtype(rows: pd.DataFrame) -> str:
    return _several(rows["dtype"])


def _several(values: pd.Series) -> str:
    names = sorted(values.astype(str).unique(), key=lambda v: (len(v), v))
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def need(condition: object, what: str) -> None:
    """Raises NothingLeft unless the condition holds."""
    if not condition:
        raise NothingLeft(f"no rows for it: it needs {what}")


def look(method: str) -> dict[str, Any]:
    """Returns the colour and marker of a method."""
    color, marker = METHODS[method]
    return {"color": color, "marker": marker}


def draw_gains(poster: Poster, ax: Axes, label: str, gained: pd.DataFrame, **options: Any) -> None:
    """Draws a series of gains (analysis/gain.py: the `by` column, value, low, high, headline)."""
    if len(gained):
        poster.line(
            ax,
            label,
            gained.iloc[:, 0],
            gained["value"],
            low=gained["low"],
            high=gained["high"],
            also={"headline": gained["headline"]},
            **options,
        )


def best(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Returns the best configuration at each value of `by`, with repeats merged into one point."""
    columns = points(rows, [by, "lookahead", "policy"]).columns
    found = [best_point(part, [by, "lookahead", "policy"]) for _, part in rows.groupby(by)]
    return pd.DataFrame(found, columns=columns)


_START = "The hit law of these rows is assumed: predicted with hits as"


def _with_real_hits(rows: pd.DataFrame) -> str:
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
