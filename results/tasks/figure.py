#!/usr/bin/env python3
"""Draws what drafts by task gain over one draft: results/tasks/figure.py h200.jsonl TO.png."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from analysis.style import BLUE, GREEN, GREY, ORANGE, PURPLE, Poster  # noqa: E402
from mpissd.common.output import read_rows  # noqa: E402

Row = dict[str, Any]
KINDS = {
    "chat": "chat",
    "humaneval": "HumanEval",
    "edit": "editing\ncode",
    "summarise": "summa-\nrising",
}
SHIPPED = "smollm2_draft"
DRAFTS = {
    "chat": ("draft of chat", BLUE, "s"),
    "code": ("draft of code", GREEN, "o"),
    "text": ("draft of text", ORANGE, "^"),
    "any": ("for everything, trained further", GREY, "v"),
    "drafts": ("by the router", PURPLE, "x"),
}
PANELS = (("acceptance_length", "tokens a round"), ("tok_per_s", "tok/s"))


def by_kind(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Returns the rows by kind of prompts and draft."""
    found: dict[str, dict[str, Row]] = {kind: {} for kind in KINDS}
    for row in rows:
        kind = Path(row["provenance"]["sweep"]["flags"]["prompts"]).stem
        found[kind][Path(row["draft"]).name] = row
    return found


def figure(rows: list[Row]) -> Poster:
    """x = kind of prompts, y = tokens a round and tok/s over those of the shipped draft."""
    found = by_kind(rows)
    poster = Poster(6.6)
    for ax, (key, name) in zip(poster.panels(1, len(PANELS))[0], PANELS, strict=True):
        for draft, (label, color, marker) in DRAFTS.items():
            gains = [own[draft][key] / own[SHIPPED][key] - 1 for own in found.values()]
            style = {"marker": marker, "linestyle": "", "markeredgewidth": 2.4}
            poster.line(
                ax, label, range(len(gains)), [100 * g for g in gains], color=color, **style
            )
        ax.axhline(0, color="black", linewidth=1.2)
        ax.set(ylabel=f"{name}, % over the shipped draft", title=name)
        ax.set_xticks(range(len(KINDS)), list(KINDS.values()))
        ax.margins(x=0.15)
    text = (
        "SmolLM2-135M-Instruct, SD inline, K = 4, four sequences at once, 40 prompts of 128 tokens "
        "a kind on one H200; one seed, no speedup claimed. All but the shipped draft were trained "
        "for 40 s from it. The router takes the task's own draft for each prompt; its rounds are "
        "not chained on the device."
    )
    return poster.finish("Drafts by task over the one draft that ships", text)


def main(file: str, to: str) -> int:
    """Writes the figure; returns 0."""
    figure(read_rows(Path(file))).savefig(Path(to), metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
