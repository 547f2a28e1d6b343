"""How far a GPU's greedy tokens are from the reference's choice, over the same float16 weights.

    python tests/gpu/greedy_margins.py MODEL OUT/text/RUN_ID.jsonl…

Every token is judged behind the GPU's own tokens: its margin is the reference's largest logit less
the token's, over the largest magnitude; 0 is the reference's own choice. The reference computes in
float32 on a CPU, some seconds an answer. Exit code 1 where float16 activations do not explain a
margin (ROUNDING), or where two files have other tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.engine.model.transformer.sources import open_checkpoint
from tests import transformer_reference

ROUNDING = 4e-3  # relative: what float16 activations may move a logit by, against the largest


class Kept:
    """A checkpoint that keeps its matrices, rounded to a type."""

    def __init__(self, inner: Any, dtype: Any) -> None:
        self.inner, self.config = inner, inner.config
        self._dtype, self._kept = dtype, dict[Any, Any]()

    def matrix(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Any:
        key = name, str(rows)
        if key not in self._kept:
            values = self.inner.matrix(name, rows, columns)
            self._kept[key] = values.astype(self._dtype).astype(np.float32)
        return self._kept[key]

    def vector(self, name: str, part: slice = slice(None)) -> Any:
        return self.inner.vector(name, part)


def margins(checkpoint: Any, prompt: Sequence[int], answer: Sequence[int]) -> Any:
    """Returns the margin of each token of an answer."""
    rows = transformer_reference.logits(checkpoint, [*prompt, *answer])[len(prompt) - 1 : -1]
    chosen = rows[np.arange(len(answer)), np.array(answer)]
    return (rows.max(-1) - chosen) / np.abs(rows).max(-1)


def main(model: str, files: Sequence[str]) -> int:
    """Prints each answer's tokens that are not the reference's; the exit code."""
    checkpoint = Kept(open_checkpoint(model), np.float16)
    every = [[json.loads(line) for line in Path(name).read_text().splitlines()] for name in files]
    said = [[answer["tokens"] for answer in answers] for answers in every]
    equal = all(tokens == said[0] for tokens in said)
    print(f"{len(files)} files have {'equal' if equal else 'OTHER'} tokens")
    worst, count, other = 0.0, 0, 0
    for number, answer in enumerate(every[0]):
        found = margins(checkpoint, answer["prompt_tokens"], answer["tokens"])
        places = np.flatnonzero(found > 0)
        count, other = count + len(found), other + len(places)
        worst = max(worst, float(found.max()))
        shown = ", ".join(f"{place}: {found[place]:.1e}" for place in places)
        print(f"answer {number}: {len(places)} of {len(found)} differ {shown}", flush=True)
    print(f"{other} of {count} tokens differ, by a margin of {worst:.1e} at most (bar {ROUNDING})")
    return int(not equal or worst > ROUNDING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
