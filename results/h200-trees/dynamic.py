"""Compares dynamic trees with fixed ones:  python results/h200-trees/dynamic.py RECORDING PROMPTS

Prints a JSON line a shape: tokens a round of the shipped pair, over the first 64 tokens of the
answers to the first PROMPTS prompts of its recording. A dynamic tree [Li et al. 2024, EAGLE-2]
computes in each level the `width` nodes of the largest products of the draft's probabilities, and
its `nodes` largest are verified. The probabilities are those of the 17 best candidates, normalised.
The fixed tree (width null) is optimal by the ranks of the whole recording.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product

import numpy as np

from mpissd.common.config import parse_flags
from mpissd.common.wait import Waiter
from mpissd.engine.backend.registry import open_backend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.decode.in_process import in_one_process
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.spec.tree import optimal
from mpissd.engine.workload.replay import load

TOKENS, TOP, PART = 64, 17, 64
NODES, LEVELS, WIDTHS = (7, 15, 24), (3, 4, 5), (4, 8)
FLAGS = "workload=text mode=sd num_drafts=0 pair=smollm2 prompt=- lookahead=5 context=1024"
Path = tuple[int, ...]


class Draft:
    """candidates: {token: log-probability} after the text and each path that follows it."""

    def __init__(self, resources: ExitStack) -> None:
        job, name = in_one_process(parse_flags(dict(flag.split("=") for flag in FLAGS.split())))
        backend = open_backend(name, device=job.config.device, local_rank=0)
        resources.callback(backend.close)
        lanes = replace(job.draft_options, top_k=TOP, lanes=max(WIDTHS), steps=max(LEVELS))
        parts = {"buckets": [1, 4, 8, 16, 32, PART], "num_sequences": 1, "seed": 1}
        model = job.workload.draft_model
        self._stepper = Stepper(backend, SoloGroup(), job.draft_shard, lanes, model=model, **parts)
        resources.callback(self._stepper.close)

    def begin(self) -> None:
        """Forgets the text."""
        self._stepper.release([0])
        self._stored = 0

    def read(self, text: Sequence[int]) -> None:
        """Moves to a text that continues the last one."""
        while rows := [(token, n, -1) for n, token in enumerate(text)][self._stored :][:PART]:
            self.candidates = {(): self._run(rows)[-1]}
            self._stored += len(rows)

    def grown(self, width: int) -> dict[Path, float]:
        """Returns the log-probability of each node that a dynamic tree may have."""
        every, level = dict[Path, float](), {(): 0.0}
        for _ in range(max(LEVELS)):
            new = [path for path in level if path not in self.candidates]
            rows = [(path, n, lane) for lane, path in enumerate(new) for n in range(len(path))]
            best = self._run([(p[n], self._stored + n, lane) for p, n, lane in rows])
            for (path, n, _), found in zip(rows, best, strict=True):
                self.candidates[path[: n + 1]] = found
            below = [(p, sure, *own) for p, sure in level.items() for own in self._after(p)]
            following = {(*path, token): sure + own for path, sure, token, own in below}
            every |= following
            level = dict(sorted(following.items(), key=lambda node: -node[1])[:width])
        return every

    def _after(self, path: Path) -> list[tuple[int, float]]:
        return list(self.candidates[path].items())

    def _run(self, rows: Sequence[tuple[int, int, int]]) -> list[dict[int, float]]:
        """Returns the candidates after rows of (token, position, lane)."""
        if not rows:
            return []
        tokens, positions, lanes = np.array(rows, np.int32).T
        places = Places(np.zeros_like(tokens), positions, lanes, np.full_like(tokens, self._stored))
        self._stepper.upload(len(rows), tokens, places, lists=True)
        self._stepper.launch()
        self._stepper.wait(Waiter(99.0, spin=False))
        best = self._stepper.results()
        values = best.values[0, : len(rows)].astype(float)
        values -= np.log(np.exp(values).sum(1, keepdims=True))
        pairs = zip(best.ids[0].tolist(), values.tolist(), strict=False)
        return [dict(zip(ids, each, strict=True)) for ids, each in pairs]


def rounds(accepted: Sequence[int]) -> int:
    """Returns the rounds that emit an answer; accepted: after c tokens."""
    c = count = 0
    while c < len(accepted):
        c, count = c + accepted[c] + 1, count + 1
    return count


def main(path: str, prompts: int) -> None:
    recording = load(path)
    hits = [part.top == part.tokens[: part.end, None] for part in recording.sequences]
    law = np.concatenate(hits).mean(0)[:16]
    fixed = [optimal(nodes, np.tile(law, (k, 1))) for nodes, k in product(NODES, LEVELS)]
    counts, tokens = defaultdict[tuple[int, int, int], int](int), 0
    with ExitStack() as resources:
        draft = Draft(resources)
        for part, hit in zip(recording.sequences[:prompts], hits, strict=False):
            text, truth = part.prompt.tolist(), part.tokens.tolist()
            ranks = np.where(hit.any(1), hit.argmax(1), TOP).tolist() + [TOP] * max(LEVELS)
            depths = defaultdict[tuple[int, int, int], list[int]](list)
            tokens += (end := min(TOKENS, part.end))
            draft.begin()
            for c in range(end):
                draft.read([*text, *truth[:c]])
                for (nodes, k), tree in zip(product(NODES, LEVELS), fixed, strict=True):
                    of = tree.ranks[1:].tolist()
                    node = tree.walk(of, [*ranks[c : c + k], TOP], tree.levels, len(of))
                    depths[nodes, k, 0].append(tree.levels[node])
                for width in WIDTHS:
                    every = draft.grown(width)
                    order = sorted(every, key=lambda node: -every[node])
                    for nodes, k in product(NODES, LEVELS):
                        kept = {*[node for node in order if len(node) <= k][:nodes]}
                        ahead = [tuple(truth[c : c + n]) in kept for n in range(1, k + 1)]
                        depths[nodes, k, width].append([*ahead, False].index(False))
            for shape, accepted in depths.items():
                counts[shape] += rounds(accepted)
    for (nodes, k, width), count in sorted(counts.items()):
        row = {"recording": recording.label, "prompts": prompts, "nodes": nodes, "levels": k}
        row |= {"width": width or None, "rounds": count, "tokens": tokens}
        print(json.dumps(row | {"acceptance_length": round(tokens / count, 4)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
