#!/usr/bin/env python3
"""Draws acceptance over tokens seen: results/online/figure.py CURVES.jsonl TO/online.png."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from analysis.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Poster  # noqa: E402
from mpissd.common.output import read_rows  # noqa: E402

# (positions learned from, rate, weights): label, colour and marker.
LINES = {
    ("all", 3e-5, "as trained"): ("rate 3e-5, as trained", GREEN, "o"),
    ("all", 1e-4, "as trained"): ("rate 1e-4, as trained", BLUE, "s"),
    ("all", 3e-5, "dithered"): ("rate 3e-5, int8 dithered", PURPLE, "D"),
    ("all", 3e-5, "nearest"): ("rate 3e-5, int8 to nearest", GREY, "v"),
    ("rejected", 3e-5, "as trained"): ("rejected positions alone", ORANGE, "^"),
}


def _key(point: dict[str, Any]) -> tuple[str, float, str]:
    about = point["about"]
    weights = {"as stored": "dithered"}.get(point["weights"], point["weights"])
    return about["learn_from"], about["rate"], about.get("rounding", weights)


def figure(points: list[dict[str, Any]]) -> Poster:
    """x = tokens seen of a stage, y = greedy agreement and tokens a round, on held-out prompts."""
    points = [point for point in points if not point["about"]["seed"]]
    poster = Poster(7.2)
    axes = poster.panels(1, 2)[0]
    for ax, key, name in zip(
        axes,
        ("agreement", "tokens_per_round_4"),
        ("greedy agreement", "tokens a round, K = 4"),
        strict=True,
    ):
        _panel(poster, ax, points, key)
        ax.set(xlabel="answer tokens of the shift that were seen", ylabel=name)
    static = next(point for point in points if point["schedule"] == "static")
    where = f"{static['held_out']} held-out prompts of stage {static['stage']!r}"
    text = (
        f"SmolLM2-135M-Instruct and the shipped draft, temperature 0; {where} "
        f"({static['positions']} tokens). Online: each prompt once, from all positions or "
        "from those where a draft was rejected. "
        "Offline: the same prompts several times, its highest point. int8: as a CPU computes."
    )
    return poster.finish("A draft that learns a shift while it answers it", text)


def _panel(poster: Poster, ax: Any, points: list[dict[str, Any]], key: str) -> None:
    static = next(point for point in points if point["schedule"] == "static")
    online = [point for point in points if point["schedule"] == "online"]
    for name, (label, color, marker) in LINES.items():
        mine = [p for p in online if _key(p) == name]
        if mine:
            x, y = [0, *(p["tokens"] for p in mine)], [static[key], *(p[key] for p in mine)]
            poster.line(ax, f"online, {label}", x, y, color=color, marker=marker)
    span = [0, max(point["tokens"] for point in points)]
    best = max((p[key] for p in points if p["schedule"] == "offline"), default=None)
    for label, value, color in (("static", static[key], "black"), ("offline", best, RED)):
        if value is not None:
            poster.line(ax, label, span, [value] * 2, color=color, marker="", linestyle="--")


def main(file: str, to: str) -> int:
    """Writes the figure; returns 0."""
    figure(read_rows(Path(file))).savefig(Path(to), metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
