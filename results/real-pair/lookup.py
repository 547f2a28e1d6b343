#!/usr/bin/env python3
"""Drafts without a model, on text that repeats its prompt and on text that does not.

    results/real-pair/lookup.py OUT [--recordings=FILE,…]

OUT/lookup.jsonl: tokens a round by K, recording and draft (the recorded one, prompt lookup, suffix
automaton), with 95% intervals over resampled prompts. OUT/cost.jsonl: what a round costs the host,
best of seven, behind contexts of several lengths.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from mpissd.common.output import append_row  # noqa: E402
from mpissd.engine.spec.lookup import LOOKUPS, make_lookup  # noqa: E402
from mpissd.engine.workload.replay.recording import Ids, Recorded, Recording, load  # noqa: E402
from mpissd.engine.workload.replay.stream import copied  # noqa: E402
from mpissd.lab.laws.outcomes import accepted_runs  # noqa: E402

NAMES = ("humaneval", "chat", "edit", "summarise")
LOOKAHEADS = (1, 2, 3, 4, 6, 8)
CONTEXTS = (256, 1024, 4096, 16384)
RESAMPLES, REPEATS, ROUNDS, STEP = 1000, 7, 200, 3


def rounds_of(part: Recorded, drafts: Ids, lookahead: int) -> tuple[int, int]:
    """Returns (rounds, accepted tokens) of one answer."""
    runs, c, rounds = accepted_runs(part, drafts[:, :lookahead]), 0, 0
    while c < part.end:
        c += int(runs[c]) + 1
        rounds += 1
    return rounds, c - rounds


def tokens(recording: Recording) -> Iterator[dict[str, Any]]:
    """Yields tokens a round of every draft and K."""
    rng, parts = np.random.default_rng(17), recording.sequences
    longest = min(max(LOOKAHEADS), recording.lookahead)
    drafts = {"draft model": [part.rollout for part in parts]}
    for kind in LOOKUPS:
        drafts[kind] = [copied(recording, n, longest, kind) for n in range(len(parts))]
    for name, each in drafts.items():
        for k in (k for k in LOOKAHEADS if k <= longest):
            counts = np.array([rounds_of(*pair, k) for pair in zip(parts, each, strict=True)])
            again = counts[rng.integers(0, len(counts), (RESAMPLES, len(counts)))].sum(axis=1)
            low, high = np.percentile(1 + again[:, 1] / again[:, 0], [2.5, 97.5])
            rounds, accepted = counts.sum(axis=0)
            yield {
                "recording": recording.name,
                "draft": name,
                "lookahead": k,
                "tokens_a_round": 1 + accepted / rounds,
                "low": low,
                "high": high,
                "repeats_prompt": repeats(recording),
            }


def repeats(recording: Recording) -> float:
    """Returns the share of the answers' three-token runs that their prompts hold."""
    found = total = 0
    for part in recording.sequences:
        prompt, answer = part.prompt.tolist(), part.tokens[: part.end].tolist()
        held = {tuple(prompt[n : n + 3]) for n in range(len(prompt) - 2)}
        runs = [tuple(answer[n : n + 3]) for n in range(len(answer) - 2)]
        found, total = found + sum(run in held for run in runs), total + len(runs)
    return found / total


def costs(recording: Recording) -> Iterator[dict[str, Any]]:
    """Yields the seconds of a round: reading its tokens, and drafting eight."""
    text = [
        t for part in recording.sequences for t in (*part.prompt.tolist(), *part.tokens.tolist())
    ]
    for kind in LOOKUPS:
        for context in CONTEXTS:
            if context + STEP * ROUNDS > len(text):
                continue
            times = []
            for _ in range(REPEATS):
                lookup = make_lookup(kind)
                lookup.follow(text[:context])
                start = perf_counter()
                for n in range(ROUNDS):
                    for token in text[context + STEP * n : context + STEP * (n + 1)]:
                        lookup.add(token)
                    lookup.drafted(8)
                times.append((perf_counter() - start) / ROUNDS)
            yield {"lookup": kind, "context": context, "round_us": min(times) * 1e6}


def main() -> int:
    """Writes both files anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    folder = ROOT / "results/recordings"
    parser.add_argument("out", type=Path)
    names = ",".join(str(folder / f"smollm2-{name}.npz") for name in NAMES)
    parser.add_argument("--recordings", default=names)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    recordings = [load(name) for name in given.recordings.split(",")]
    for name, rows in (
        ("lookup", (row for one in recordings for row in tokens(one))),
        ("cost", costs(recordings[0])),
    ):
        path = given.out / f"{name}.jsonl"
        path.unlink(missing_ok=True)
        for row in rows:
            append_row(
                path, {k: float(v) if isinstance(v, np.floating) else v for k, v in row.items()}
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
