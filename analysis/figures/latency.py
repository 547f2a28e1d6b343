"""The parts of a round: each method's mean round by phase, for lead and draft."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import caption, need
from analysis.load import Data
from analysis.select import Case, cases, plain
from analysis.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, Poster

_LEAD = (
    ("forward_s", "target forward", BLUE),
    ("all_reduce_s", "its all-reduces", SKY),
    ("wait_s", "waiting for the draft, link included", ORANGE),
    ("other_s", "host work", GREY),
)
_DRAFT = (
    ("speculate", "drafting a miss, or finishing a hit", ORANGE),
    ("glue", "glue forward", PURPLE),
    ("grow", "growing branches", GREEN),
    ("rest", "host work", GREY),
    ("wait", "idle", "#eeeeee"),
)
_ORDER = ("AR", "SD inline", "SD", "SSD")


def latency(data: Data) -> Poster:
    """Stacked bars in ms: the lead's round above the axis, the draft rank's phases below it."""
    wanted = plain(data.rows) & (data.rows["batch_size"] == 1) & data.rows["forward_s"].notna()
    shown = [(case, _bars(case)) for case in cases(data, wanted, ["method", "hit_law"])]
    shown = [(case, bars) for case, bars in shown if len(bars) >= 3]
    shown = shown[:2]
    need(shown, "AR, SD and SSD rows with device_us and phases_us")
    poster = Poster(2.6 + 0.62 * sum(len(bars) for _, bars in shown))
    heights = [len(bars) for _, bars in shown]
    grid = poster.panels(len(shown), 1, height_ratios=heights)[:, 0]
    for ax, (case, bars) in zip(grid, shown, strict=True):
        _panel(poster, ax, case, bars)
    grid[-1].set_xlabel("mean round, ms")
    used = [pd.DataFrame([row for _, row in bars]) for _, bars in shown]
    text = caption(
        data,
        used,
        "Thick bar: the lead's round. Thin bar: the draft rank's, in the same time. Bars: "
        "means of all rounds; thin lines: p50 to p90 of them. In GPU graphs all-reduces are timed "
        "alone and taken off the forward",
    )
    return poster.finish("Where a round goes", text)


def _bars(case: Case) -> list[tuple[str, pd.Series]]:
    """Returns one row a method at the commonest K and alpha; SSD with up to three hit laws."""
    rows = case.rows[(case.rows["batch_size"] == 1) & case.rows["forward_s"].notna()]
    cells = rows.groupby(["alpha", "lookahead"]).agg(
        laws=("hit_law", "nunique"), methods=("method", "nunique"), n=("method", "size")
    )
    if cells.empty:
        return []
    alpha, lookahead = cells.sort_values(["laws", "methods", "n"]).index[-1]
    here = rows[(rows["alpha"] == alpha) & (rows["lookahead"] == lookahead)]
    bars = []
    ar = case.ar[(case.ar["gpus"] == case.tp) & (case.ar["batch_size"] == 1)]
    for method in _ORDER:
        group = ar if method == "AR" else here[here["method"] == method]
        if method == "SSD":
            bars += _ssd(group)
        elif len(group):
            bars.append(
                (f"{method}" if method == "AR" else f"{method}, K={lookahead}", _middle(group))
            )
    return bars


def _ssd(rows: pd.DataFrame) -> list[tuple[str, pd.Series]]:
    """Returns p_hit 0, a power law or a p_hit in between, and p_hit 1; of equals the middle one."""
    bars = []
    imposed = rows[rows["p_hit"].notna()]
    power = rows[rows["p_hit"].isna()]
    for value in (0.0, 1.0):
        group = imposed[imposed["p_hit"] == value]
        if len(group):
            bars.append((f"SSD, p_hit={value:g}", _middle(group)))
    if len(power):
        law = power["policy"].value_counts().index[0]
        row = _middle(power[power["policy"] == law])
        bars.insert(1 if bars else 0, (f"SSD, {row['hit_rate']:.0%} hits", row))
    elif len(imposed):
        group = imposed[~imposed["p_hit"].isin([0.0, 1.0])]
        if len(group):
            row = _middle(group)
            bars.insert(1, (f"SSD, p_hit={row['p_hit']:g}", row))
    return bars


def _middle(rows: pd.DataFrame) -> pd.Series:
    """Returns the row with the median round."""
    return rows.sort_values(["round_s", "run_id"]).iloc[(len(rows) - 1) // 2]


def _panel(poster: Poster, ax: Axes, case: Case, bars: list[tuple[str, pd.Series]]) -> None:
    ax.set_title(f"{case.label}; the draft has a GPU of its own unless inline", loc="left")
    for place, (name, row) in enumerate(bars):
        parts = [(label, row[key] * 1e3, color) for key, label, color in _LEAD]
        _stack(poster, ax, f"{name}: lead", parts, place - 0.12, 0.46)
        phases = ((row["phases_us"] or {}).get("draft") or {}) if row["num_drafts"] else {}
        if phases:
            _stack(poster, ax, f"{name}: draft", _drafting(phases), place + 0.27, 0.2)
        p50, p90 = (row["round_us"][name] / 1e3 for name in ("p50", "p90"))
        ax.plot(
            [p50, p90], [place - 0.12] * 2, "-|", color=BLACK, linewidth=1.2, markersize=9, zorder=4
        )
        tokens = row["acceptance_length"]
        text = f" {row['round_s'] * 1e3:.2f} ms, {tokens:.2f} tokens: {row['tok_per_s']:.0f} tok/s"
        text += f", {row['per_gpu']:.0f} a GPU"
        ax.annotate(
            text, (max(row["round_s"] * 1e3, p90) * 1.005, place - 0.12), va="center", fontsize=11.5
        )
    ax.set_yticks(range(len(bars)), [name for name, _ in bars])
    ax.set_ylim(len(bars) - 0.5, -0.5)
    ax.set_xlim(0, 1.45 * max(row["round_s"] for _, row in bars) * 1e3)
    ax.grid(axis="y", visible=False)


def _drafting(phases: dict[str, float]) -> list[tuple[str, float, str]]:
    """Returns the draft's phases in ms; phases that are not named are summed as the rest."""
    named = {name for name, _, _ in _DRAFT}
    rest = sum(value for name, value in phases.items() if name not in named)
    values = {**phases, "rest": rest}
    return [(label, values.get(name, 0.0) / 1e3, color) for name, label, color in _DRAFT]


def _stack(
    poster: Poster, ax: Axes, name: str, parts: list[tuple[str, float, str]], y: float, h: float
) -> None:
    left = 0.0
    for label, width, color in parts:
        ax.barh(
            y, width, h, left, color=color, label=label, edgecolor="white", linewidth=0.6, zorder=3
        )
        poster.keep(ax, name, part=label, ms=width)
        left += width
