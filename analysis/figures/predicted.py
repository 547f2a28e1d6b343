"""Predicted against measured: every row beside what its own job's profile foretold."""

from __future__ import annotations

import numpy as np
import seaborn as sns

from analysis.figures.common import caption, look, need
from analysis.load import Data
from analysis.style import BLACK, METHODS, Poster, plain_ticks


def predicted(data: Data) -> Poster:
    """Left: predicted over measured tok/s. Right: how large the errors are, by method."""
    rows = data.rows[data.rows["predicted_tok_per_s"] > 0]
    need(len(rows) >= 5, "five or more rows with predicted_tok_per_s")
    rows = rows.assign(error=(rows["tok_per_s"] / rows["predicted_tok_per_s"] - 1) * 100)
    poster = Poster(7.4)
    left, right = poster.panels(1, 2)[0]
    left.set_title("every row")
    right.set_title("distribution of the error")
    for method in METHODS:
        group = rows[rows["method"] == method]
        if not len(group):
            continue
        size = group["error"].abs()
        p95 = float(np.quantile(size, 0.95))
        errors = f"median error {_percent(size.median())}, p95 {_percent(p95)}"
        label = f"{method}: {len(size)} rows, {errors}"
        poster.line(
            left,
            label,
            group["tok_per_s"],
            group["predicted_tok_per_s"],
            linestyle="none",
            alpha=0.75,
            **look(method),
        )
        sns.ecdfplot(size, ax=right, color=METHODS[method][0], linewidth=2.4)
        poster.keep(right, method, n=len(size), median=size.median(), p95=p95, worst=size.max())
    ends = np.array([rows["tok_per_s"].min() * 0.9, rows["tok_per_s"].max() * 1.1])
    left.plot(ends, ends, color=BLACK, linewidth=1.2)
    left.fill_between(ends, ends * 0.95, ends * 1.05, color=BLACK, alpha=0.1, label="± 5%")
    left.set(xscale="log", yscale="log", xlabel="measured tok/s", ylabel="predicted tok/s")
    for axis in (left.xaxis, left.yaxis):
        plain_ticks(axis)
    right.set(xlabel="|measured / predicted − 1|, %", ylabel="share of rows")
    right.set_xlim(0, max(5.0, float(np.quantile(rows["error"].abs(), 0.98))))
    worst = rows["error"].abs().max()
    text = caption(
        data,
        [rows],
        "The predictor knows each job's profile and its laws' draws, not "
        f"the measured rounds. Worst row: {worst:.1f}%",
    )
    return poster.finish("Predicted against measured throughput", text)


def _percent(value: float) -> str:
    """To two digits, without an exponent."""
    return f"{value:.0f}%" if value >= 10 else f"{value:.2g}%"
