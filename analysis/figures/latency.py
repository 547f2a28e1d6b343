"""The figure of the parts of a round: the mean time of each phase, on rank 0 and on the draft."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes

from ..rows import Data
from ..select import Case, cases, plain, where
from ..style import (
    BLACK,
    GREEN,
    GREY,
    METHODS,
    PURPLE,
    YELLOW,
    Poster,
    caption,
    need,
    note,
    unit,
)
from .study import ONE_FORWARD, best_shapes, used

_DRAFTING = ("drafting, or finishing a hit", YELLOW)
_WAITING = ("waiting for the other rank", "#DDDDDD")
_HOST = ("host work", GREY)
_LEAD = (
    ("forward_s", "target forward", "#33506B"),
    ("all_reduce_s", "target's all-reduces", "#8FA9C0"),
    ("wait_s", *_WAITING),
    ("other_s", *_HOST),
)
_DRAFT = (
    ("speculate", *_DRAFTING),
    ("glue", "scoring the served tokens", PURPLE),
    ("grow", "growing branches", GREEN),
    ("rest", *_HOST),
    ("wait", *_WAITING),
)
_ORDER = [*METHODS, "SSD tree"]
_NAMED = {name for name, *_ in _DRAFT}
Bars = list[tuple[str, pd.Series]]


def latency(data: Data) -> Poster:
    """Stacked bars of a round's phases in ms: rank 0 of the target above the axis, the draft rank
    below."""
    shown = _whole(data.rows)
    what = {"what": "whole transformers, recordings of SmolLM2 and its draft", "vary": ("context",)}
    if not shown:
        what = {}
        wanted = plain(data.rows) & (data.rows["batch_size"] == 1) & data.rows["forward_s"].notna()
        for case in cases(data, wanted, ["method", "hit_law"]):
            title = f"{case.label}; inline: the draft has no {unit(case.rows)} of its own"
            shown.append((title, [*_bars(case)]))
    shown = [(title, bars) for title, bars in shown if len(bars) >= 3][:2]
    need(shown, "AR, SD and SSD rows with device_us and phases_us")
    heights = [len(bars) for _, bars in shown]
    poster = Poster(2.6 + 0.62 * sum(heights))
    grid = poster.panels(len(shown), 1, height_ratios=heights)[:, 0]
    for ax, (title, bars) in zip(grid, shown, strict=True):
        ax.set_title(title, loc="left")
        _panel(poster, ax, bars)
    grid[-1].set_xlabel("mean round, ms")
    text = caption(
        [pd.DataFrame([row for _, row in bars]) for _, bars in shown],
        "Thick bar: the lead; thin bar: the draft rank; means of all rounds. Thin line: p50 to p90",
        claims=False,
        **what,
    )
    return poster.finish("Where does a round's time go?", text)


def _whole(rows: pd.DataFrame) -> list[tuple[str, Bars]]:
    """Returns (title, bars) for each model pair of whole transformers, with a bar for each method
    at its best settings."""
    rows = used(rows[rows["forward_s"].notna()])
    shared = rows.groupby("setting")["use"].agg(set)
    ours = [name for name, uses in shared.items() if {"AR", "SD inline", "SSD"} <= uses]
    ours.sort(key=lambda name: int(name.partition("B")[0]))
    shown = {}
    for setting in ours[::-1]:  # Of several settings of a pair, the first one is kept.
        best = best_shapes(where(rows, setting=setting))
        rounds = {use: _median_row(best[use]) for use in sorted(best, key=_place)}
        bars = [(_shape(use, row), row) for use, row in rounds.items()]
        shown[setting.split()[0]] = f"{setting.replace(' ', '/1B ', 1)} GPUs", bars
    return [*shown.values()][::-1]


def _place(use: str) -> tuple[bool, int]:
    return ONE_FORWARD in use, _ORDER.index(use.removesuffix(ONE_FORWARD))


def _median_row(rows: pd.DataFrame) -> pd.Series:
    return rows.sort_values(["round_s", "run_id"]).iloc[(len(rows) - 1) // 2]


def _shape(use: str, row: pd.Series) -> str:
    """Returns a bar's label: the method `use` with its T, K and hit rate."""
    text = f"{use.replace(f' inline{ONE_FORWARD}', ONE_FORWARD)}, T={row['tp']}"
    text += f"+{row['num_drafts']}" * bool(row["num_drafts"])
    text += f", K={row['lookahead']}" * bool(row["lookahead"])
    return text + f", {row['hit_rate']:.0%} hits" * bool(row["hit_rate"] > 0)


def _bars(case: Case) -> Iterator[tuple[str, pd.Series]]:
    """Yields (name, the row of the median round) of each method at the commonest K and alpha.

    SSD has p_hit 0 and 1, and between them the commonest fan-out, or an imposed p_hit without one.
    """
    cells = case.rows.groupby(["alpha", "lookahead"]).agg(
        laws=("hit_law", "nunique"), methods=("method", "nunique"), n=("method", "size")
    )
    if cells.empty:
        return
    alpha, lookahead = cells.sort_values(["laws", "methods", "n"]).index[-1]
    here = case.only(alpha=alpha, lookahead=lookahead)
    ssd = here.method("SSD")
    drawn = ssd[ssd["p_hit"].isna()]
    between = ssd[ssd["p_hit"].gt(0) & ssd["p_hit"].lt(1)]
    if len(drawn):
        between = where(drawn, policy=drawn["policy"].value_counts().index[0])
    for name, rows in (
        ("AR", where(case.own_ar, batch_size=1)),
        (f"SD inline, K={lookahead}", here.method("SD inline")),
        (f"SD, K={lookahead}", here.method("SD")),
        ("SSD, p_hit=0", where(ssd, p_hit=0.0)),
        ("", between),
        ("SSD, p_hit=1", where(ssd, p_hit=1.0)),
    ):
        if len(rows):
            row = _median_row(rows)
            hits = f"{row['hit_rate']:.0%} hits" if len(drawn) else f"p_hit={row['p_hit']:g}"
            yield name or f"SSD, {hits}", row


def _panel(poster: Poster, ax: Axes, bars: Bars) -> None:
    longest = 0.0
    per = unit(pd.DataFrame([row for _, row in bars]))
    for place, (name, row) in enumerate(bars):
        seconds = row[[name for name, *_ in _LEAD]].astype(float)
        parts = {}
        if not row["num_drafts"]:  # Without a draft rank, rank 0's drafting time is shown as wait.
            parts = {"wait_s": _DRAFTING}
            apart = seconds["wait_s"] + seconds["other_s"]
            seconds["wait_s"] = min(apart, row["t_draft_s"]) if row["t_draft_s"] > 0 else 0.0
            seconds["other_s"] = apart - seconds["wait_s"]
        lead = [(*parts.get(key, of), seconds[key] * 1e3) for key, *of in _LEAD]
        _stack(poster, ax, f"{name}: lead", lead, place - 0.12, 0.46)
        phases = ((row["phases_us"] or {}).get("draft") or {}) if row["num_drafts"] else {}
        if phases:
            rest = sum(us for phase, us in phases.items() if phase not in _NAMED)
            phases = {"rest": rest, **phases}
            draft = [(*of, phases.get(key, 0.0) / 1e3) for key, *of in _DRAFT]
            _stack(poster, ax, f"{name}: draft", draft, place + 0.27, 0.2)
            end = sum(ms for *_, ms in draft)
            note(ax, f" draft's {per}", end, place + 0.27, dx=0, dy=0, va="center", fontsize=10)
        p50, p90 = (row["round_us"][name] / 1e3 for name in ("p50", "p90"))
        line = {"color": BLACK, "linewidth": 1.2, "markersize": 9, "zorder": 4}
        ax.plot([p50, p90], [place - 0.12] * 2, "-|", **line)
        text = f" {row['acceptance_length']:.2f} tokens a round: "
        text += f"{row['tok_per_s']:.0f} tok/s, {row['per_gpu']:.0f} a {per}"
        end = max(row["round_s"] * 1e3, p90) * 1.005
        longest = max(longest, end)
        note(ax, text, end, place - 0.12, dx=0, dy=0, va="center", fontsize=11.5, color=BLACK)
    ax.set_yticks(range(len(bars)), [name for name, _ in bars])
    ax.set_ylim(len(bars) - 0.5, -0.5)
    ax.set_xlim(0, 1.95 * longest)
    ax.grid(axis="y", visible=False)


def _stack(
    poster: Poster, ax: Axes, name: str, parts: list[tuple[str, str, float]], y: float, h: float
) -> None:
    """Draws (label, colour, ms) of each part as one bar of height h at y."""
    left = 0.0
    style = {"edgecolor": "white", "linewidth": 0.6, "zorder": 3}
    for label, color, width in parts:
        ax.barh(y, width, h, left, color=color, label=label, **style)
        poster.keep(ax, name, part=label, ms=width)
        left += width
