"""Training data of a learner, the rank that trains the draft model during decoding.

An example has a sequence's tokens, and the target's distributions at some positions. Only the
likeliest tokens of a distribution are kept, with float16 log-probabilities that are normalised over
the whole vocabulary.
"""

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.features.learning import ExamplePart

KEPT = 64  # tokens kept of a distribution, in 390 bytes; all in float32 would take 4 bytes each
HELD = 8  # 1 in 8 sequences is held out, to test versions of the draft before they are used
Floats = NDArray[np.float32]


class Example(NamedTuple):
    """A sequence's tokens, int32 [n], and the target's distributions of some next tokens. at:
    positions in rising order, int32 [m]; entry i is the distribution after position at[i]. ids: the
    k likeliest tokens, best first, int32 [m, k]. logs: their log-probabilities, float16 [m, k]."""

    tokens: Ints
    at: Ints
    ids: Ints
    logs: NDArray[np.float16]


def compressed(logits: Floats, kept: int = KEPT) -> tuple[Ints, NDArray[np.float16]]:
    """Returns the `kept` likeliest tokens of each row and their log-probabilities, both [m, kept].
    logits: float32 [m, V]. Of tokens with equal logits the lower id comes first."""
    kept = min(kept, logits.shape[1])
    top = logits.max(-1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(logits - top).sum(-1))
    ids = np.sort(np.argpartition(-logits, kept - 1, -1)[:, :kept], -1)
    values = np.take_along_axis(logits, ids, -1)
    order = np.argsort(-values, -1, kind="stable")
    logs = np.take_along_axis(values, order, -1) - total[:, None]
    return np.take_along_axis(ids, order, -1).astype(np.int32), logs.astype(np.float16)


class Memory:
    """A replay buffer with recent sequences to train on, and sequences held out from training."""

    def __init__(self, capacity: int, held: int = 32, seed: int = 0) -> None:
        """capacity: most sequences to train on; the oldest are dropped. held: the most held out."""
        self.trained: list[Example] = []
        self.held: list[Example] = []
        self.num_seen = 0
        self._capacity = capacity
        self._max_held = held
        self._random = random.Random(seed)

    def add(self, example: Example) -> bool:
        """Stores a sequence; returns whether it will be trained on, not held out."""
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
        """Returns up to `size` sequences to train on: the `newest` last ones, and random others."""
        last = self.trained[-newest:] if newest else []
        rest = self.trained[: len(self.trained) - len(last)]
        return [*last, *self._random.sample(rest, min(len(rest), max(0, size - len(last))))]


class Collector:
    """Builds each sequence's training example from its parts, which arrive round by round."""

    def __init__(self, stop_ids: Iterable[int] = (), kept: int = KEPT) -> None:
        """stop_ids: tokens that end an answer. kept: how many tokens of a distribution to keep."""
        self._stops = frozenset(stop_ids)
        self._kept = kept
        self._live: dict[tuple[int, int], tuple[int, list[Example]]] = {}  # prompt length, parts
        self.dropped = 0  # number of sequences for which a round is missing

    def add(self, parts: Sequence[ExamplePart]) -> list[Example]:
        """Takes the parts of one round; returns the examples of sequences that have no part in this
        round, since these sequences have ended."""
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
        """Returns the examples of all sequences that have not ended."""
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
