"""The gain from cache hits, the fan-out that they need, and their loss at larger batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.model import Times, over_batch
from analysis.rows import Data
from analysis.select import Case, cases, gains, plain, points, richest, where
from analysis.style import (
    BARS,
    BLACK,
    PURPLE,
    RED,
    Poster,
    caption,
    label_points,
    look,
    need,
    parity,
    plain_ticks,
)

_KINDS: dict[str, dict[str, Any]] = {
    "uniform": {"color": PURPLE, "marker": "X"},
    "geometric": {"color": RED, "marker": "^"},
}
_RHO = 0.5
IMPOSED = "SSD, hits imposed"
_SSD = ("alpha", "lookahead", "hit_law", "policy")


def cache_hits(data: Data) -> Poster:
    """x = imposed hit rate; y = gain over SD on the same GPUs, over SD without a draft GPU, and by
    the closed formula with the rows' own times."""
    rows = data.rows
    wanted = plain(rows) & (rows["batch_size"] == 1)
    wanted &= rows["p_hit"].notna() | (rows["mode"] != "ssd")
    by = ["alpha", "lookahead", "policy"]
    every = cases(data, wanted, ["p_hit"])
    shown = [(case, richest(case.method("SSD"), by, ["p_hit"])) for case in every]
    shown = [(case, ssd) for case, ssd in shown if ssd["p_hit"].nunique() >= 3][:3]
    need(shown, "SSD with imposed hit rates, three or more, and SD")
    poster = Poster(7.4)
    grid = poster.panels(1, len(shown), sharey=True)[0]
    used: list[pd.DataFrame] = []
    for ax, (case, ssd) in zip(grid, shown, strict=True):
        used += _hits(poster, ax, case, ssd)
    grid[0].set_ylabel("SSD's tok/s over SD's, ×")
    grid[0].set_ylim(0, 1.06 * grid[0].get_ylim()[1])
    text = caption(used, BARS)
    return poster.finish("What are cache hits worth?", text)


def _hits(poster: Poster, ax: Axes, case: Case, ssd: pd.DataFrame) -> list[pd.DataFrame]:
    alpha, lookahead = float(ssd["alpha"].iloc[0]), int(ssd["lookahead"].iloc[0])
    ax.set_title(f"{case.label}+1, K={lookahead}, α={alpha:g}")
    bases = [case.method(name, alpha=alpha, lookahead=lookahead) for name in ("SD", "SD inline")]
    for name, base in zip(("SD", "SD inline"), bases, strict=True):
        poster.gains(ax, f"over {name}", gains(ssd, base, "p_hit", one_base=True), **look(name))
    if (times := Times.of(case)) is not None:
        x, sd = np.linspace(0, 1, 51), times.sd(alpha, lookahead)
        y = [times.ssd(alpha, lookahead, float(h)) / sd for h in x]
        style = {"color": BLACK, "linestyle": "--", "linewidth": 1.5}
        poster.line(ax, "closed formula, over SD", x, y, **style)
    parity(ax)
    parity(ax, (case.tp + 1) / case.tp, "SD inline, per GPU")
    ax.set_xlabel("imposed cache-hit rate p_hit")
    return [ssd, *bases]


def fan_out(data: Data) -> Poster:
    """x = branches ΣF; y = hit rate, growth over a verification, and gain over AR."""
    rows = data.rows
    wanted = plain(rows) & (rows["batch_size"] == 1)
    wanted &= (rows["mode"] != "ssd") | (rows["hit_law"].fillna("").str.startswith("power"))
    shown = []
    for case in cases(data, wanted, ["policy"]):
        ssd = case.method("SSD")
        ssd = ssd.assign(kind=ssd["policy"].str.split(":").str[0])
        ssd = richest(ssd, ["alpha", "lookahead", "hit_law"], ["kind", "branch_budget"])
        budgets = ssd.groupby("kind")["branch_budget"].nunique()
        if len(budgets) == len(_KINDS) and budgets.max() >= 3:
            shown.append((case, ssd))
    shown = shown[:3]
    need(shown, "SSD, uniform and geometric, at three or more branch budgets of one power law")
    poster = Poster(11.2)
    grid = poster.panels(3, len(shown), sharex="col", sharey="row")
    for column, (case, ssd) in zip(grid.T, shown, strict=True):
        first = ssd.iloc[0]
        law = str(first["hit_law"]).removeprefix("power:").replace(",", ", ").replace("=", " ")
        column[0].set_title(f"{case.label}+1, K={first['lookahead']}, α={first['alpha']:g}, {law}")
        for ax, what in zip(column, ("hit rate", "growth", "gain over AR"), strict=True):
            ax.set_label(f"{case.label}+1: {what}")
        for kind, style in _KINDS.items():
            _fan_out(poster, column, case, where(ssd, kind=kind), kind, style)
        if ssd["t_growth_s"].isna().all():
            reason = "never grown to its end: the outcome came first"
            place = {"transform": column[1].transAxes, "ha": "center", "fontsize": 12}
            column[1].text(0.5, 0.4, reason, **place)
        parity(column[1], 1.0, "one verification")
        parity(column[2], 1.0, "AR")
        parity(column[2], (case.tp + 1) / case.tp, "AR, per GPU")
        column[2].set(xlabel="branch budget ΣF", xmargin=0.12)
    for ax, top in zip(grid[:, 0], (1, 1.2, None), strict=True):
        ax.set_ylim(0, top)
    names = "hit rate", "growth T_p, in\nverifications", "tok/s over AR's, ×"
    for ax, name in zip(grid[:, 0], names, strict=True):
        ax.set_ylabel(name)
    used = [part for case, ssd in shown for part in (ssd, case.own_ar)]
    return poster.finish("What do more branches buy?", caption(used, BARS))


def _fan_out(
    poster: Poster, column: Any, case: Case, rows: pd.DataFrame, kind: str, style_of: dict[str, Any]
) -> None:
    medians = points(rows, ["branch_budget"])
    x, grown = medians["branch_budget"], medians["t_growth_s"] / medians["t_target_s"]
    poster.line(column[0], kind, x, medians["hit_rate"], **style_of)
    poster.line(column[1], kind, x[grown.notna()], grown.dropna(), **style_of)
    ar = where(case.own_ar, batch_size=1)
    poster.gains(column[2], kind, gains(rows, ar, "branch_budget", one_base=True), **style_of)


def batch_scaling(data: Data) -> Poster:
    """Above: SSD over SD on the same GPUs, by b. Below: every method's tok/s per GPU over AR's."""
    shown = [(c, *_sweep(c)) for c in cases(data, plain(data.rows), ["batch_size"])]
    shown = [item for item in shown if all(p["batch_size"].nunique() >= 3 for p in item[1:])][:3]
    need(shown, "SD and SSD of one alpha and K at three or more batch sizes")
    poster = Poster(9.6)
    grid = poster.panels(2, len(shown), sharex="col", sharey="row")
    for (above, below), (case, ssd, sd) in zip(grid.T, shown, strict=True):
        alpha, lookahead = ssd["alpha"].iloc[0], int(ssd["lookahead"].iloc[0])
        title = f"{case.label}+1, K={lookahead}, α={alpha:g}"
        above.set_title(title)
        above.set_label(f"{title}: over SD")
        below.set_label(f"{title}: per GPU over AR")
        _gain(poster, above, case, ssd, sd)
        _per_gpu(poster, below, case, ssd, sd)
        below.set_xlabel("sequences b")
        below.set_xticks(sorted(ssd["batch_size"].unique()))
        below.xaxis.set_major_formatter("{x:.0f}")
        below.minorticks_off()
    grid[0, 0].set_ylabel("SSD's tok/s over SD's, ×")
    grid[1, 0].set_ylabel("tok/s per GPU\nover AR's, ×")
    for ax in grid[:, 0]:
        ax.set_ylim(0)
    text = caption(
        [part for case, ssd, sd in shown for part in (ssd, sd, case.own_ar)],
        BARS,
    )
    return poster.finish("Does SSD's gain survive larger batches?", text)


def _sweep(case: Case) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns SSD rows of the alpha and K with most batch sizes, and the SD rows to compare."""
    ssd = richest(case.method("SSD"), ["alpha", "lookahead"], ["batch_size", "hit_law"])
    if not len(ssd):
        return ssd, ssd
    many = ssd.groupby(["hit_law", "policy"])["batch_size"].transform("nunique") >= 3
    alike = {name: ssd[name].iloc[0] for name in ("alpha", "lookahead")}
    return ssd[many], where(case.rows, mode="sd", **alike)


def _laws(ssd: pd.DataFrame) -> list[tuple[str, float, pd.DataFrame]]:
    """Returns (method, hit rate of a sequence, rows) of the drawn and the imposed hit models with
    the most hits."""
    laws: dict[str, tuple[str, float, pd.DataFrame]] = {}
    for _, group in ssd.groupby(["hit_law", "policy"]):
        is_drawn = bool(group["p_hit"].isna().all())
        rate = float(group["hit_rate"].mean() if is_drawn else group["p_hit"].iloc[0])
        name = "SSD" if is_drawn else IMPOSED
        if name not in laws or rate > laws[name][1]:
            laws[name] = (name, rate, group)
    return list(laws.values())


def _gain(poster: Poster, ax: Axes, case: Case, ssd: pd.DataFrame, sd: pd.DataFrame) -> None:
    times = {int(b): Times.of(case, int(b)) for b in sorted(case.rows["batch_size"].unique())}
    at = float(ssd["alpha"].iloc[0]), int(ssd["lookahead"].iloc[0])
    for method, rate, group in _laws(ssd):
        style = look(method)
        poster.gains(ax, method, gains(group, where(sd, method="SD"), "batch_size"), **style)
        for rho, dashes in ((0.0, "--"), (_RHO, "-.")):
            model = {b: over_batch(t, *at, rate, b, rho) for b, t in times.items() if t is not None}
            line = {"color": style["color"], "linestyle": dashes, "linewidth": 1.5}
            name = f"_{method}, formula, ρ={rho:g}"
            poster.line(ax, name, model.keys(), model.values(), **line)
    for dashes, kind in (("--", "independent"), ("-.", f"correlated, ρ={_RHO:g}")):
        ax.plot([], [], dashes, color=BLACK, linewidth=1.5, label=f"formula, hits {kind}")
    parity(ax)
    ax.set_xscale("log", base=2)


def _per_gpu(poster: Poster, ax: Axes, case: Case, ssd: pd.DataFrame, sd: pd.DataFrame) -> None:
    """Draws tok/s per GPU over AR's on the targets' GPUs at the same b."""
    lines = [(m, where(sd, method=m)) for m in ("SD inline", "SD")]
    for method, rows in lines + [(method, rows) for method, _, rows in _laws(ssd)]:
        if len(rows):
            share = case.tp / rows["gpus"].iloc[0]
            poster.gains(ax, method, gains(rows, case.own_ar, "batch_size", share), **look(method))
    parity(ax, 1.0, "AR")


def pareto(data: Data) -> Poster:
    """Draws a point for each method and batch size; the line joins the Pareto-optimal ones."""
    shown = [(case, _rows(case)) for case in cases(data, plain(data.rows), ["batch_size"])]
    shown = [(case, rows) for case, rows in shown if _is_sweep(rows)][:2]
    need(shown, "AR, SD and SSD at three or more batch sizes")
    poster = Poster(7.6)
    grid = poster.panels(1, len(shown))[0]
    for ax, (case, rows) in zip(grid, shown, strict=True):
        _panel(poster, ax, case, rows)
    grid[0].set_ylabel("tok/s per GPU (throughput)")
    text = caption([rows for _, rows in shown], BARS)
    return poster.finish("Which use gives most tok/s per GPU at a speed per sequence?", text)


def _rows(case: Case) -> pd.DataFrame:
    """Returns the rows of one alpha and K; SSD with the hit model of most batch sizes, and imposed
    hits."""
    ssd = case.method("SSD")
    law = richest(ssd[ssd["p_hit"].isna()], _SSD, ["batch_size"])
    law = law if law["batch_size"].nunique() >= 3 else law.iloc[:0]
    imposed = ssd[ssd["p_hit"].notna()]
    if len(law):
        imposed = where(imposed, **{name: law[name].iloc[0] for name in _SSD[:2]})
    both = pd.concat([law, richest(imposed, _SSD, ["batch_size"]).assign(method=IMPOSED)])
    if not len(both):
        return both
    alike = {name: both[name].iloc[0] for name in _SSD[:2]}
    wide = where(case.wide, gpus=case.tp + 1, **alike)
    return pd.concat([case.ar, where(case.rows, mode="sd", **alike), wide, both])


def _is_sweep(rows: pd.DataFrame) -> bool:
    sizes = rows.groupby("method")["batch_size"].nunique()
    both = "AR" in sizes.index and bool({"SSD", IMPOSED} & set(sizes.index))
    return bool(both and (sizes >= 3).sum() >= 3)


def _panel(poster: Poster, ax: Axes, case: Case, rows: pd.DataFrame) -> None:
    first = rows[rows["mode"] == "ssd"].iloc[0]
    ax.set_title(f"{case.label}, K={first['lookahead']}, α={first['alpha']:g}")
    front: list[tuple[float, float]] = []
    numbers: list[tuple[float, float, float]] = []
    for (method, gpus), group in rows.groupby(["method", "gpus"], sort=True):
        more, style = int(gpus) - case.tp, look(str(method))
        is_wide = more > 0 and method in ("AR", "SD inline")
        medians = points(group, ["batch_size"])
        x, y = medians["per_sequence"], medians["per_gpu"]
        low, high = (medians[end] / medians["tok_per_s"] for end in ("low", "high"))
        poster.line(
            ax,
            f"{method}, T{f'+{more}' if more else ''} GPUs",
            x,
            y,
            low=y * low,
            high=y * high,
            also={"b": medians["batch_size"]},
            linewidth=1.4,
            linestyle=":" if is_wide else "-",
            markerfacecolor="white" if is_wide else style["color"],
            **style,
        )
        numbers += zip(medians["batch_size"], x, y, strict=True)
        front += [] if method == IMPOSED else list(zip(x, y, strict=True))
    front.sort(reverse=True)
    front = [at for n, at in enumerate(front) if all(at[1] > up for _, up in front[:n])]
    style = {"color": BLACK, "linewidth": 6, "alpha": 0.13, "zorder": 1}
    poster.line(ax, "frontier", *zip(*front, strict=True), **style)
    ax.set(yscale="log", xlabel="tok/s per sequence (numbers: b)", xlim=(0, 1.1 * ax.get_xlim()[1]))
    plain_ticks(ax.yaxis)
    label_points(ax, [(f"{b:.0f}", x, y) for b, x, y in numbers])
