"""AR, SD and SSD over alpha and K: tok/s of all GPUs together, and per GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import BARS, best, caption, look, need, no_claim
from analysis.load import Data
from analysis.select import Case, cases, plain, points, richest
from analysis.style import BLACK, GREY, Poster
from analysis.tidy import REAL
from analysis.uses import best_rows, claim_of, expected_lines

_PER_GPU = ("per GPU", True), ("all GPUs", False)
_METHODS = ("SD inline", "SD", "SSD")


def throughput(data: Data) -> Poster:
    """x = K at up to three alphas, and x = alpha with each method at its own best K."""
    wanted = plain(data.rows) & data.rows["alpha"].notna() & (data.rows["batch_size"] == 1)
    case = _case(data, wanted)
    used = _rows(case)
    alphas = _spread(sorted(used.loc[used["method"] != "AR", "alpha"].unique()))
    poster = Poster(8.6)
    grid = poster.panels(2, len(alphas) + 1, sharey="row")
    for row, (name, per_gpu) in enumerate(reversed(_PER_GPU)):
        for ax, alpha in zip(grid[row], alphas, strict=False):
            ax.set_title(f"α = {alpha:g}" if not row else "")
            ax.set_label(f"α = {alpha:g}, {name}")
            _over(poster, ax, used[used["alpha"] == alpha], "lookahead", per_gpu, case.tp)
        ax = grid[row][-1]
        ax.set_title("each at its own best K" if not row else "")
        ax.set_label(f"own best K, {name}")
        _over_best(poster, ax, used, per_gpu, case)
        for ax in grid[row]:
            _baselines(poster, ax, case, per_gpu)
            ax.set_ylim(0, 1.06 * ax.get_ylim()[1] if ax is grid[row][-1] else None)
        grid[row][0].set_ylabel(f"tok/s, {name}")
    for ax in grid[1]:
        ax.set_xlabel("lookahead K" if ax is not grid[1][-1] else "acceptance α")
    law = used.loc[used["method"] == "SSD", "hit_law"]
    hits = f"SSD: {used['policy'].max()}, hits {law.iloc[0]}" if len(law) else "no SSD rows"
    apart = (
        "SD and SSD have a draft GPU of their own; T= on a line: on that many target GPUs, of "
        "another visit, whose machine may differ by 4%; dashed: expected from measured times"
    )
    text = caption(data, [used, case.ar], hits, apart, BARS, no_claim([used]))
    return poster.finish(f"AR, SD and SSD throughput: {case.label}", text)


def _case(data: Data, wanted: pd.Series) -> Case:
    candidates = cases(data, wanted, ["alpha", "lookahead", "method"], most=1)
    need(
        candidates and _is_sweep(candidates[0]), "SD and SSD, each at three or more K of one alpha"
    )
    return candidates[0]


def _is_sweep(case: Case) -> bool:
    rows = case.rows[case.rows["batch_size"] == 1]
    counts = rows.groupby(["alpha", "mode"])["lookahead"].nunique().unstack(fill_value=0)
    return bool({"sd", "ssd"} <= set(counts) and (counts[["sd", "ssd"]].min(axis=1) >= 3).any())


def _rows(case: Case) -> pd.DataFrame:
    """Returns SD, SD inline (also on T + 1 GPUs), and SSD of the law and budget with most cells."""
    every = pd.concat([case.rows, case.wide[case.wide["gpus"] == case.tp + 1]])
    rows = every[every["batch_size"] == 1]
    # Imposed hits would always be the best, because they cost nothing.
    lawful = (rows["method"] == "SSD") & rows["p_hit"].isna()
    ssd = richest(rows[lawful], ["hit_law", "policy"], ["alpha", "lookahead"])
    return pd.concat([rows[rows["method"] != "SSD"], ssd])


def _series(rows: pd.DataFrame, tp: int) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Returns (label, method, rows) of each line; SD on another T has its own line."""
    for method in _METHODS:
        here = rows[rows["method"] == method]
        for other, group in sorted(here.groupby("tp"), key=lambda item: item[0] != tp):
            yield method if other == tp else f"{method}, T={other}", method, group


def _spread(values: list[float]) -> list[float]:
    """Returns at most three of the values: the ends and the middle."""
    return values if len(values) <= 3 else [values[0], values[len(values) // 2], values[-1]]


def _over(poster: Poster, ax: Axes, rows: pd.DataFrame, by: str, per_gpu: bool, tp: int) -> None:
    for label, method, group in _series(rows, tp):
        _draw(poster, ax, (label, method), points(group, [by]), by, per_gpu)
    ax.set_xticks(sorted(rows[by].unique()))


def _over_best(poster: Poster, ax: Axes, rows: pd.DataFrame, per_gpu: bool, case: Case) -> None:
    for label, method, group in _series(rows, case.tp):
        bests = best(group, "alpha")
        _draw(poster, ax, (label, method), bests, "alpha", per_gpu)
        ssds = group.groupby("alpha") if method == "SSD" else ()
        claims = [(float(alpha), claim_of(case, best_rows(ssd))) for alpha, ssd in ssds]
        if not per_gpu:
            expected_lines(poster, ax, [(alpha, claim) for alpha, claim in claims if claim])
        for _, point in bests.iterrows() if method == "SSD" and not per_gpu else ():
            ax.annotate(
                f"K={point['lookahead']:.0f}",
                (point["alpha"], point["high"]),
                fontsize=10,
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                color="#333333",
            )


def _draw(
    poster: Poster, ax: Axes, name: tuple[str, str], medians: pd.DataFrame, by: str, per_gpu: bool
) -> None:
    if not len(medians):
        return
    share = medians["gpus"] if per_gpu else 1
    columns = (medians[name] / share for name in ("tok_per_s", "low", "high"))
    y, low, high = columns
    also = {name: medians[name] / share for name in REAL}
    label, method = name
    apart = {"linestyle": ":", "markerfacecolor": "white"} if label != method else {}
    options = {**look(method), **apart}
    poster.line(ax, label, medians[by], y, low=low, high=high, also=also, **options)


def _baselines(poster: Poster, ax: Axes, case: Case, per_gpu: bool) -> None:
    """Returns AR on the targets' GPUs, and on as many GPUs as SD and SSD use."""
    for gpus, style, color in ((case.tp, "--", GREY), (case.tp + 1, ":", BLACK)):
        point = case.ar_on(gpus)
        if point is not None:
            value = point["tok_per_s"] / (gpus if per_gpu else 1)
            label = f"AR, {gpus} GPU{'s' * (gpus > 1)}"
            ax.axhline(value, color=color, linestyle=style, linewidth=2, label=label, zorder=2)
            poster.keep(ax, label, y=value)
