"""Equal GPUs: SSD on T+1 GPUs against the other uses of as many, over alpha.

The numbers are those of `mpissd claims` on the same rows: the same K and gains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import caption, look, need
from analysis.gain import records
from analysis.interval import of_seeds
from analysis.load import Data
from analysis.real_pair import REAL
from analysis.select import plain, short
from analysis.style import RED, Poster, parity
from analysis.uses import BESIDE
from mpissd.common.compare import HEADLINE_ROUNDS, HEADLINE_SEEDS
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import Family, tps_of, widest
from mpissd.lab.sweep.claims import Claim, claims
from mpissd.lab.sweep.uses import MeasuredUse

_WIDTH = 10.0  # Inches; README shows the figure 700 pixels wide, where its text must stay readable.
PREDICTED = "SSD, real hits (predicted)"
_ABOVE: dict[str, Any] = {
    **{"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 12},
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
}
_NEEDED = (
    f"SSD and another use of its GPUs, {HEADLINE_SEEDS} seeds of "
    f"{HEADLINE_ROUNDS} rounds each, at two alphas or more"
)


def equal_gpus(data: Data) -> Poster:
    """Draws a line for each use of all GPUs at its best K; below, SSD over the best other use."""
    shown = _pairs(data)
    need(shown, _NEEDED)
    poster = Poster(8.2, _WIDTH)
    height = 10.0 + 16 * max(len(_places(panel)) for panel in shown)
    grid = poster.panels(2, len(shown), sharex=True, height_ratios=[2, 1.3])
    for (above, below), panel in zip(grid.T, shown, strict=True):
        above.set_title(_label(panel[0]), pad=height)
        _say(above, _places(panel), height)
        below.set_label(_label(panel[0]))
        below.set_xlabel("acceptance α")
        below.sharey(grid[1][0])
        _rates(poster, above, panel)
        _gains(poster, below, panel)
    grid[1][0].set_xticks(sorted({_alpha(claim) for panel in shown for claim in panel}))
    for ax in grid.flat:
        ax.margins(x=0.11, y=0.28)
    grid[0][0].set_ylabel("tok/s, all GPUs")
    grid[1][0].set_ylabel("SSD over the\nfastest other, ×")
    return poster.finish("SSD and the other uses of as many GPUs", _caption(data, shown))


def _pairs(data: Data) -> list[list[Claim]]:
    """Returns the claims of at most two pairs by rising alpha, each of one configuration.

    Claims with the LM head come first, then those whose hits follow no assumed law, then those with
    most alphas.
    """
    rows = data.rows[plain(data.rows) & (data.rows["batch_size"] == 1)]
    groups: dict[tuple[object, ...], list[Claim]] = {}
    for claim in _claims(rows):
        groups.setdefault((claim.group, claim.setting["lm_head"]), []).append(claim)
    pairs = [of for of in groups.values() if len(of) > 1]
    pairs.sort(key=lambda of: (not of[0].setting["lm_head"], of[0].is_assumed, -len(of)))
    best: dict[tuple[object, ...], list[Claim]] = {}
    for of in pairs:
        best.setdefault((of[0].setting["target"], of[0].setting["draft"], _gpus(of[0])), of)
    chosen = list(best.values())[:2]
    return sorted((sorted(of, key=_alpha) for of in chosen), key=lambda of: _gpus(of[0]))


def _claims(rows: pd.DataFrame) -> list[Claim]:
    try:
        judged = claims(records(rows))
    except ConfigError:
        return []
    return [c for c in judged if str(c.setting["acceptance"]).startswith("alpha:")]


def _alpha(claim: Claim) -> float:
    return float(str(claim.setting["acceptance"]).removeprefix("alpha:"))


def _gpus(claim: Claim) -> int:
    return claim.verdict.ssd.tp + claim.verdict.ssd.num_drafts


def _label(claim: Claim) -> str:
    head = "with" if claim.setting["lm_head"] else "without"
    pair = "/".join(short(claim.setting[name]) for name in ("target", "draft"))
    return f"{pair} on {_gpus(claim)} GPUs, {head} LM head"


def _say(ax: Axes, lines: Sequence[str], height: float) -> None:
    """Writes lines between a panel and its title, which is `height` points above the panel."""
    place: dict[str, Any] = {
        "xytext": (0, height - 6),
        "textcoords": "offset points",
        "ha": "center",
        "va": "top",
    }
    ax.annotate("\n".join(lines), (0.5, 1), xycoords="axes fraction", fontsize=12, **place)


def _rates(poster: Poster, ax: Axes, panel: Sequence[Claim]) -> None:
    lines: dict[str, list[tuple[float, MeasuredUse]]] = {}
    for claim in panel:
        for use in _uses(claim):
            lines.setdefault(_name(use), []).append((_alpha(claim), use))
    for name, points in lines.items():
        alphas, uses = zip(*points, strict=True)
        values, low, high = zip(*(of_seeds(use.cell.rows) for use in uses), strict=True)
        also = {"K": [use.cell.lookahead for use in uses]}
        style = {**look(name), "zorder": 5 if name == "SSD" else 3}
        poster.line(ax, name, alphas, values, low=low, high=high, also=also, **style)
    predicted = [_under(panel, name) for name in REAL]
    for name, line in zip(REAL, predicted, strict=True):
        for alpha, rate in line:
            poster.keep(ax, f"{PREDICTED}: {name}", x=alpha, y=rate)
    _dashed(ax, predicted)
    ax.set_ylim(0)


def _uses(claim: Claim) -> list[MeasuredUse]:
    """Returns SSD, and for each other mode the use on most target ranks that fits."""
    gpus = _gpus(claim)
    wanted = widest(gpus, tps_of(str(claim.setting["target"]), gpus))
    others = [use for use in claim.verdict.others.judged if Family.of(use) in wanted]
    return sorted([claim.verdict.ssd, *others], key=_name)


def _name(use: MeasuredUse) -> str:
    return str(Family.of(use)).split(" T=")[0]


def _places(panel: Sequence[Claim]) -> list[str]:
    """Describes how each line splits the GPUs, and which other uses were not measured."""
    names: dict[str, set[str]] = {}
    for use in (use for claim in panel for use in _uses(claim)):
        idle = _gpus(panel[0]) - Family.of(use).gpus
        where = str(Family.of(use)).removeprefix(f"{_name(use)} ")
        names.setdefault(where + f", {idle} idle" * bool(idle), set()).add(_name(use))
    uses = " · ".join(f"{', '.join(sorted(of))}: {where}" for where, of in names.items())
    missing: dict[str, list[float]] = {}
    for claim in panel:
        for family in claim.verdict.others.missing:
            seeds = claim.seeds.get(family)
            told = f"has {seeds} seeds of {HEADLINE_SEEDS}" if seeds else "was not measured"
            missing.setdefault(f"{family} {told}", []).append(_alpha(claim))
    return [uses, *(_at(told, missing[told], len(panel)) for told in sorted(missing))]


def _at(told: str, alphas: Sequence[float], count: int) -> str:
    where = "" if len(alphas) == count else f" at α = {', '.join(f'{a:g}' for a in alphas)}"
    return f"{told}{where}"


def _dashed(ax: Axes, lines: Sequence[Sequence[tuple[float, float]]]) -> None:
    """Draws a dashed line for each real pair's hits."""
    for place, points in enumerate(filter(None, lines)):
        label = f"_{PREDICTED}" if place else PREDICTED
        ax.errorbar(*zip(*points, strict=True), fmt="--", color=RED, linewidth=2, label=label)


def _under(panel: Sequence[Claim], name: str) -> list[tuple[float, float]]:
    """Returns (alpha, tok/s) for the claims whose rows of every seed have the predicted value."""
    rates_at = ((_alpha(c), [row.get(name) for row in c.verdict.ssd.cell.rows]) for c in panel)
    return [(alpha, geometric_mean(rates)) for alpha, rates in rates_at if all(rates)]


def _real(claim: Claim) -> dict[str, float]:
    """Returns the gain predicted with each real pair's hits; empty if it cannot be predicted."""
    return dict(zip(REAL, claim.real, strict=True)) if len(claim.real) == len(REAL) else {}


def _gains(poster: Poster, ax: Axes, panel: Sequence[Claim]) -> None:
    alphas = [_alpha(claim) for claim in panel]
    gains = [claim.gain for claim in panel]
    bars = [[g.speedup - g.low for g in gains], [g.high - g.speedup for g in gains]]
    values = [g.speedup for g in gains]
    ax.errorbar(alphas, values, yerr=bars, capsize=3, elinewidth=1.4, zorder=5, **look("SSD"))
    real = [(alpha, _real(claim)) for alpha, claim in zip(alphas, panel, strict=True)]
    _dashed(ax, [[(alpha, of[name]) for alpha, of in real if of] for name in REAL])
    for alpha, claim in zip(alphas, panel, strict=True):
        ax.annotate(_gain_text(claim), (alpha, claim.gain.high), xytext=(0, 5), **_ABOVE)
    parity(ax)
    for claim in panel:
        _keep(poster, ax, claim)


def _gain_text(claim: Claim) -> str:
    """Formats a gain; it is a ratio only if every use that fits was measured."""
    gain = claim.gain
    if claim.verdict.others.missing:
        return "no\nclaim"
    return f"{gain.speedup:.2f}×" if gain.is_real else "no\ndifference"


def _keep(poster: Poster, ax: Axes, claim: Claim) -> None:
    gain, seeds = claim.gain, claim.seeds
    missing = [
        f"{use} but for {seeds[use]} seeds" if use in seeds else str(use)
        for use in claim.verdict.others.missing
    ]
    poster.keep(
        ax,
        BESIDE,
        x=_alpha(claim),
        y=gain.speedup,
        low=gain.low,
        high=gain.high,
        headline=gain.is_headline,
        rival=claim.other.where,
        gpus=_gpus(claim),
        missing=", ".join(missing),
        **_real(claim),
    )


def _caption(data: Data, shown: Iterable[Sequence[Claim]]) -> str:
    """Returns the caption of the rows that were drawn."""
    uses = [use for panel in shown for claim in panel for use in (*_uses(claim), claim.other)]
    drawn = {row["run_id"] for use in uses for row in use.cell.rows}
    rows = data.rows[data.rows["run_id"].isin(drawn)]
    return caption(
        data,
        [rows],
        f"{_laws(shown)}. Every use at its best measured K by the predicted "
        "mean. Points: geometric means over seeds, with 95% intervals. Below: the ratio paired by "
        "seed, over the other use that leaves SSD least. Dashed: predicted, not measured",
    )


def _laws(shown: Iterable[Sequence[Claim]]) -> str:
    """Says by which law the hits of each panel's SSD are drawn."""
    laws = {_label(panel[0]): panel[0] for panel in shown}
    return "; ".join(
        f"{label}: hits {claim.verdict.ssd.cell.rows[0].hit_law}{', assumed' * claim.is_assumed}"
        for label, claim in laws.items()
    )
