"""What hits are worth, the fan-out that they need, their loss in batches, and the Pareto front."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

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
IMPOSED = "SSD, hits imposed"
_RHO = 0.5
_SSD = ("alpha", "lookahead", "hit_law", "policy")


def cache_hits(data: Data) -> Poster:
    """x = imposed hit rate; y = gain over SD, and over SD without a draft GPU."""
    rows = data.rows
    wanted = plain(rows) & (rows["batch_size"] == 1)
    wanted &= rows["p_hit"].notna() | (rows["mode"] != "ssd")
    return _over_sd(data, wanted, "p_hit", "imposed cache-hit rate p_hit", "What are hits worth?")


def batch_scaling(data: Data) -> Poster:
    """x = sequences b; y = gain over SD, of drawn and imposed hits."""
    return _over_sd(data, plain(data.rows), "batch_size", "sequences b", "Does it survive batches?")


def _over_sd(data: Data, wanted: pd.Series, by: str, label: str, heading: str) -> Poster:
    """Draws SSD over SD of one alpha and K, and the closed formula with the rows' own times."""
    shown = []
    for case in cases(data, wanted, [by]):
        ssd = richest(case.method("SSD"), ["alpha", "lookahead", "policy"], [by, "hit_law"])
        if ssd[by].nunique() >= 3:
            alike = {name: ssd[name].iloc[0] for name in ("alpha", "lookahead")}
            shown.append((case.only(**alike), ssd))
    shown = [item for item in shown if len(item[0].method("SD"))][:3]
    need(shown, f"SSD of three or more values of {by}, and SD")
    poster, used = Poster(6.6), []
    grid = poster.panels(1, len(shown), sharey=True)[0]
    for ax, (case, ssd) in zip(grid, shown, strict=True):
        sd, inline = case.method("SD"), case.method("SD inline")
        ax.set_title(f"{case.label}+1, K={ssd['lookahead'].iloc[0]}, α={ssd['alpha'].iloc[0]:g}")
        one = by == "p_hit"
        for imposed in (False, True):
            part = ssd[ssd["p_hit"].notna() == imposed]
            if not one:  # the hit model with most hits
                long = part.groupby("hit_law").filter(lambda of: of[by].nunique() >= 3)
                rates = long.groupby("hit_law")["hit_rate"].mean()
                part = long[long["hit_law"] == rates.idxmax()] if len(long) else long
            name = IMPOSED if imposed else "SSD"
            poster.gains(ax, f"{name}, over SD", gains(part, sd, by, one_base=one), **look(name))
            style = {"color": look(name)["color"], "linewidth": 1.5}
            for rho, dashes in ((0.0, "--"), (_RHO, "-."))[: 1 if one else 2]:
                x, y = _formula(part, sd, by, rho)
                what = "closed formula" if one else f"closed formula, ρ={rho:g}"
                poster.line(ax, what, x, y, linestyle=dashes, **style)
        if one:
            over = gains(ssd, inline, by, one_base=True)
            poster.gains(ax, "over SD inline", over, **look("SD inline"))
        else:
            ax.set_xscale("log", base=2)
            ax.set_xticks(sorted(ssd[by].unique()))
            ax.xaxis.set_major_formatter("{x:.0f}")
            ax.minorticks_off()
        parity(ax)
        ax.set_xlabel(label)
        used += [ssd, sd, inline]
    grid[0].set_ylabel("SSD's tok/s over SD's, ×")
    grid[0].set_ylim(0)
    more = "Hits of sequences independent (ρ = 0: all hit with p^b), or half correlated"
    return poster.finish(heading, caption(used, BARS, more if by != "p_hit" else ""))


def _formula(
    ssd: pd.DataFrame, sd: pd.DataFrame, by: str, rho: float
) -> tuple[list[float], list[float]]:
    """Returns (x, SSD over SD) by theorem 7, with the rows' times at each batch size.

    All sequences hit with rho·h + (1 − rho)·h^b; a round of SD is one in which all miss.
    """
    values = []
    for x, part in ssd.groupby(by):
        b = int(part["batch_size"].iloc[0])
        rounds = sd[sd["batch_size"] == b]
        verify, drafting, whole = (
            float(rounds[name].median()) for name in ("t_target_s", "t_draft_s", "round_s")
        )
        host, h = whole - verify - drafting, float(part["p_hit"].fillna(part["hit_rate"]).median())
        every, judged = rho * h + (1 - rho) * h**b, verify + host
        grown = float(part["t_growth_s"].fillna(0).median()) + host
        gain = whole / (every * max(judged, grown) + (1 - every) * (judged + drafting))
        values.append((float(str(x)), gain))
    return [x for x, _ in values], [y for _, y in values]


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
