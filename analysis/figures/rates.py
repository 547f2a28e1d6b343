"""Throughput over alpha and K, and SSD against the other uses of as many GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pandas as pd
from matplotlib.axes import Axes

from analysis.rows import Data
from analysis.select import (
    Case,
    best_points,
    best_rows,
    cases,
    claim_of,
    of_seeds,
    plain,
    points,
    richest,
    short,
    where,
)
from analysis.style import (
    BARS,
    GREY,
    METHODS,
    RED,
    Poster,
    caption,
    look,
    need,
    note,
    parity,
)
from mpissd.common.compare import HEADLINE_ROUNDS, HEADLINE_SEEDS
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import Family, tps_of, widest
from mpissd.lab.tables.best import Use
from mpissd.lab.tables.claims import Claim, claims, tables_of

_METHODS = ("SD inline", "SD", "SSD")
_EXPECTED = {"ar": "AR", "sd": "SD inline"}
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
_NEEDED = (
    f"SSD and another use of its GPUs, {HEADLINE_SEEDS} seeds of "
    f"{HEADLINE_ROUNDS} rounds each, at two alphas or more"
)


def throughput(data: Data) -> Poster:
    """x = K at up to three alphas, and x = alpha with each method at its own best K."""
    wanted = plain(data.rows) & data.rows["alpha"].notna() & (data.rows["batch_size"] == 1)
    shown = cases(data, wanted, ["alpha", "lookahead", "method"], most=1)
    need(shown and _is_sweep(shown[0]), "SD and SSD, each at three or more K of one alpha")
    (case,) = shown
    used = _rows(case)
    alphas = sorted(used["alpha"].unique())
    alphas = alphas if len(alphas) <= 3 else [alphas[0], alphas[len(alphas) // 2], alphas[-1]]
    poster = Poster(7.4)
    grid = poster.panels(2, len(alphas) + 1, sharey="row")
    for axes, name in zip(grid, ("all GPUs", "per GPU"), strict=True):
        is_above = name == "all GPUs"
        for ax, alpha in zip(axes, alphas, strict=False):
            ax.set_title(f"α = {alpha:g}" * is_above)
            ax.set_label(f"α = {alpha:g}, {name}")
            rows = where(used, alpha=alpha)
            for label, method, group in _series(rows, case.tp):
                _draw(poster, ax, label, method, points(group, ["lookahead"]), name)
            ax.set_xticks(sorted(rows["lookahead"].unique()))
        axes[-1].set_title("each at its best K" * is_above)
        axes[-1].set_label(f"own best K, {name}")
        axes[-1].set(xticks=sorted(used["alpha"].unique()), xmargin=0.14)
        _over_best(poster, axes[-1], used, case, name)
        for ax in axes:
            _baselines(poster, ax, case, name)
            ax.set_ylim(0, 1.06 * ax.get_ylim()[1] if ax is axes[-1] else None)
            ax.set_xlabel("" if is_above else "acceptance α" if ax is axes[-1] else "lookahead K")
        axes[0].set_ylabel(f"tok/s, {name}")
    law = used.loc[used["method"] == "SSD", "hit_law"]
    hits = f"SSD: {used['policy'].max()}, hits {law.iloc[0]}" if len(law) else "no SSD rows"
    lines = "SD and SSD draft on one GPU more. Lines with T=: of another visit (± 4%)"
    text = caption([used, case.ar], hits, lines, BARS)
    return poster.finish(f"How fast are AR, SD and SSD? {case.label}", text)


def _is_sweep(case: Case) -> bool:
    counts = case.rows.groupby(["alpha", "mode"])["lookahead"].nunique().unstack(fill_value=0)
    return bool({"sd", "ssd"} <= set(counts) and (counts[["sd", "ssd"]].min(axis=1) >= 3).any())


def _rows(case: Case) -> pd.DataFrame:
    """Returns SD, SD inline (also on T + 1 GPUs), and SSD of the hits and policy with most
    cells."""
    rows = pd.concat([case.rows, where(case.wide, gpus=case.tp + 1)])
    # Imposed hits would always be the best, because they cost nothing.
    ssd = rows[(rows["method"] == "SSD") & rows["p_hit"].isna()]
    ssd = richest(ssd, ["hit_law", "policy"], ["alpha", "lookahead"])
    return pd.concat([rows[rows["method"] != "SSD"], ssd])


def _series(rows: pd.DataFrame, tp: int) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yields (label, method, rows) of each line; SD on another T has its own line."""
    for method in _METHODS:
        by_tp = where(rows, method=method).groupby("tp")
        for other, group in sorted(by_tp, key=lambda item: item[0] != tp):
            yield method if other == tp else f"{method}, T={other}", method, group


def _draw(
    poster: Poster, ax: Axes, label: str, method: str, medians: pd.DataFrame, name: str
) -> None:
    share = 1 if name == "all GPUs" else medians["gpus"]
    y, low, high = (medians[column] / share for column in ("tok_per_s", "low", "high"))
    wide = {"linestyle": ":", "markerfacecolor": "white"} if label != method else {}
    x = medians.iloc[:, 0]
    poster.line(ax, label, x, y, low=low, high=high, **{**look(method), **wide})


def _over_best(poster: Poster, ax: Axes, rows: pd.DataFrame, case: Case, name: str) -> None:
    for label, method, group in _series(rows, case.tp):
        bests = best_points(group, "alpha")
        _draw(poster, ax, label, method, bests, name)
        if method != "SSD" or name != "all GPUs":
            continue
        claims = [(float(a), claim_of(case, best_rows(ssd))) for a, ssd in group.groupby("alpha")]
        expected_lines(poster, ax, [(alpha, claim) for alpha, claim in claims if claim])
        place = {"dx": 0, "dy": 4, "ha": "center", "fontsize": 11, "color": RED}
        place["xycoords"] = ("data", "axes fraction")
        for n, (at, lookahead) in enumerate(zip(bests["alpha"], bests["lookahead"], strict=True)):
            note(ax, "K=" * (not n) + f"{lookahead:.0f}", at, 0, **place)


def expected_lines(poster: Poster, ax: Axes, claims: Iterable[tuple[float, Claim]]) -> None:
    """Draws the expected rate of each use that was not measured over alpha, dashed."""
    lines: dict[Family, list[tuple[float, float]]] = {}
    for alpha, claim in claims:
        for one in claim.unknown:
            if one.rate is not None and one.why == "not measured":
                lines.setdefault(one.family, []).append((alpha, one.rate))
    for family, known in lines.items():
        if len(known) > 1:
            color = METHODS[_EXPECTED.get(family.mode, family.mode)][0]
            style = {"color": color, "linestyle": "--", "linewidth": 2}
            x, y = zip(*known, strict=True)
            poster.line(ax, f"{family} (expected, not measured)", x, y, **style)


def _baselines(poster: Poster, ax: Axes, case: Case, name: str) -> None:
    """Draws AR on the targets' GPUs, and on as many GPUs as SD and SSD use."""
    for gpus, style in ((case.tp, "-"), (case.tp + 1, ":")):
        point = case.ar_on(gpus)
        if point is not None:
            value = point["tok_per_s"] / (1 if name == "all GPUs" else gpus)
            label = f"AR, {gpus} GPU{'s' * (gpus > 1)}"
            ax.axhline(value, color=GREY, linestyle=style, linewidth=2, label=label, zorder=2)
            poster.keep(ax, label, y=value)


def equal_gpus(data: Data) -> Poster:
    """Draws a line for each use of all GPUs at its best K; below, SSD over the strongest."""
    shown = _pairs(data)
    need(shown, _NEEDED)
    poster = Poster(8.4)
    grid = poster.panels(2, len(shown), sharex=True, height_ratios=[2, 1.3])
    for (above, below), panel in zip(grid.T, shown, strict=True):
        above.set_title(f"{_label(panel[0])}\n{_splits(panel)}", fontsize=12)
        below.set_label(_label(panel[0]))
        below.set_xlabel("acceptance α")
        below.sharey(grid[1][0])
        _rates(poster, above, panel)
        _gains(poster, below, panel)
    grid[1][0].set_xticks(sorted({_alpha(claim) for panel in shown for claim in panel}))
    for ax in grid.flat:
        ax.margins(x=0.11, y=0.28)
    grid[0][0].set_ylabel("tok/s, all GPUs")
    grid[1][0].set_ylabel("SSD over the\nstrongest, ×")
    return poster.finish("Does SSD beat the other uses of its GPUs?", _caption(data, shown))


def _pairs(data: Data) -> list[list[Claim]]:
    """Returns the claims of at most two pairs by rising alpha, each of one configuration.

    Claims with the LM head come first, then those whose hits follow no assumed model, then those
    with most alphas.
    """
    try:
        rows = data.rows[plain(data.rows) & (data.rows["batch_size"] == 1)]
        every = claims(list(rows["row"]))
    except ConfigError:
        return []
    every = [c for c in every if str(c.setting["acceptance"]).startswith("alpha:")]
    heads = ([c for c in every if c.setting["lm_head"] is is_with] for is_with in (True, False))
    groups = [of for head in heads for of in tables_of(head).values() if len(of) > 1]
    groups.sort(key=lambda of: (not of[0].setting["lm_head"], of[0].is_assumed, -len(of)))
    best: dict[tuple[object, ...], list[Claim]] = {}
    for of in groups:
        best.setdefault((of[0].setting["target"], of[0].setting["draft"], of[0].gpus), of)
    chosen = list(best.values())[:2]
    return sorted((sorted(of, key=_alpha) for of in chosen), key=lambda of: of[0].gpus)


def _alpha(claim: Claim) -> float:
    return float(str(claim.setting["acceptance"]).removeprefix("alpha:"))


def _label(claim: Claim) -> str:
    head = "with" if claim.setting["lm_head"] else "without"
    pair = "/".join(short(claim.setting[name]) for name in ("target", "draft"))
    return f"{pair} on {claim.gpus} GPUs, {head} LM head"


def _uses(claim: Claim) -> list[Use]:
    """Returns SSD, and of each other mode the use on most target ranks that was measured."""
    wanted = widest(claim.gpus, tps_of(str(claim.setting["target"]), claim.gpus))
    others = sorted(claim.others, key=lambda use: (use.family in wanted, use.family.tp))
    by_mode = {use.family.name: use for use in others}
    return sorted([claim.ssd, *by_mode.values()], key=lambda use: use.family.name)


def _splits(panel: Sequence[Claim]) -> str:
    """Describes how each line splits the GPUs."""
    names: dict[str, set[str]] = {}
    for use in (use for claim in panel for use in _uses(claim)):
        idle = panel[0].gpus - use.family.gpus
        ranks = str(use.family).removeprefix(f"{use.family.name} ")
        names.setdefault(ranks + f", {idle} idle" * bool(idle), set()).add(use.family.name)
    return "\n".join(f"{', '.join(sorted(of))}: {ranks}" for ranks, of in names.items())


def _rates(poster: Poster, ax: Axes, panel: Sequence[Claim]) -> None:
    lines: dict[str, list[tuple[float, Use]]] = {}
    for claim in panel:
        for use in _uses(claim):
            lines.setdefault(use.family.name, []).append((_alpha(claim), use))
    for name, of in lines.items():
        alphas, uses = zip(*of, strict=True)
        values, low, high = zip(*(of_seeds(use.rows) for use in uses), strict=True)
        also = {"K": [use.lookahead for use in uses]}
        style = {**look(name), "zorder": 5 if name == "SSD" else 3}
        poster.line(ax, name, alphas, values, low=low, high=high, also=also, **style)
    expected_lines(poster, ax, [(_alpha(claim), claim) for claim in panel])
    ax.set_ylim(0)


def _gains(poster: Poster, ax: Axes, panel: Sequence[Claim]) -> None:
    series = "_SSD over the strongest measured use of its visit"
    judged = [(_alpha(claim), claim, claim.gain) for claim in panel if claim.gain is not None]
    alphas = [alpha for alpha, *_ in judged]
    values, low, high = zip(*((g.speedup, g.low, g.high) for *_, g in judged), strict=True)
    also = {
        "rival": [str(claim.other) for _, claim, _ in judged],
        "text": [claim.text for _, claim, _ in judged],
    }
    style = {**look("SSD"), "zorder": 5}
    poster.line(ax, series, alphas, values, low=low, high=high, also=also, **style)
    for alpha, claim, gain in judged:
        text = f"{gain.speedup:.2f}×" if gain.is_real else "no\ndifference"
        text = text if claim.is_verdict else "no\nverdict"
        place = {"dx": 0, "dy": 5, "ha": "center", "va": "bottom", "fontsize": 12, "bbox": _WHITE}
        note(ax, text, alpha, gain.high, **place)
    parity(ax)


def _caption(data: Data, shown: Iterable[Sequence[Claim]]) -> str:
    """Returns the caption of the rows that were drawn."""
    panels = list(shown)
    uses = [use for panel in panels for c in panel for use in (*_uses(c), c.other) if use]
    drawn = {row["run_id"] for use in uses for row in use.rows}
    laws = "; ".join(f"{panel[0].gpus} GPUs: {panel[0].hit_law}" for panel in panels)
    return caption(
        [data.rows[data.rows["run_id"].isin(drawn)]],
        f"Hits on {laws}. Bars: 95%. No verdict: a dashed use may be stronger",
    )
