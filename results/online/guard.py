#!/usr/bin/env python3
"""Simulates the guard's rule: what it lets through, with and without something to learn.

    results/online/guard.py h200.jsonl [--streams=2000]

A stream offers a version eight times, as in `h200.jsonl`. Each is judged on so many held-out
sequences of 40 to 128 positions, of which a share of .058 changes between two versions (so that
666 sequences have the standard error of .001 that was estimated for these rows); how much more
often it is right is what was measured on 666 sequences, or 0, or a fall. Held-out sequences are
drawn anew for each offer, where a learner's are the last ones. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mpissd.online.judging import gap_of, paired, share_of  # noqa: E402

CHANGED = 0.058
OFFERS = 8
RULES = [(held, errors) for held in (32, 64) for errors in (1.0, 1.5, 2.0)]
FALL = 0.004  # of agreement, what a pass of offline lost on chat; most of it at first


def judged(draws: np.random.Generator, gain: float, held: int) -> tuple[float, float]:
    """Returns the gain that held-out sequences show of a true one, and its standard error."""
    sizes = draws.integers(40, 129, held)
    up, down = (draws.binomial(sizes, (CHANGED + sign * gain) / 2) for sign in (1, -1))
    before = np.stack([0.8 * sizes, sizes], 1)
    return paired(before + np.stack([up - down, 0 * sizes], 1), before)


def followed(
    draws: np.random.Generator, offered: Sequence[float], held: int, errors: float
) -> tuple[list[float], int]:
    """Returns what is in use behind each offer, and how many were published.

    offered: agreement of the weights at each offer, less that of the static draft.
    """
    in_use, published = [0.0], 0
    for value in offered:
        gain, error = judged(draws, value - in_use[-1], held)
        passes = gain > errors * error
        in_use.append(value if passes else in_use[-1])
        published += passes
    return in_use[1:], published


def line(points: list[dict[str, object]], held: int, errors: float, streams: int) -> str:
    """Returns a rule's line of the table."""
    draws = np.random.default_rng(0)
    cells = [f"{held}", f"{errors:g}"]
    for stage in ("text", "edits"):
        own: list = [point for point in points if point["stage"] == stage]
        gap = gap_of(own)
        assert gap is not None, stage
        path = [p["trained"]["agreement"] - gap[0] for p in own if p["schedule"] == "online"]
        ends = [followed(draws, path[:OFFERS], held, errors)[0] for _ in range(streams)]
        half = np.mean([values[-1] > (gap[1] - gap[0]) / 2 for values in ends])
        early = np.mean([values[3] > (gap[1] - gap[0]) / 2 for values in ends])
        end = float(np.mean([values[-1] for values in ends]))
        cells.append(f"{share_of(gap[0] + end, gap):.2f}, {early:.2f} · {half:.2f}")
    for path in ([0.0] * OFFERS, [-FALL * (n / OFFERS) ** 0.5 for n in range(1, OFFERS + 1)]):
        found = [followed(draws, path, held, errors) for _ in range(streams)]
        some = np.mean([published > 0 for _, published in found])
        cells.append(f"{np.mean([published for _, published in found]) / OFFERS:.3f}, {some:.2f}")
    cells.append(f"{np.mean([values[-1] for values, _ in found]):.4f}")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("curves", type=Path)
    parser.add_argument("--streams", type=int, default=2000)
    given = parser.parse_args()
    points = [json.loads(text) for text in given.curves.read_text().splitlines()]
    print("| held | errors | text: of the gap; half by 1,000 · 2,000 | edits | no gain: an offer, "
          "a stream | a slow fall | agreement there |")  # fmt: skip
    print("|---" * 7 + "|")
    for held, errors in RULES:
        print(line(points, held, errors, given.streams), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
