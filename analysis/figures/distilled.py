"""Distilled drafts of equal parameters, from wide to deep: what depth buys and what it costs."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import caption, no_claim
from analysis.load import Data
from analysis.select import short
from analysis.style import BLUE, GREEN, GREY, ORANGE, RED, Poster

_SHAPE = r"^(\d+)x(\d+)x(\d+)x(\d+)$"
_COLORS = (BLUE, GREEN, ORANGE, RED)


def rows_of(data: Data) -> pd.DataFrame:
    """Returns rows of text whose draft is named LAYERSxHEADSxKV_HEADSxFFN, with its sizes."""
    rows = data.rows
    found = rows["draft"].astype("string").str.extract(_SHAPE).astype("float")
    made = rows.assign(layers=found[0], kv_heads=found[0] * found[2])
    return made[made["layers"].notna() & (made["batch_size"] == 1)]


def distilled(data: Data, rows: pd.DataFrame) -> Poster:
    """Three panels over layers: tokens a round, time of a draft step, tokens a second, by K."""
    poster = Poster(7.2)
    first, second, third = poster.panels(1, 3)[0]
    _panel(poster, first, "tokens a round", rows, rows["acceptance_length"])
    _panel(poster, second, "one draft step, µs", rows, rows["step_s"] * 1e6)
    _panel(poster, third, "tok/s", rows, rows["tok_per_s"])
    kv = rows.sort_values("layers").groupby("draft", sort=False)["kv_heads"].first()
    third.set_ylim(top=1.12 * third.get_ylim()[1])
    alone = data.rows[(data.rows["mode"] == "ar") & (data.rows["target"] == rows["target"].iloc[0])]
    alone = alone[alone["folder"].isin(set(rows["folder"]))]
    if len(alone):
        rate = float(alone["tok_per_s"].median())
        third.axhline(rate, color=GREY, linestyle=":", label="AR")
        poster.keep(third, "AR", y=rate)
    told = ", ".join(f"{name}: {heads:.0f}" for name, heads in kv.items())
    text = caption(
        data,
        [rows],
        f"target {short(rows['target'].iloc[0])}, T=1, SD inline. Drafts (layers x heads x KV "
        f"heads x FFN) of equal parameters, distilled on the same samples for equal times; "
        f"KV heads in all layers {told}",
        no_claim([rows]),
        what="transformer forwards, SmolLM2's answers at temperature 0",
    )
    return poster.finish("Drafts of equal parameters, from wide to deep", text)


def _panel(poster: Poster, ax: Axes, title: str, rows: pd.DataFrame, values: pd.Series) -> None:
    """Draws values over layers, a line for each K."""
    ax.set_title(title)
    table = rows.assign(value=values).groupby(["lookahead", "layers"])["value"].median()
    for color, lookahead in zip(_COLORS, sorted(set(rows["lookahead"])), strict=False):
        line = table.loc[lookahead]
        poster.line(ax, f"K={lookahead:g}", line.index, line, color=color, marker="o")
    ax.set(xlabel="layers of the draft", ylim=(0, None))
    ax.set_xticks(sorted(set(rows["layers"])))
