"""Figures about hits of SSD's speculation cache: their worth, the fan-out (number of bonus-token
candidates) that they need, larger batches, and throughput against latency.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes

from ..rows import Data
from ..select import (
    Case,
    cases,
    fastest,
    gains,
    key,
    plain,
    points,
    prompts,
    richest,
    short,
    where,
)
from ..style import (
    BARS,
    BLACK,
    MARKERS,
    SERIES,
    Poster,
    caption,
    label_points,
    look,
    need,
    note,
    parity,
    plain_ticks,
    unit,
)

IMPOSED = "SSD, hits imposed"
_SSD = ("alpha", "lookahead", "policy")


def cache_hits(data: Data) -> Poster:
    """SSD's speedup over SD (y) by imposed cache-hit rate (x), also over SD without a draft GPU."""
    rows = data.rows
    wanted = plain(rows) & (rows["batch_size"] == 1)
    wanted &= rows["p_hit"].notna() | (rows["mode"] != "ssd")
    return _over_sd(data, wanted, "p_hit", "imposed cache-hit rate p_hit", "What are hits worth?")


def batch_scaling(data: Data) -> Poster:
    """SSD's speedup over SD (y) by batch size (x), with drawn and with imposed cache hits, also
    over SD inline (the draft on the target's GPUs)."""
    data = _beside_inline(data)
    heading = "Does SSD's gain survive batches?"
    return _over_sd(data, plain(data.rows), "batch_size", "sequences in the batch, b", heading)


def _beside_inline(data: Data) -> Data:
    """Returns the data, for each target only from folders that measured SD inline at batch sizes
    above 1, if there are any."""
    rows = data.rows
    inline = rows[plain(rows) & (rows["method"] == "SD inline") & (rows["batch_size"] > 1)]
    places = set(key(inline, ["folder", "target"]))
    kept = key(rows, ["folder", "target"]).isin(places) | ~rows["target"].isin(inline["target"])
    return replace(data, rows=rows[kept.to_numpy(dtype=bool)])


def _over_sd(data: Data, wanted: pd.Series, by: str, label: str, heading: str) -> Poster:
    """Draws the measured speedup of SSD over SD at one alpha and K by the column `by`, and the
    speedup by the closed formula with the rows' own times. wanted: a mask of the rows to use."""
    shown = []
    for case in cases(data, wanted, [by, "backup"]):
        ssd = richest(case.method("SSD"), [*_SSD, "backup"], [by, "hit_law"])
        if ssd[by].nunique() >= 3:
            alike = {name: ssd[name].iloc[0] for name in ("alpha", "lookahead")}
            shown.append((case, case.only(**alike), ssd))
    shown = [item for item in shown if len(item[1].method("SD"))][:3]
    need(shown, f"SSD of three or more values of {by}, and SD")
    poster = Poster(6.6)
    used = []
    grid = poster.panels(1, len(shown), sharey=True)[0]
    of_hits = by == "p_hit"
    for ax, (whole_case, case, ssd) in zip(grid, shown, strict=True):
        sd = case.method("SD")
        alpha = ssd["alpha"].iloc[0]
        ax.set_title(f"{case.label}+1, K={ssd['lookahead'].iloc[0]}, α={alpha:g}")
        for imposed in (False, True):
            part = ssd[ssd["p_hit"].notna() == imposed]
            if not of_hits:  # By batch size, only the hit model with the highest hit rate is drawn.
                long = part.groupby("hit_law").filter(lambda of: of[by].nunique() >= 3)
                rates = long.groupby("hit_law")["hit_rate"].mean()
                part = long[long["hit_law"] == rates.idxmax()] if len(long) else long
            name = IMPOSED if imposed else "SSD"
            over = gains(part, sd, by, one_base=of_hits)
            poster.gains(ax, f"{name}, over SD", over, **look(name))
            style = {"color": look(name)["color"], "linewidth": 1.5}
            what = "closed formula" + ", hits independent" * (not of_hits)
            poster.line(ax, what, *_formula(part, sd, by), linestyle="--", **style)
        used += [ssd, sd]
        if of_hits:
            inline = case.method("SD inline")
            over = gains(ssd, inline, by, one_base=True)
            name = f"{IMPOSED}, over SD inline on one {unit(ssd)} less"
            used.append(inline)
        else:
            drawn = whole_case.method("SSD", alpha=alpha)
            wide = where(whole_case.wide, gpus=case.tp + 1, alpha=alpha)
            best = [fastest(of, "batch_size") for of in (drawn[drawn["p_hit"].isna()], wide)]
            over = gains(*best, by)
            name = f"SSD, over SD inline on all {unit(ssd)}s, each at its best K and backup"
            used += best * bool(len(over))
            shapes = best[0].groupby(by)[["lookahead", "backup"]].first()
            place = {"ha": "center", "fontsize": 11, "xycoords": ("data", "axes fraction")}
            for b, lookahead, backup in shapes.loc[over[by]].itertuples():
                color = look("SD inline")["color"]
                note(ax, f"K={lookahead}\n{backup}", b, 0, dx=0, color=color, **place)
            ax.set_xscale("log", base=2)
            ax.set_xticks(sorted(ssd[by].unique()))
            ax.xaxis.set_major_formatter("{x:.0f}")
            ax.minorticks_off()
        poster.gains(ax, name, over, **look("SD inline"))
        parity(ax)
        ax.set_xlabel(label)
    grid[0].set_ylabel("SSD's tok/s over the other's, ×")
    grid[0].set_ylim(min(0.6, grid[0].get_ylim()[0]))
    note_text = "Formula: no wait with p_hit^b. Over SD: at the title's K"
    note_text += ". Blue: SSD's K and backup" * any(ax.texts for ax in grid)
    return poster.finish(heading, caption(used, BARS, "" if of_hits else note_text))


def _formula(ssd: pd.DataFrame, sd: pd.DataFrame, by: str) -> tuple[list[float], list[float]]:
    """Returns (values of `by`, speedups of SSD over SD) by theorem 7 of [Kumar, Dao, May 2026] with
    the rows' times. All b sequences hit with probability h^b, as if they were independent; if any
    misses, the round takes as long as one of SD."""
    values = []
    for x, part in ssd.groupby(by):
        b = int(part["batch_size"].iloc[0])
        rounds = sd[sd["batch_size"] == b]
        verify, drafting, round_s = rounds[["t_target_s", "t_draft_s", "round_s"]].median()
        host = round_s - verify - drafting
        hits = float(part["p_hit"].fillna(part["hit_rate"]).median()) ** b
        judged = verify + host
        grown = float(part["t_growth_s"].fillna(0).median()) + host
        gain = round_s / (hits * max(judged, grown) + (1 - hits) * (judged + drafting))
        values.append((float(str(x)), gain))
    return [x for x, _ in values], [y for _, y in values]


def fan_out(data: Data) -> Poster:
    """Hit rate, time of growing branches over that of a verification, and tok/s (y) by the number
    of branches (x), the sum of the fan-out over all positions.

    A column is a model pair with a line for each recording, or with imposed acceptance and AR. Only
    K at which some branches could be grown to their end are drawn."""
    shown = [*_recorded(data.rows), *_imposed(data)][:3]
    need(shown, "SSD at three or more branch budgets, uniform and geometric under one power law")
    poster = Poster(10.2)
    names = dict[str, int]()
    grid = poster.panels(3, len(shown), sharex="col")
    for column, (title, lines, ar) in zip(grid.T, shown, strict=True):
        column[0].set_title(title)
        for ax, what in zip(column, ("hit rate", "growth", "tok/s"), strict=True):
            ax.set_label(f"{title}: {what}")
        for name, rows in lines.items():
            names.setdefault(name, len(names))
            style = {"color": SERIES[names[name] % 7], "marker": MARKERS[names[name] % 7]}
            at = points(rows, ["branch_budget"])
            x = at["branch_budget"]
            grown = at["t_growth_s"] / at["t_target_s"]
            poster.line(column[0], name, x, at["hit_rate"], **style)
            poster.line(column[1], name, x[grown.notna()], grown.dropna(), **style)
            ends = {"low": at["low"], "high": at["high"]}
            poster.line(column[2], name, x, at["tok_per_s"], **ends, **style)
        parity(column[1])
        if len(ar):
            parity(column[2], ar["tok_per_s"].median(), f"AR, T={ar['gpus'].iloc[0]}")
        column[2].set(xlabel="branches grown in a round (sum of F)", xmargin=0.12)
        for ax, top in zip(column, (1, 1.3, 1.06 * column[2].get_ylim()[1]), strict=True):
            ax.set_ylim(0, top)
    titles = "share of rounds that hit", "growth time ÷\nverification time", "tok/s"
    for ax, title in zip(grid[:, 0], titles, strict=True):
        ax.set_ylabel(title)
    used = [part for _, lines, ar in shown for part in (*lines.values(), ar)]
    what = "GEMM-only, imposed acceptance and hits"
    if "replay" in set(pd.concat(used)["workload"]):
        what = "outcomes of recordings, or imposed on products"
    text = caption(used, BARS, what=what, claims=False)
    return poster.finish("What do more branches buy?", text)


_POLICIES = {
    "uniform": "uniform: equal F at each position",
    "geometric": "geometric: F by expected hits",
}
Column = tuple[str, dict[str, pd.DataFrame], pd.DataFrame]


def _recorded(rows: pd.DataFrame) -> Iterator[Column]:
    """Yields a column for each model pair that was measured with recordings at three or more
    numbers of branches: its title, rows by recording, and no AR rows."""
    rows = where(rows, workload="replay", mode="ssd", forward="transformer", batch_size=1)
    rows = where(rows, backup="jit")
    rows = rows[rows["tree_nodes"].isna() & rows["t_growth_s"].notna()]
    for (target, draft, tp), group in rows.groupby(["target", "draft", "tp"]):
        here = richest(group, ["folder", "lookahead"], ["branch_budget"])
        if here["branch_budget"].nunique() >= 3:
            title = f"{short(target)}/{short(draft)}, T={tp}+1, K={here['lookahead'].iloc[0]}"
            lines = {f"recording of {text}": part for text, part in here.groupby(prompts(here))}
            yield f"{title}, whole transformers", lines, here.iloc[:0]


def _imposed(data: Data) -> Iterator[Column]:
    """Yields a column for each model pair with cache hits imposed by a power law: its title, rows
    by kind of fan-out (uniform, geometric), and AR rows; at the alpha and K with most budgets."""
    rows = data.rows
    wanted = plain(rows) & (rows["batch_size"] == 1) & rows["t_growth_s"].notna()
    wanted &= rows["hit_law"].fillna("").str.startswith("power")
    for case in cases(data, wanted, ["policy"]):
        ssd = case.method("SSD")
        ssd = ssd.assign(kind=ssd["policy"].str.split(":").str[0])
        ssd = richest(ssd, ["alpha", "lookahead", "hit_law"], ["kind", "branch_budget"])
        budgets = ssd.groupby("kind")["branch_budget"].nunique()
        if len(budgets) == 2 and budgets.max() >= 3:
            first = ssd.iloc[0]
            title = f"{case.label}+1, K={first['lookahead']}, α={first['alpha']:g}, products"
            lines = {_POLICIES.get(kind, kind): of for kind, of in [*ssd.groupby("kind")][::-1]}
            yield title, lines, where(case.own_ar, batch_size=1)


def pareto(data: Data) -> Poster:
    """Throughput per GPU (y) by speed per sequence (x), a point for each method and batch size at
    its best K and backup.

    A line joins the Pareto-optimal points of methods that were measured at every batch size, if SD
    inline is one of them."""
    data = _beside_inline(data)
    pairs = cases(data, plain(data.rows), ["batch_size", "backup"])
    shown = [(case, rows) for case in pairs if len(rows := _rows(case))]
    need(shown, "AR, SD and SSD, better at several batch sizes")
    sizes = [where(rows, mode="ssd")["batch_size"].nunique() for _, rows in shown]
    shown = [of for of, count in zip(shown, sizes, strict=True) if count >= min(3, max(sizes))][:2]
    poster = Poster(7.6)
    grid = poster.panels(1, len(shown))[0]
    per = unit(data.rows)
    for ax, (case, rows) in zip(grid, shown, strict=True):
        _panel(poster, ax, case, rows, per)
    grid[0].set_ylabel(f"tok/s per {per} (throughput)")
    front = "Each at its best K and backup. Frontier: of the uses measured at every b"
    text = caption([rows for _, rows in shown], front, BARS)
    return poster.finish(f"Which use gives most tok/s per {per} at a speed per sequence?", text)


def _rows(case: Case) -> pd.DataFrame:
    """Returns the rows to draw for a model pair: those of the alpha and hit model with most batch
    sizes, and SSD with imposed hits. Empty if AR, SD or SSD is missing."""
    ssd = case.method("SSD")
    law = richest(ssd[ssd["p_hit"].isna()], ["alpha", "hit_law"], ["batch_size"])
    imposed = ssd[ssd["p_hit"].notna()]
    imposed = imposed[imposed["alpha"].isin(law["alpha"])] if len(law) else imposed
    imposed = richest(imposed, [*_SSD, "hit_law"], ["batch_size"]).assign(method=IMPOSED)
    both = pd.concat([law, imposed])
    sd = pd.concat([where(case.rows, mode="sd"), where(case.wide, gpus=case.tp + 1)])
    ar = case.ar[case.ar["gpus"] <= case.tp + 1]
    parts = [ar, sd[sd["alpha"].isin(both["alpha"])], both]
    if not all(map(len, parts)):
        return both.iloc[:0]
    return fastest(pd.concat(parts), "batch_size", "method", "gpus")


def _panel(poster: Poster, ax: Axes, case: Case, rows: pd.DataFrame, per: str) -> None:
    alpha = rows.loc[rows["mode"] == "ssd", "alpha"].iloc[0]
    ax.set_title(f"{case.label}, α={alpha:g}")
    sizes = rows["batch_size"].nunique()
    front: list[tuple[float, float]] = []
    numbers: list[tuple[float, float, float]] = []
    in_batches = set()
    for (method, gpus), group in rows.groupby(["method", "gpus"], sort=True):
        extra = int(gpus) - case.tp
        style = look(str(method))
        is_wide = extra > 0 and method in ("AR", "SD inline")
        medians = points(group, ["batch_size"])
        x = medians["per_sequence"]
        y = medians["per_gpu"]
        ends = {end: y * medians[end] / medians["tok_per_s"] for end in ("low", "high")}
        ends["also"] = {"b": medians["batch_size"]}
        style |= {"linewidth": 1.4, "linestyle": ":" if is_wide else "-"}
        style["markerfacecolor"] = "white" if is_wide else style["color"]
        poster.line(ax, f"{method}, T{f'+{extra}' * (extra > 0)} {per}s", x, y, **ends, **style)
        numbers += zip(medians["batch_size"], x, y, strict=True)
        if len(medians) == sizes and method != IMPOSED:
            in_batches.add(method)
            front += zip(x, y, strict=True)
    front.sort(reverse=True)
    front = [at for n, at in enumerate(front) if all(at[1] > up for _, up in front[:n])]
    style = {"color": BLACK, "linewidth": 6, "alpha": 0.13, "zorder": 1}
    if "SD inline" in in_batches:
        poster.line(ax, "frontier", *zip(*front, strict=True), **style)
    else:
        place = {"va": "top", "transform": ax.transAxes, "fontsize": 11.5}
        ax.text(0.03, 0.97, "no frontier: SD inline\nnot measured at every b", **place)
    ax.set(yscale="log", xlim=(0, 1.1 * ax.get_xlim()[1]))
    ax.set_xlabel("tok/s per sequence (numbers: sequences)")
    plain_ticks(ax.yaxis)
    label_points(ax, [(f"{b:.0f}", x, y) for b, x, y in numbers])
