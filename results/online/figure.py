#!/usr/bin/env python3
"""Draws acceptance over tokens seen, a stage of the stream after another.

results/online/figure.py CURVES.jsonl TO.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from analysis.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Poster  # noqa: E402
from mpissd.common.output import read_rows  # noqa: E402

Point = dict[str, Any]
Key = tuple[str, float, float, str]
IN_USE = "the version in use"
# (positions learned from, rate, times that each prompt is learned from, weights): colour, marker.
LINES: dict[Key, tuple[str, str]] = {
    ("all", 1e-4, 4, IN_USE): (GREEN, "o"),
    ("all", 3e-5, 4, IN_USE): (BLUE, "s"),
    ("all", 1e-4, 16, IN_USE): (GREY, "v"),
    ("rejected", 1e-4, 4, IN_USE): (ORANGE, "^"),
    ("all", 3e-5, 4, "as trained"): (GREEN, "o"),
    ("all", 1e-4, 4, "as trained"): (BLUE, "s"),
    ("all", 3e-5, 4, "int8 dithered"): (PURPLE, "D"),
    ("all", 3e-5, 4, "int8 to nearest"): (GREY, "v"),
    ("rejected", 3e-5, 4, "as trained"): (ORANGE, "^"),
}
PANELS = (
    ("agreement", "greedy agreement"),
    ("tokens_per_round_4", "tokens a round, K = 4"),
    ("tokens_per_round_7", "tokens a round, K = 7"),
)


def _key(point: Point) -> Key:
    about = point["about"]
    weights = {"as stored": "dithered"}.get(point["weights"], point["weights"])
    weights = about.get("rounding", weights)
    weights = {"dithered": "int8 dithered", "nearest": "int8 to nearest"}.get(weights, weights)
    times = about["batch"] * about["steps_a_prompt"]
    weights = IN_USE if "trained" in point else weights
    return about["learn_from"], about["rate"], times, weights


def _label(name: Key) -> str:
    learned, rate, times, weights = name
    positions = "rejected positions, " if learned == "rejected" else ""
    often = "" if times == 4 else f" {times:g} times each,"
    return f"online, {positions}rate {rate:.0e},{often} {weights}".replace("e-0", "e-")


def figure(points: list[Point]) -> Poster:
    """x = tokens seen of the stream, y = greedy agreement and tokens a round on held-out prompts of
    the stage."""
    points = [point for point in points if not point["about"]["seed"]]
    stages = {point["stage"]: point for point in points if point["schedule"] == "static"}
    poster = Poster(6.6)
    axes = poster.panels(1, len(PANELS))[0]
    for ax, (key, name) in zip(axes, PANELS, strict=True):
        begins = 0.0
        ax.set_label(name)
        for stage in stages:
            own = [point for point in points if point["stage"] == stage]
            begins = _stage(poster, ax, own, key, begins)
        ax.set(xlabel="answer tokens seen, thousands", ylabel=name)
    held = ", ".join(
        f"{static['held_out']} of stage {stage!r} ({static['positions']:,} tokens)"
        for stage, static in stages.items()
    )
    text = (
        "SmolLM2-135M-Instruct and the shipped draft, temperature 0. Held-out prompts: "
        f"{held}. Online: each prompt once, stage after stage. Offline: from the shipped draft, "
        f"a stage's prompts several times, its highest point. {_how(points)}"
    )
    return poster.finish("A draft that learns a shift while it answers it", text)


def _how(points: list[Point]) -> str:
    if any("trained" in point for point in points):
        return "Refused, as trained: not ahead of the version in use by the guard's own 32."
    return "Online from all positions or from rejected ones alone; int8: as a CPU computes."


def _stage(poster: Poster, ax: Any, points: list[Point], key: str, begins: float) -> float:
    """Draws a stage from `begins` on; returns where it ends, thousands of tokens."""
    (static, *_) = (point for point in points if point["schedule"] == "static")
    ends = begins + max(point["tokens"] for point in points) / 1e3
    best = max((p[key] for p in points if p["schedule"] == "offline"), default=None)
    levels = [("static", static[key], "black", "--")]
    if best is not None:
        half = (static[key] + best) / 2
        levels += [("offline", best, RED, "--"), ("half of the gap", half, GREY, ":")]
    for label, value, color, style in levels:
        poster.line(ax, label, [begins, ends], [value] * 2, color=color, marker="", linestyle=style)
    online = [point for point in points if point["schedule"] == "online"]
    for name in sorted({*map(_key, online)}, key=[*LINES].index):
        mine = [point for point in online if _key(point) == name]
        # Behind an earlier stage the draft is no longer the static one.
        _line(poster, ax, mine if begins else [static, *mine], name, key, begins)
        _refused(poster, ax, [p for p in mine if key in (p.get("trained") or ())], name, begins)
    if begins:
        ax.axvline(begins, color=GREY, linewidth=1.2, linestyle=":")
    ax.text((begins + ends) / 2, 1.01, static["stage"], transform=ax.get_xaxis_transform(),
            ha="center", fontsize=13)  # fmt: skip
    return ends


def _line(
    poster: Poster,
    ax: Any,
    points: list[Point],
    name: Key,
    key: str,
    begins: float,
) -> None:
    color, marker = LINES[name]
    x, y = [begins + point["tokens"] / 1e3 for point in points], [p[key] for p in points]
    drawn = "steps-post" if name[-1] == IN_USE else "default"  # in use until the next one
    poster.line(ax, _label(name), x, y, color=color, marker=marker, drawstyle=drawn)


def _refused(poster: Poster, ax: Any, points: list[Point], name: Key, begins: float) -> None:
    """Marks a run's weights as trained that were not published; they have no tokens a round."""
    if mine := [point for point in points if point["published"] is False]:
        x = [begins + point["tokens"] / 1e3 for point in mine]
        y = [point["trained"]["agreement"] for point in mine]
        style = {"marker": "x", "linestyle": "", "markeredgewidth": 2.4, "zorder": 4}
        label = f"refused: {_label((*name[:-1], 'as trained'))}"
        poster.line(ax, label, x, y, color=LINES[name][0], **style)


def main(file: str, to: str) -> int:
    """Writes the figure; returns 0."""
    figure(read_rows(Path(file))).savefig(Path(to), metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
