#!/usr/bin/env python3
"""Draws acceptance over tokens seen: results/online/figure.py CURVES.jsonl TO/online.png."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from analysis.style import BLUE, GREEN, ORANGE, PURPLE, RED, Poster  # noqa: E402
from mpissd.common.output import read_rows  # noqa: E402

LINES = {
    ("all", 3e-5): (GREEN, "o"),
    ("all", 1e-4): (BLUE, "s"),
    ("rejected", 3e-5): (ORANGE, "^"),
    ("rejected", 1e-4): (PURPLE, "v"),
}


def figure(points: list[dict[str, Any]]) -> Poster:
    """x = tokens seen of a stage, y = greedy agreement and tokens a round, on held-out prompts."""
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
        "Offline: the same prompts several times, its highest point. Weights as trained."
    )
    return poster.finish("A draft that learns a shift while it answers it", text)


def _panel(poster: Poster, ax: Any, points: list[dict[str, Any]], key: str) -> None:
    static = next(point for point in points if point["schedule"] == "static")
    online = [point for point in points if point["schedule"] == "online"]
    for (source, rate), (color, marker) in LINES.items():
        mine = [
            p for p in online if (p["about"]["learn_from"], p["about"]["rate"]) == (source, rate)
        ]
        if mine:
            x, y = [0, *(p["tokens"] for p in mine)], [static[key], *(p[key] for p in mine)]
            label = f"online, {source} positions, rate {rate:g}"
            poster.line(ax, label, x, y, color=color, marker=marker)
    span = [0, max(point["tokens"] for point in points)]
    best = max((p[key] for p in points if p["schedule"] == "offline"), default=None)
    for label, value, color in (("static", static[key], "black"), ("offline", best, RED)):
        if value is not None:
            poster.line(ax, label, span, [value] * 2, color=color, marker="", linestyle="--")


def main(file: str, to: str) -> int:
    """Writes the figure; returns 0."""
    points = [p for p in read_rows(Path(file)) if p.get("weights") != "as stored"]
    figure(points).savefig(Path(to), metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
