"""The figure of throughput by acceptance rate alpha and by K, the tokens drafted a round."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes

from ..rows import Data
from ..select import Case, best_points, cases, plain, points, richest, where
from ..style import BARS, GREY, RED, Poster, caption, look, need, note, unit

_METHODS = ("SD inline", "SD", "SSD")


def throughput(data: Data) -> Poster:
    """tok/s (y) by K at up to three acceptance rates alpha, and by alpha with each method at its
    best K."""
    wanted = plain(data.rows) & data.rows["alpha"].notna() & (data.rows["batch_size"] == 1)
    shown = cases(data, wanted, ["alpha", "lookahead", "method"], limit=1)
    need(shown and _is_sweep(shown[0]), "SD and SSD, each at two or more K of one alpha")
    (case,) = shown
    used = _rows(case)
    alphas = sorted(used["alpha"].unique())
    alphas = alphas if len(alphas) <= 3 else [alphas[0], alphas[len(alphas) // 2], alphas[-1]]
    per = unit(used)
    has_bests = len(alphas) > 1
    poster = Poster(7.4)
    grid = poster.panels(2, len(alphas) + has_bests, sharey="row")
    for axes, name in zip(grid, (f"all {per}s", f"per {per}"), strict=True):
        is_above = name.startswith("all")
        for ax, alpha in zip(axes, alphas, strict=False):
            ax.set_title(f"α = {alpha:g}" * is_above)
            ax.set_label(f"α = {alpha:g}, {name}")
            rows = where(used, alpha=alpha)
            for label, method, group in _series(rows, case.tp):
                _draw(poster, ax, label, method, points(group, ["lookahead"]), name)
            ax.set_xticks(sorted(rows["lookahead"].unique()))
            ax.set_xlabel("lookahead K" * (not is_above))
        if has_bests:
            axes[-1].set_title("each at its best K" * is_above)
            axes[-1].set_label(f"own best K, {name}")
            axes[-1].set(xticks=sorted(used["alpha"].unique()), xmargin=0.14)
            axes[-1].set_xlabel("acceptance α" * (not is_above))
            _over_best(poster, axes[-1], used, case, name)
        for ax in axes:
            _baselines(poster, ax, case, name)
            ax.set_ylim(0, 1.06 * ax.get_ylim()[1] if ax is axes[-1] else None)
        axes[0].set_ylabel(f"tok/s, {name}")
    law = used.loc[used["method"] == "SSD", "hit_law"]
    hits = f"SSD: {used['policy'].max()}, hits {law.iloc[0]}" if len(law) else "no SSD rows"
    lines = f"SD and SSD draft on one {per} more"
    wide = used.loc[used["tp"] != case.tp, "folder"]
    lines += ". Open marks: of another visit (± 4%)" * bool(set(wide) - set(case.rows["folder"]))
    text = caption([used, case.ar], hits, lines, BARS)
    return poster.finish(f"How fast are AR, SD and SSD? {case.label}", text)


def _is_sweep(case: Case) -> bool:
    counts = case.rows.groupby(["alpha", "mode"])["lookahead"].nunique().unstack(fill_value=0)
    return bool({"sd", "ssd"} <= set(counts) and (counts[["sd", "ssd"]].min(axis=1) >= 2).any())


def _rows(case: Case) -> pd.DataFrame:
    """Returns the rows to draw for a model pair: SD, SD inline (also on T + 1 GPUs), and SSD with
    the hit model and fan-out for which most combinations of alpha and K were measured."""
    rows = pd.concat([case.rows, where(case.wide, gpus=case.tp + 1)])
    # Imposed hits are left out: they cost nothing and would always be the best.
    ssd = rows[(rows["method"] == "SSD") & rows["p_hit"].isna()]
    ssd = richest(ssd, ["hit_law", "policy"], ["alpha", "lookahead"])
    return pd.concat([rows[rows["method"] != "SSD"], ssd])


def _series(rows: pd.DataFrame, tp: int) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yields (label, method, rows) for each line to draw; SD at another T than `tp` has a line of
    its own."""
    for method in _METHODS:
        by_tp = where(rows, method=method).groupby("tp")
        for other, group in sorted(by_tp, key=lambda item: item[0] != tp):
            yield method if other == tp else f"{method}, {other} {unit(group)}s", method, group


def _draw(
    poster: Poster, ax: Axes, label: str, method: str, medians: pd.DataFrame, name: str
) -> None:
    share = 1 if name.startswith("all") else medians["gpus"]
    y, low, high = (medians[column] / share for column in ("tok_per_s", "low", "high"))
    wide = {"linestyle": ":", "markerfacecolor": "white"} if label != method else {}
    x = medians.iloc[:, 0]
    poster.line(ax, label, x, y, low=low, high=high, **{**look(method), **wide})


def _over_best(poster: Poster, ax: Axes, rows: pd.DataFrame, case: Case, name: str) -> None:
    for label, method, group in _series(rows, case.tp):
        bests = best_points(group, "alpha")
        _draw(poster, ax, label, method, bests, name)
        if method != "SSD" or not name.startswith("all"):
            continue
        place = {"dx": 0, "dy": 4, "ha": "center", "fontsize": 11, "color": RED}
        place["xycoords"] = ("data", "axes fraction")
        for n, (at, lookahead) in enumerate(zip(bests["alpha"], bests["lookahead"], strict=True)):
            note(ax, "K=" * (not n) + f"{lookahead:.0f}", at, 0, **place)


def _baselines(poster: Poster, ax: Axes, case: Case, name: str) -> None:
    """Draws AR's tok/s as horizontal lines: on the T target GPUs, and on as many GPUs as SD and SSD
    use together with the draft's."""
    for gpus, style in ((case.tp, "-"), (case.tp + 1, ":")):
        point = case.ar_on(gpus)
        if point is not None:
            value = point["tok_per_s"] / (1 if name.startswith("all") else gpus)
            label = f"AR, {gpus} {unit(case.ar)}{'s' * (gpus > 1)}"
            ax.axhline(value, color=GREY, linestyle=style, linewidth=2, label=label, zorder=2)
            poster.keep(ax, label, y=value)
