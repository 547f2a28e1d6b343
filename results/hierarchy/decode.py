#!/usr/bin/env python3
"""Decodes prompts by several methods in turn, in one process on one core, and times the core.

    results/hierarchy/decode.py --target=FILE --prompts=FILE.jsonl [--count=8] >>decoded.jsonl

Every method decodes one round, then the next method one, so that all meet the same machine. One
JSON line a method: tokens a round, forwards of the draft, and the seconds for which the core ran
(`core_s`, of rounds without a prompt), which other processes do not count in; `tok_per_core_s`,
and the median round, `round_ms`.
Methods of one K have one digest with every lookup in the draft, or the command fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import thread_time
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mpissd.common.records import outcome_digest  # noqa: E402
from mpissd.engine import Decoder, RunConfig  # noqa: E402
from mpissd.engine.decode.draft import Drafter  # noqa: E402

METHODS: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "lookup": {"backup": "fast", "lookup": "suffix", "lookahead": 5},
    **{
        f"draft{k}{'' if kind is None else '+' + kind}": {"lookahead": k, "draft_lookup": kind}
        for k in (3, 4, 5)
        for kind in (None, "suffix", "prompt")
    },
}


@dataclass
class Method:
    """A method's decoder, and what its rounds without a prompt took."""

    name: str
    decoder: Decoder
    core_s: list[float] = field(default_factory=list)  # by round
    tokens: int = 0
    rounds: int = 0
    seen: set[int] = field(default_factory=set)

    def step(self) -> None:
        """Decodes a round."""
        begun = thread_time()
        result = self.decoder.step()
        spent = thread_time() - begun
        rows = result.outcome.rows
        if not set(rows[:, 0].tolist()) <= self.seen:  # its prompt is in this round
            self.seen |= set(rows[:, 0].tolist())
            return
        self.core_s.append(spent)
        self.tokens += int((rows[:, 3] + 1).sum())
        self.rounds += 1

    def line(self) -> dict[str, Any]:
        """Returns what the method took; the draft's table is of all rounds."""
        sequences = self.decoder.records.sequences()
        found = {"method": self.name, "rounds": self.rounds, "tokens": self.tokens}
        found |= {"core_s": sum(self.core_s), "tok_per_core_s": self.tokens / sum(self.core_s)}
        found |= {"tokens_a_round": self.tokens / self.rounds}
        found |= {"round_ms": 1e3 * median(self.core_s)}  # which neighbours on the host shift less
        found |= {"outcome_digest": outcome_digest(sequences)}
        drafter = getattr(self.decoder.loop._speculator, "_drafter", None)
        if isinstance(drafter, Drafter):
            table = drafter.table(0, 1 << 30)
            columns = {name: table[:, n] for n, name in enumerate(Drafter.COLUMNS)}
            drafts = columns["num_jit"] > 0
            for name in ("draft_forwards", "guessed", "guessed_right"):
                found[name] = float(columns[name][drafts].mean()) if drafts.any() else None
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}


def opened(told: argparse.Namespace, prompts: Path) -> list[Method]:
    """Returns the methods, at their first prompt."""
    common = {"workload": "text", "backend": "numpy", "target": told.target, "mode": "sd"}
    common |= {"draft": told.draft, "num_drafts": 0, "prompts": str(prompts)}
    common |= {"num_tokens": told.tokens, "batch_size": 1, "temperature": told.temperature}
    chosen = told.methods.split(",") if told.methods else list(METHODS)
    return [Method(name, Decoder(RunConfig(**{**common, **METHODS[name]}))) for name in chosen]


def main() -> int:
    """Prints a line a method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default="smollm2-draft")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--methods")
    told = parser.parse_args()
    with TemporaryDirectory() as folder:
        lines = told.prompts.read_text().splitlines(keepends=True)
        few = Path(folder) / "few.jsonl"
        few.write_text("".join(lines[:: max(1, len(lines) // told.count)][: told.count]))
        methods = opened(told, few)
        while running := [method for method in methods if not method.decoder.is_over]:
            for method in running:
                method.step()
    found = [method.line() for method in methods]
    said = {"prompts": told.prompts.stem, "count": told.count, "temperature": told.temperature}
    for line in found:
        print(json.dumps(said | line), flush=True)
    digests = {(line["method"].partition("+")[0], line["outcome_digest"]) for line in found}
    return int(len(digests) > len({name for name, _ in digests}))


if __name__ == "__main__":
    sys.exit(main())
