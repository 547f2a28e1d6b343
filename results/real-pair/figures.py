#!/usr/bin/env python3
"""Draws the pair's laws and its drafts without a model: results/real-pair/figures.py FOLDER TO.

FOLDER holds NAME.laws.json (decide.py) and lookup.jsonl (lookup.py); TO gets laws.png, lookup.png.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from analysis.style import BLUE, GREEN, MARKERS, RED, SERIES, Poster  # noqa: E402
from mpissd.common.output import read_rows  # noqa: E402

LOOKAHEAD = 4
TITLES = {
    "smollm2-humaneval": "HumanEval",
    "smollm2-chat": "chat",
    "smollm2-edit": "editing code",
    "smollm2-summarise": "summarising",
}
DRAFTS = {"draft model": (RED, "^"), "prompt": (BLUE, "s"), "suffix": (GREEN, "o")}


def laws(folder: Path) -> Poster:
    """x = F, y = miss rate, by prompts: measured with intervals, and the fitted law."""
    poster = Poster(7.2)
    grid = poster.panels(1, 2, sharey=True)[0]
    titles = ("bonus behind a rejection", f"bonus behind {LOOKAHEAD} accepted tokens")
    for ax, end, title in zip(grid, ("rejected", "complete"), titles, strict=True):
        ax.set_title(title)
        for n, (name, label) in enumerate(TITLES.items()):
            path = folder / f"{name}.laws.json"
            if path.exists():
                look = {"color": SERIES[n], "marker": MARKERS[n]}
                _law(poster, ax, label, json.loads(path.read_text()), end, look)
        ax.set(xscale="log", yscale="log", xlabel="candidates kept, F")
        ax.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        ax.set_yticks([0.03, 0.1, 0.3, 1], ["3%", "10%", "30%", "100%"])
        ax.minorticks_off()
    grid[0].set_ylabel("miss rate")
    text = (
        "SmolLM2-135M-Instruct and the draft shipped with mpissd, temperature 0, K = 4. Points: "
        "replayed recordings, with 95% intervals over resampled prompts. Lines: floor + A·F^−r, "
        "fitted to the tokens that the draft knows. Dotted: the floor, the share of tokens outside "
        "the draft's vocabulary, which no F reaches."
    )
    return poster.finish("How often the bonus is not among the candidates", text)


def _law(
    poster: Poster, ax: Any, label: str, document: Any, end: str, look: dict[str, Any]
) -> None:
    at = next(one for one in document["laws"] if one["lookahead"] == LOOKAHEAD)[end]
    points = {int(f): one for f, one in at["misses"].items()}
    low, high = ([one["miss_95"][n] for one in points.values()] for n in (0, 1))
    values = [one["miss"] for one in points.values()]
    poster.line(ax, label, points, values, low=low, high=high, linestyle="none", **look)
    if at["fit"] is not None:
        ax.plot(list(points), [one["law"] for one in points.values()], color=look["color"], lw=1.6)
        if at["fit"]["floor"] > 0:
            ax.axhline(at["fit"]["floor"], color=look["color"], linestyle=":", lw=1.4)


def lookup(folder: Path) -> Poster:
    """x = K, y = tokens a round, by prompts and draft."""
    rows = read_rows(folder / "lookup.jsonl")
    names = [n for n in TITLES if any(r["recording"] == f"{n}.npz" for r in rows)]
    poster = Poster(6.6)
    grid = poster.panels(1, len(names), sharey=True)[0]
    for ax, name in zip(grid, names, strict=True):
        own = [r for r in rows if r["recording"] == f"{name}.npz"]
        share = own[0]["repeats_prompt"]
        ax.set_title(f"{TITLES[name]}\n({share:.0%} is in the prompt)")
        for draft, (color, marker) in DRAFTS.items():
            line = [r for r in own if r["draft"] == draft]
            x, y, low, high = (
                [r[key] for r in line] for key in ("lookahead", "tokens_a_round", "low", "high")
            )
            label = draft if draft == "draft model" else f"{draft} lookup, no model"
            poster.line(ax, label, x, y, low=low, high=high, color=color, marker=marker)
        ax.set_xlabel("K, drafted tokens a round")
    grid[0].set_ylabel("tokens a round")
    text = (
        "SmolLM2-135M-Instruct at temperature 0; answers have at most 128 tokens. Bars: 95% "
        "intervals over prompts. In brackets: the share of an answer's three-token "
        "runs\u00a0which\u00a0its\u00a0own prompt contains. A small model repeats itself, too, and "
        "lookups find that: expect less of them with a large one."
    )
    return poster.finish("Drafts without a model, beside the pair's own draft", text)


def main() -> int:
    """Draws both."""
    folder, to = map(Path, sys.argv[1:3])
    to.mkdir(parents=True, exist_ok=True)
    for name, poster in (("laws", laws(folder)), ("lookup", lookup(folder))):
        poster.savefig(to / f"{name}.png", metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
