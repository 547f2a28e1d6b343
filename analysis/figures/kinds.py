"""Every kind of draft on one plane: what it costs a round, and what it gives."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.text import Annotation

from analysis.rows import Data
from analysis.select import CONDITIONS, points, short, usual, where
from analysis.style import GREY, MARKERS, SERIES, Poster, caption, need, note

# What rows of one plane share besides their device: the same tokens are wanted of every draft.
_SHARED = ("target", "tp", "prompts_sha256", "temperature", "token_limit", *CONDITIONS)
_SAME = 0.02  # distance of two points, in tokens and forwards, whose labels would overlap
_NEAR = 0.1  # forwards up to which a label left of its point would leave the panel
_SPEEDUPS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def kinds(data: Data) -> Poster:
    """Tokens a round over T_SD of SD inline, a line for each kind of draft over K.

    On a dotted line all points are equally fast, if a verification takes as long as a forward of
    AR: speedup = tokens a round / (1 + T_SD) [Leviathan et al. 2023, theorem 3.8].
    """
    text = where(data.rows, workload="text", batch_size=1)
    used = _with_cost(where(text, method="SD inline"))
    used = usual(used, _SHARED, data.notes, "drafts of other conditions")
    need(used["kind"].nunique() >= 2, "SD inline rows of text by two drafts")
    ar = where(text, mode="ar")
    for shared in ("prompts_sha256", "target", "temperature"):
        ar = ar[ar[shared].isin(used[shared])]
    poster = Poster(7.8)
    ax = poster.panels(1, 1)[0][0]
    ax.set_title("T_SD against acceptance")
    merged = points(used, ["kind", "lookahead"])
    cheapest_first = merged.groupby("kind")["T_SD"].min().sort_values().index
    for kind, color, marker in zip(cheapest_first, SERIES * 3, MARKERS * 3, strict=False):
        line = where(merged, kind=kind).sort_values("lookahead")
        look = {"color": color, "marker": marker}
        _kind(poster, ax, kind, line, float(ar["tok_per_s"].median()), look)
    _equal_speedups(poster, ax)
    first = used.iloc[0]
    on_cpu = ", as it does not on a CPU" if set(used["backend"]) == {"numpy"} else ""
    conditions = caption(
        [used],
        f"target {short(first['target'])}, T=1, temperature {first['temperature']:g}, SD inline, "
        "a point for each K, with its measured speed over AR's. T_SD: drafting K tokens, in "
        "forwards of the target. Dotted: equal speedup over AR without the host's part of a round, "
        f"if verifying K+1 rows takes one forward of AR{on_cpu}",
        vary=("lm_head", "context"),
        what="transformer forwards, the models' own acceptance",
    )
    return poster.finish("Kinds of draft on one plane", conditions)


def _with_cost(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows whose drafting time is known, with their kind; a lookup has no forward."""
    cost = rows["T_SD"].where(rows["draft"] != "lookup", 0.0)
    kind = [_kind_of(*names) for names in rows[["draft", "lookup", "draft_lookup"]].to_numpy()]
    return rows.assign(T_SD=cost, kind=kind)[cost.notna()]


def _kind_of(draft: str, lookup: str | None, beneath: str | None) -> str:
    """Returns a draft's name, with what it looks up beneath itself (older rows)."""
    if draft == "lookup":
        return "lookup" if not isinstance(lookup, str) else f"lookup: {lookup}"
    return f"{short(draft)} over {beneath}" if isinstance(beneath, str) else short(draft)


def _kind(
    poster: Poster, ax: Axes, kind: str, line: pd.DataFrame, ar: float, look: dict[str, str]
) -> None:
    x, y, over = line["T_SD"], line["acceptance_length"], line["tok_per_s"] / ar
    poster.line(ax, kind, x, y, also={"lookahead": line["lookahead"], "over_ar": over}, **look)
    for at, up, k, speed in zip(x, y, line["lookahead"], over, strict=True):
        taken = (text.xy for text in ax.texts if isinstance(text, Annotation))
        is_taken = any(np.hypot(*np.subtract(xy, (at, up))) < _SAME for xy in taken)
        text = f"K={k:g}" + (f" · {speed:.2f}×" if np.isfinite(speed) else "")
        place = {"dx": 8, "dy": -20 if is_taken else 8, "ha": "left" if at < _NEAR else "right"}
        note(ax, text, at, up, color=look["color"], fontsize=11, bbox=_WHITE, **place)


def _equal_speedups(poster: Poster, ax: Axes) -> None:
    """Draws a line for each speedup that the points are near."""
    numbers = poster.table()
    right, top = 1.12 * max(0.1, float(numbers["x"].max())), 1.08 * float(numbers["y"].max())
    bottom = min(1.0, float(numbers["y"].min())) - 0.05
    ax.set(xlabel="T_SD: drafting K tokens, in target forwards", ylabel="tokens a round")
    ax.set(xlim=(-0.02 * right, right), ylim=(bottom, top))
    for speedup in _SPEEDUPS:
        if bottom < speedup < top:
            x = np.array([0.0, right])
            ax.plot(x, speedup * (1 + x), color=GREY, linestyle=":", linewidth=1.2, zorder=1)
            at = min(0.97 * right, (0.97 * top) / speedup - 1)
            look = {"color": GREY, "fontsize": 11, "zorder": 2, "bbox": _WHITE, "ha": "center"}
            ax.annotate(f"{speedup:g}×", (at, speedup * (1 + at)), **look)
