#!/usr/bin/env python3
"""Tokens a round of a recording by how far its answers are: results/recordings/longer.py FILE OUT

FILE: a recording (smollm2-chat-350.npz). OUT/longer.jsonl: a line for each K and range of
the answer, `from` ≤ tokens before the round < `to` (null: the end), with 95% intervals over 1000
resamples of whole prompts. `prompts` counts the answers that reach the range; `repeats` is the
share of its runs of three tokens that the same answer had before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from mpissd.common.output import append_row  # noqa: E402
from mpissd.engine.workload.replay.recording import Recording, load  # noqa: E402
from mpissd.lab.laws.outcomes import of_recording  # noqa: E402

LOOKAHEADS = (4, 7)
RANGES = ((0, None), (0, 128), (128, 256), (256, None))
RESAMPLES = 1000


def rows(recording: Recording) -> Iterator[dict[str, Any]]:
    """Yields tokens a round at each K, of whole answers and of their parts."""
    count = len(recording.sequences)
    starts = np.array([len(part.prompt) for part in recording.sequences])
    for lookahead in LOOKAHEADS:
        of = of_recording(recording, lookahead)
        before = of.position - starts[of.sequence]
        for low, high in RANGES:
            inside = (before >= low) & (before < (np.inf if high is None else high))
            rounds = np.bincount(of.sequence[inside], minlength=count)
            emitted = rounds + np.bincount(
                of.sequence[inside], weights=of.accepted[inside], minlength=count
            )
            yield {
                "recording": recording.name,
                "sha256": recording.sha256,
                "lookahead": lookahead,
                "from": low,
                "to": high,
                "prompts": int((rounds > 0).sum()),
                "rounds": int(rounds.sum()),
                "repeats": repeats(recording, low, high),
                "tokens_a_round": float(emitted.sum() / rounds.sum()),
                "tokens_a_round_95": interval(emitted, rounds),
            }


def repeats(recording: Recording, low: int, high: int | None) -> float:
    """Returns the share of three-token runs, ending in the range, that their answer had before."""
    found = total = 0
    for part in recording.sequences:
        answer, seen = part.tokens[: part.end].tolist(), set()
        for n in range(3, len(answer) + 1):
            run = tuple(answer[n - 3 : n])
            if n > low and (high is None or n <= high):
                found, total = found + (run in seen), total + 1
            seen.add(run)
    return found / total


def interval(emitted: Any, rounds: Any) -> list[float]:
    """Returns the 95% interval of a ratio of sums over prompts [n], n drawn with replacement."""
    rng = np.random.default_rng(17)
    picks = rng.integers(0, len(rounds), (RESAMPLES, len(rounds)))
    ratios = emitted[picks].sum(axis=1) / rounds[picks].sum(axis=1)
    return [float(bound) for bound in np.percentile(ratios, [2.5, 97.5])]


def main() -> int:
    """Writes the file anew."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    path = Path(sys.argv[2], "longer.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    for row in rows(load(sys.argv[1])):
        append_row(path, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
