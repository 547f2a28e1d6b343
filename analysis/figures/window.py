"""The verification window: draft steps that fit in a verification, branches that grow in it."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from analysis.figures.common import caption, need
from analysis.load import Data
from analysis.probed import forward
from analysis.select import Case, cases, plain, points
from analysis.style import MARKERS, SERIES, Poster, parity

_LOOKAHEADS = (2, 4, 8)


def window(data: Data) -> Poster:
    """Left: t_target / draft step over the verified rows. Right: growth over a verification."""
    wanted = plain(data.rows) & data.rows["step_s"].notna() & data.rows["t_target_s"].notna()
    shown = cases(data, wanted, ["lookahead", "policy"])
    shown = [case for case in shown if case.rows["lookahead"].nunique() >= 2]
    shown = shown[:3]
    need(shown, "SD or SSD rows with t_target_s and t_draft_s at two or more K")
    poster = Poster(7.6)
    left, right = poster.panels(1, 2)[0]
    left.set_title("draft steps that fit")
    right.set_title("growth of all branches (glue + K steps)")
    for place, case in enumerate(shown):
        look = {"color": SERIES[place], "marker": MARKERS[place]}
        rows = case.rows.assign(width=case.rows["batch_size"] * (case.rows["lookahead"] + 1))
        medians = points(rows.assign(fit=rows["t_target_s"] / rows["step_s"]), ["width"])
        poster.line(left, case.label, medians["width"], medians["fit"], **look)
        _growth(poster, right, case, data, place)
    left.set(xscale="log", xlabel="verified rows b(K+1)", ylabel="draft steps in one verification")
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter("{x:.0f}")
    left.set_ylim(bottom=0)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:.0f}")
    right.set(xlabel="branches ΣF", ylabel="growth T_p, in verifications")
    parity(right, 1.0, "above: not hidden")
    right.set_ylim(bottom=0)
    text = caption(
        data,
        [case.rows for case in shown],
        "Points: medians of rows (right: K in them; t_growth_s where growth ran to its end). "
        "Lines, right: the forward tables of the probed profile, where there is one, and the "
        "largest ΣF of them that still fits",
    )
    return poster.finish("The verification window", text)


def _growth(poster: Poster, ax: Axes, case: Case, data: Data, place: int) -> None:
    rows = case.method("SSD", batch_size=1).dropna(subset=["t_growth_s", "t_target_s"])
    rows = rows.assign(
        branches=rows["branch_budget"],
        share=rows["t_growth_s"] / rows["t_target_s"],
    )
    color = SERIES[place]
    medians = points(rows, ["lookahead", "branches"])
    for lookahead, group in medians.groupby("lookahead"):
        poster.line(
            ax,
            f"_{case.label}, K={lookahead}",
            group["branches"],
            group["share"],
            color=color,
            marker="o",
            linestyle="none",
            markersize=13,
        )
        for _, point in group.iterrows():
            ax.annotate(
                f"{lookahead}",
                (point["branches"], point["share"]),
                fontsize=8.5,
                color="white",
                ha="center",
                va="center",
                zorder=5,
            )
    draft, target = (forward(data, case, *of) for of in ((case.draft, 1), (case.target, case.tp)))
    if draft is None or target is None:
        return
    widths = np.array(sorted(draft.seconds))
    for lookahead in _LOOKAHEADS:
        glue, verify = draft.at(lookahead + 1), target.at(lookahead + 1)
        share = np.array([(glue + lookahead * draft.seconds[w]) / verify for w in widths])
        poster.line(ax, f"_{case.label}: K={lookahead}", widths, share, color=color, linewidth=1.4)
        fits = widths[share <= 1]
        text = (
            f"ΣF ≥ {fits[-1]}"
            if len(fits) and fits[-1] == widths[-1]
            else (f"ΣF = {fits[-1]}" if len(fits) else "none fits")
        )
        is_lowest = lookahead == _LOOKAHEADS[0]
        ax.annotate(
            f"K={lookahead}: {text}",
            (widths[0], share[0]),
            fontsize=10.5,
            color=color,
            xytext=(0, -4 if is_lowest else 4),
            va="top" if is_lowest else "bottom",
            textcoords="offset points",
        )
