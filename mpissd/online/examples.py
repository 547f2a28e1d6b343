"""A learner's data from the target: sequences, and distributions after some positions.

Of each distribution the likeliest tokens are kept, with float16 log-probabilities normalised over
the whole vocabulary. The probability of the others is lost to training.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.features.learning import ExamplePart

KEPT = 64  # tokens of a distribution: 390 bytes a position instead of 4 V in float32
HELD = 8  # one sequence in so many is held out, to judge versions before they are published
Floats = NDArray[np.float32]


class Example(NamedTuple):
    """One sequence's tokens, int32 [n], and the target's distributions after some of them. at:
    int32 [m], rising; entry i is about the token after position at[i]. ids: int32 [m, k], the
    likeliest tokens, best first. logs: float16 [m, k], their log-probabilities."""

    tokens: Ints
    at: Ints
    ids: Ints
    logs: NDArray[np.float16]


def compressed(logits: Floats, kept: int = KEPT) -> tuple[Ints, NDArray[np.float16]]:
    """Returns the likeliest tokens of each row and their log-probabilities, both [m, k]. logits:
    float32 [m, V]; of equal logits the lower token comes first."""
    kept = min(kept, logits.shape[1])
    top = logits.max(-1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(logits - top).sum(-1))
    ids = np.sort(np.argpartition(-logits, kept - 1, -1)[:, :kept], -1)
    values = np.take_along_axis(logits, ids, -1)
    order = np.argsort(-values, -1, kind="stable")
    logs = np.take_along_axis(values, order, -1) - total[:, None]
    return np.take_along_axis(ids, order, -1).astype(np.int32), logs.astype(np.float16)


class Memory:
    """The replay buffer: recent sequences to train on, and the latest that are held out."""

    def __init__(self, capacity: int, held: int = 32, seed: int = 0) -> None:
        """capacity: sequences to train on, of which the oldest makes room. held: held-out ones."""
        self.trained: list[Example] = []
        self.held: list[Example] = []
        self.num_seen = 0
        self._capacity = capacity
        self._max_held = held
        self._random = random.Random(seed)

    def add(self, example: Example) -> bool:
        """Keeps a sequence, trained on or held out; returns whether it is one to train on."""
        if not len(example.at):
            return False
        self.num_seen += 1
        if self.num_seen % HELD:
            self.trained.append(example)
            del self.trained[: -self._capacity]
            return True
        self.held.append(example)
        del self.held[: -self._max_held]
        return False

    def batch(self, size: int, newest: int = 1) -> list[Example]:
        """Returns up to `size` sequences: the `newest` last ones, and others at random."""
        last = self.trained[-newest:] if newest else []
        rest = self.trained[: len(self.trained) - len(last)]
        return [*last, *self._random.sample(rest, min(len(rest), max(0, size - len(last))))]


class Collector:
    """Joins the parts of each sequence's example, which come round by round."""

    def __init__(self, stop_ids: Iterable[int] = (), kept: int = KEPT) -> None:
        """stop_ids: tokens that end an answer; later tokens of the same round are dropped."""
        self._stops = frozenset(stop_ids)
        self._kept = kept
        self._live: dict[tuple[int, int], tuple[int, list[Example]]] = {}  # prompt, a part a round
        self.dropped = 0  # sequences of which a round is missing

    def add(self, parts: Sequence[ExamplePart]) -> list[Example]:
        """Takes a round's parts; returns the examples of sequences that are not in it any more."""
        names = {part.name for part in parts}
        ended = [self._live.pop(name) for name in [*self._live] if name not in names]
        for part in parts:
            _, rounds = self._live.setdefault(part.name, (part.prompt, []))
            if part.start not in (0, sum(len(example.tokens) for example in rounds)):
                self.dropped += 1
                del self._live[part.name]
                continue
            if part.start == 0:
                rounds.clear()
            rounds.append(Example(part.tokens, part.at, *compressed(part.logits, self._kept)))
        return [self._joined(*sequence) for sequence in ended]

    def rest(self) -> list[Example]:
        """Returns the examples of sequences that have not ended."""
        sequences = [self._joined(*sequence) for sequence in self._live.values()]
        self._live.clear()
        return sequences

    def _joined(self, prompt: int, rounds: Sequence[Example]) -> Example:
        tokens, at, ids, logs = (np.concatenate(arrays) for arrays in zip(*rounds, strict=True))
        answer = tokens[prompt:].tolist()
        stop = next((n for n, token in enumerate(answer) if token in self._stops), len(answer))
        end = prompt + stop + 1  # the stop token included
        kept = np.count_nonzero(at + 1 < end)
        return Example(tokens[:end], at[:kept], ids[:kept], logs[:kept])
