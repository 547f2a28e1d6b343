#!/usr/bin/env python3
"""Prints tokens a round of every draft on every kind of prompts, and what a wrong choice costs.

    results/tasks/table.py DRAFTS        the folder of the draft for everything, with those of tasks

It reads each draft's report.json, which distill wrote: the greedy answers to people's prompts. The
last lines say what a perfect choice gains over the draft for everything, and the worst one loses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_TOKENS = "tokens_per_round"


def reports(folder: Path) -> dict[str, dict[str, float]]:
    """Returns tokens a round at K = 4 by draft and file of prompts; "any" is the folder's own."""
    found = {}
    for path in sorted([folder / "report.json", *folder.glob("*/report.json")]):
        name = "any" if path.parent == folder else path.parent.name
        told = json.loads(path.read_text())["evaluation"]
        found[name] = {
            kind: one["by_lookahead"]["4"]["tokens_per_round"] for kind, one in told.items()
        }
    return found


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    kinds = [kind for kind in found["any"] if all(kind in told for told in found.values())]
    lines = [f"| draft | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name, told in found.items():
        lines.append(f"| {name} | " + " | ".join(f"{told[kind]:.3f}" for kind in kinds) + " |")
    for what, choose in (("best over any", max), ("worst over any", min)):
        ratios = [
            choose(told[kind] for told in found.values()) / found["any"][kind] for kind in kinds
        ]
        lines.append(f"| {what} | " + " | ".join(f"{ratio - 1:+.1%}" for ratio in ratios) + " |")
    return lines


def main() -> int:
    """Prints the table."""
    print("\n".join(table(reports(Path(sys.argv[1])))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
