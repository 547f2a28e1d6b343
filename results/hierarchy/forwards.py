#!/usr/bin/env python3
"""Counts the forwards of a draft that verifies looked-up tokens, on recordings of a real pair.

    results/hierarchy/forwards.py COSTS.jsonl [--recordings=FILE,…] >forwards.jsonl

COSTS: lines of results/cpu-forward/forward.py for the draft. One JSON line a recording, K and
lookup: means a round of forwards, guesses and right guesses, and the time in forwards of one row
(`time`), beside what theory.staged_draft says of the same shares and rates of guesses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from mpissd.common.theory import staged_draft  # noqa: E402
from mpissd.engine.spec.lookup import LOOKUPS, Lookup, make_lookup  # noqa: E402
from mpissd.engine.workload.replay.recording import Recorded, Recording, load  # noqa: E402
from mpissd.lab.laws.outcomes import accepted_runs  # noqa: E402

NAMES = ("chat", "humaneval", "edit", "summarise")
LOOKAHEADS = (3, 4, 5, 7)


@dataclass
class Counts:
    """What the rounds of a recording took; kinds: (guesses that a lookup has, right ones)."""

    costs: Sequence[float]
    rounds: int = 0
    tokens: int = 0
    forwards: int = 0
    offered: int = 0
    accepted: int = 0
    time: float = 0.0
    kinds: Counter[int] = field(default_factory=Counter)
    tried: Counter[int] = field(default_factory=Counter)
    right: Counter[int] = field(default_factory=Counter)

    def draft(self, lookup: Lookup, wanted: list[int]) -> None:
        """Drafts the tokens `wanted` of a round."""
        drafted: list[int] = []
        while len(drafted) < len(wanted):
            room = len(wanted) - len(drafted) - 1
            known = lookup.guessed(drafted, len(wanted) - 1)
            guesses, behind = known[:room], wanted[len(drafted) :]
            right = 0
            while right < len(guesses) and guesses[right] == behind[right]:
                right += 1
            if room:  # at the last token nobody asks the lookup
                self.kinds[len(known)] += 1
                self.tried[len(known)] += min(right + 1, len(guesses))
                self.right[len(known)] += right
            self.forwards += 1
            self.offered += len(guesses)
            self.accepted += right
            self.time += self.costs[len(guesses)]
            drafted += behind[: right + 1]
        self.rounds += 1

    def theory(self, lookahead: int) -> tuple[float, float]:
        """Returns the (forwards, time) of a round that these shares and rates give."""
        steps = self.kinds.total()
        kinds = [
            (count / steps, self.right[n] / max(1, self.tried[n]), n)
            for n, count in self.kinds.items()
            if n
        ]
        return staged_draft(kinds, lookahead, self.costs)


def follow(part: Recorded, lookahead: int, kind: str, counts: Counts) -> None:
    """Decodes one recorded answer with SD."""
    runs, lookup = accepted_runs(part, part.rollout[:, :lookahead]), make_lookup(kind)
    prompt, tokens, c = part.prompt.tolist(), part.tokens.tolist(), 0
    while c < part.end:
        lookup.follow([*prompt, *tokens[:c]])
        counts.draft(lookup, part.rollout[c, :lookahead].tolist())
        counts.tokens += int(runs[c]) + 1
        c += int(runs[c]) + 1


def line(recording: Recording, lookahead: int, kind: str, costs: Sequence[float]) -> str:
    """Returns the JSON line of a recording."""
    counts = Counts(costs)
    for part in recording.sequences:
        follow(part, lookahead, kind, counts)
    forwards, time = counts.theory(lookahead)
    rounds = counts.rounds
    found = {"rounds": rounds, "tokens_a_round": counts.tokens / rounds}
    found |= {"forwards": counts.forwards / rounds, "offered": counts.offered / rounds}
    found |= {"accepted": counts.accepted / rounds, "time": counts.time / rounds}
    found |= {"theory_forwards": forwards, "theory_time": time}
    named = {"recording": recording.name, "lookahead": lookahead, "draft_lookup": kind}
    return json.dumps({**named, **{name: round(value, 4) for name, value in found.items()}})


def cost_of(path: Path) -> list[float]:
    """Returns the time of forwards of 1, 2, … rows in units of one row's, interpolated."""
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    known = {row["rows"]: row["cpu_ms"] for row in rows if row["kind"] == "trunk"}
    sizes = sorted(known)
    most = np.arange(1, sizes[-1] + 1)
    times = np.interp(most, sizes, [known[n] for n in sizes])
    return [float(one) for one in times / times[0]]


def main() -> int:
    """Prints every line."""
    parser = argparse.ArgumentParser(description=__doc__)
    folder = ROOT / "results/recordings"
    parser.add_argument("costs", type=Path)
    names = ",".join(str(folder / f"smollm2-{name}.npz") for name in NAMES)
    parser.add_argument("--recordings", default=names)
    given = parser.parse_args()
    costs = cost_of(given.costs)
    for name in given.recordings.split(","):
        recording = load(name)
        for lookahead in LOOKAHEADS:
            for kind in LOOKUPS:
                print(line(recording, lookahead, kind, costs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
