"""Equal GPUs: SSD on T+1 GPUs against the other uses of as many, over alpha.

The numbers are those of `mpissd compare --show=claims` on the same rows: the same K and gains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes

from analysis.figures.throughput import expected_lines
from analysis.rows import Data
from analysis.select import of_seeds, plain, records, short
from analysis.style import Poster, caption, look, need, note, parity
from mpissd.common.compare import HEADLINE_ROUNDS, HEADLINE_SEEDS
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import tps_of, widest
from mpissd.lab.tables.best import Use
from mpissd.lab.tables.claims import Claim, claims, tables_of

_WIDTH = 10.0  # Inches; README shows the figure 700 pixels wide, where its text must stay readable.
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
_NEEDED = (
    f"SSD and another use of its GPUs, {HEADLINE_SEEDS} seeds of "
    f"{HEADLINE_ROUNDS} rounds each, at two alphas or more"
)


def equal_gpus(data: Data) -> Poster:
    """Draws a line for each use of all GPUs at its best K; below, SSD over the strongest."""
    shown = _pairs(data)
    need(shown, _NEEDED)
    poster = Poster(8.4, _WIDTH)
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
    return poster.finish("SSD and the other uses of as many GPUs", _caption(data, shown))


def _pairs(data: Data) -> list[list[Claim]]:
    """Returns the claims of at most two pairs by rising alpha, each of one configuration.

    Claims with the LM head come first, then those whose hits follow no assumed model, then those
    with most alphas.
    """
    try:
        every = claims(records(data.rows[plain(data.rows) & (data.rows["batch_size"] == 1)]))
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
    for name, points in lines.items():
        alphas, uses = zip(*points, strict=True)
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
    laws = "; ".join(
        f"{_label(panel[0])}: hits {panel[0].hit_law}{', assumed' * panel[0].is_assumed}"
        for panel in panels
    )
    return caption(
        [data.rows[data.rows["run_id"].isin(drawn)]],
        f"{laws}. Every use at its best measured K. Points: geometric means over seeds, 95% "
        "intervals; above, of any visit. Below: the ratio within a visit, paired by seed. No "
        "verdict: a use that was not measured may be stronger (dashed: what the measured times "
        "lead to expect; a lookup accepts .3), or Holm's correction takes it",
    )
