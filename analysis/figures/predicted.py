"""Predicted against measured: the replay of every row's own draws, and its laws' mean."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns

from analysis.figures.common import caption, look, need
from analysis.load import Data
from analysis.style import BLACK, METHODS, Poster, percent, plain_ticks

_MEAN = "laws' mean"


def predicted(data: Data) -> Poster:
    """Left: the replay over measured tok/s. Right: the size of errors (a) and (b), by method."""
    rows = data.rows[data.rows["predicted_tok_per_s"] > 0]
    need(len(rows) >= 5, "five or more rows with predicted_tok_per_s")
    rows = rows.assign(
        replay=(rows["tok_per_s"] / rows["predicted_tok_per_s"] - 1).abs() * 100,
        mean=(rows["tok_per_s"] / rows["expected_tok_per_s"] - 1).abs() * 100,
    )
    poster = Poster(7.4)
    left, right = poster.panels(1, 2)[0]
    left.set_title("every row: replay of its own draws")
    right.set_title("errors: replay (a), laws' mean (b, dashed)")
    for method in METHODS:
        group = rows[rows["method"] == method]
        if len(group):
            _method(poster, method, group)
    ends = np.array([rows["tok_per_s"].min() * 0.9, rows["tok_per_s"].max() * 1.1])
    left.plot(ends, ends, color=BLACK, linewidth=1.2)
    left.fill_between(ends, ends * 0.95, ends * 1.05, color=BLACK, alpha=0.1, label="± 5%")
    left.set(xscale="log", yscale="log", xlabel="measured tok/s", ylabel="replay, tok/s")
    for axis in (left.xaxis, left.yaxis):
        plain_ticks(axis)
    right.set(xlabel="|measured / predicted − 1|, %", ylabel="share of rows")
    ends_of = rows.groupby("method")[["replay", "mean"]].quantile(0.98)  # each curve, to its top
    right.set_xlim(0, max(5.0, 1.02 * float(ends_of.max().max())))
    text = caption(
        data,
        [rows],
        "(a) replays each row's own draws, (b) is its laws' mean and holds their luck; both know "
        "the profile of the row's own job. A user's prediction has another job's profile: error "
        f"(c), docs/predictions.md. Worst replay: {rows['replay'].max():.1f}%",
    )
    return poster.finish("Predicted against measured throughput", text)


def _method(poster: Poster, method: str, group: pd.DataFrame) -> None:
    """Draws a method's points, and the distributions of its two errors."""
    left, right = poster.axes
    replay, mean = group["replay"], group["mean"].dropna()
    p95 = float(np.quantile(replay, 0.95))
    label = f"{method}: {len(replay)} rows, replay: median {percent(replay.median())}, "
    label += f"p95 {percent(p95)}"
    points = group["tok_per_s"], group["predicted_tok_per_s"]
    poster.line(left, label, *points, linestyle="none", alpha=0.75, **look(method))
    for name, sizes, line in ((method, replay, "-"), (f"{method}, {_MEAN}", mean, "--")):
        if len(sizes):
            color = METHODS[method][0]
            sns.ecdfplot(sizes, ax=right, color=color, linewidth=2.4, linestyle=line)
            p95 = float(np.quantile(sizes, 0.95))
            summary = {"median": sizes.median(), "p95": p95, "worst": sizes.max()}
            poster.keep(right, name, n=len(sizes), **summary)
