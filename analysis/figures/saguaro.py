"""Saguaro sampling: hit rate against acceptance as C goes from 1 to 0, one line for each
fan-out."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import caption, need
from analysis.load import Data
from analysis.select import points, usual
from analysis.style import MARKERS, SERIES, Poster

_SHARED = ("target", "draft", "tp", "num_drafts", "lookahead", "batch_size", "vocab", "temperature")
_SHARED += ("divergence", "order")


def saguaro(data: Data) -> Poster:
    """x = hit rate, y = tokens a round, which C trades for each other. Right: both over C."""
    rows = data.rows
    wanted = rows[(rows["workload"] == "markov") & (rows["mode"] == "ssd")]
    wanted = wanted[(wanted["temperature"] > 0) & wanted["saguaro_c"].notna()]
    need(wanted["saguaro_c"].nunique() >= 3, "markov SSD rows at three or more --saguaro_c")
    used = usual(wanted, [c for c in _SHARED if c in wanted], data.notes, "markov rows")
    need(used["saguaro_c"].nunique() >= 3, "three or more --saguaro_c under one configuration")
    poster = Poster(7.6)
    left, middle, right = poster.panels(1, 3, width_ratios=(1.5, 1, 1))[0]
    first = used.iloc[0]
    for ax, title in ((left, "the trade"), (middle, "hit rate"), (right, "tokens a round")):
        ax.set_title(title)
    for place, (budget, group) in enumerate(used.groupby("branch_budget")):
        medians = points(group, ["saguaro_c"])
        look = {"color": SERIES[place % 7], "marker": MARKERS[place % 7]}
        label = f"F = {budget / (first['lookahead'] + 1):g} a row"
        poster.line(left, label, medians["hit_rate"], medians["acceptance_length"], **look)
        _name_ends(left, medians)
        poster.line(middle, label, medians["saguaro_c"], medians["hit_rate"], **look)
        poster.line(right, label, medians["saguaro_c"], medians["acceptance_length"], **look)
    left.set(xlabel="hit rate", ylabel="tokens a round and sequence")
    for ax in (middle, right):
        ax.set_xlabel("C (1: plain sampling)")
        ax.invert_xaxis()
    n = int(first["num_rounds"] * first["batch_size"])
    half = 1.96 * 0.5 / n**0.5
    text = caption(
        data,
        [used],
        f"V={first['vocab']:g}, divergence {first['divergence']:g}, temperature "
        f"{first['temperature']:g}, K={first['lookahead']}. {n} verified sequences a point: 95% "
        f"interval of a hit rate at most ± {half:.3f}. Decisions only: such a job's models run on "
        "the host, so its times say nothing",
        what="a language-model pair with known distributions, really sampled and verified",
    )
    return poster.finish("Saguaro sampling: hits against acceptance", text)


def _name_ends(ax: Axes, medians: pd.DataFrame) -> None:
    for _, point in medians.iterrows():
        ax.annotate(
            f"{point['saguaro_c']:g}",
            (point["hit_rate"], point["acceptance_length"]),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=9.5,
            color="#333333",
        )
