"""Every kind of draft on one plane: what it costs a round, and what it gives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.text import Annotation

from analysis.figures.common import caption, need, no_claim
from analysis.load import Data
from analysis.select import CONDITIONS, points, short, usual
from analysis.style import GREY, MARKERS, SERIES, Poster

# What rows of one plane share besides their device: the same tokens are wanted of every draft.
_SHARED = ("target", "tp", "prompts_sha256", "temperature", "token_limit", *CONDITIONS)
_SAME = 0.02  # distance of two points, in tokens and forwards, whose labels would overlap
_NEAR = 0.1  # forwards up to which a label left of its point would leave the panel
_SPEEDUPS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)


def kinds(data: Data) -> Poster:
    """Tokens a round over T_SD of SD inline, a line for each kind of draft over K.

    On a dotted line all points are equally fast, if a verification takes as long as a forward of
    AR: speedup = tokens a round / (1 + T_SD) [Leviathan et al. 2023, theorem 3.8].
    """
    rows = data.rows
    text = rows[(rows["workload"] == "text") & (rows["batch_size"] == 1)]
    used = _with_cost(text[text["method"] == "SD inline"])
    used = usual(used, _SHARED, data.notes, "drafts of other conditions")
    need(used["kind"].nunique() >= 2, "SD inline rows of text by two drafts")
    alone = text[(text["mode"] == "ar") & text["prompts_sha256"].isin(used["prompts_sha256"])]
    for shared in ("target", "temperature"):
        alone = alone[alone[shared].isin(used[shared])]
    poster = Poster(7.8)
    ax = poster.panels(1, 1)[0][0]
    ax.set_title("T_SD against acceptance")
    for (kind, line), color, marker in zip(_lines(used), SERIES * 3, MARKERS * 3, strict=False):
        _kind(poster, ax, kind, line, float(alone["tok_per_s"].median()), (color, marker))
    _equal_speedups(poster, ax)
    first = used.iloc[0]
    told = caption(
        data,
        [used],
        f"target {short(first['target'])}, T=1, temperature {first['temperature']:g}, SD inline, "
        "a point for each K, with its measured speed over AR's. T_SD: drafting K tokens, in "
        "forwards of the target. Dotted: equal speedup over AR without the host's part of a round, "
        "if verifying K+1 rows takes one forward of AR"
        + (", as it does not on a CPU" if set(used["backend"]) == {"numpy"} else ""),
        no_claim([used]),
        vary=("lm_head", "context"),
        what="transformer forwards, the models' own acceptance",
    )
    return poster.finish("Kinds of draft on one plane", told)


def _with_cost(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows whose drafting time is known, with their kind; a lookup has no forward."""
    looked_up = rows["draft"] == "lookup"
    cost = rows["T_SD"].where(~looked_up, 0.0)
    kind = [_kind_of(*told) for told in rows[["draft", "lookup", "draft_lookup"]].to_numpy()]
    return rows.assign(T_SD=cost, kind=kind)[cost.notna()]


def _kind_of(draft: str, lookup: str | None, beneath: str | None) -> str:
    """Returns a draft's name, with what it looks up beneath itself."""
    if draft == "lookup":
        return "lookup" if not isinstance(lookup, str) else f"lookup: {lookup}"
    return f"{short(draft)} over {beneath}" if isinstance(beneath, str) else short(draft)


def _lines(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields each kind with its medians by K, the cheapest kind first."""
    merged = points(rows, ["kind", "lookahead"])
    for kind in merged.groupby("kind")["T_SD"].min().sort_values().index:
        yield kind, merged[merged["kind"] == kind].sort_values("lookahead")


def _kind(
    poster: Poster, ax: Axes, kind: str, line: pd.DataFrame, alone: float, look: tuple[str, str]
) -> None:
    color, marker = look
    also = {"lookahead": line["lookahead"], "over_ar": line["tok_per_s"] / alone}
    x, y = line["T_SD"], line["acceptance_length"]
    poster.line(ax, kind, x, y, color=color, marker=marker, also=also)
    for _, point in line.iterrows():
        measured = point["tok_per_s"] / alone
        said = f" · {measured:.2f}×" if np.isfinite(measured) else ""
        place = point["T_SD"], point["acceptance_length"]
        ax.annotate(
            f"K={point['lookahead']:g}{said}",
            place,
            xytext=(8, -20 if _is_taken(ax, place) else 8),
            textcoords="offset points",
            fontsize=11,
            color=color,
            ha="left" if place[0] < _NEAR else "right",  # lines rise to the right
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )


def _is_taken(ax: Axes, place: tuple[float, float]) -> bool:
    """Returns whether another point that has a label is at the same place."""
    texts = [text for text in ax.texts if isinstance(text, Annotation)]
    return any(np.hypot(*np.subtract(text.xy, place)) < _SAME for text in texts)


def _equal_speedups(poster: Poster, ax: Axes) -> None:
    """Draws a line for each speedup that the points are near."""
    numbers = poster.table()
    most_x = 1.12 * max(0.1, float(numbers["x"].max()))
    most_y = 1.08 * float(numbers["y"].max())
    ax.set(xlabel="T_SD: drafting K tokens, in target forwards", ylabel="tokens a round")
    ax.set(xlim=(-0.02 * most_x, most_x), ylim=(min(1.0, float(numbers["y"].min())) - 0.05, most_y))
    for speedup in _SPEEDUPS:
        if not ax.get_ylim()[0] < speedup < most_y:
            continue
        x = np.array([0.0, most_x])
        ax.plot(x, speedup * (1 + x), color=GREY, linestyle=":", linewidth=1.2, zorder=1)
        at = min(0.97 * most_x, (0.97 * most_y) / speedup - 1)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        place = (at, speedup * (1 + at))
        ax.annotate(
            f"{speedup:g}×", place, color=GREY, fontsize=11, zorder=2, bbox=box, ha="center"
        )
