"""What a worker and a model say to each other: the rows of a forward, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter


@dataclass(frozen=True)
class Places:
    """Where the n rows of a forward stand, for models that keep a cache; each is int32 [n].

    slots: the cache slot of each row's sequence. positions: its position there. parents: the row
    before it in a tree of rows (−1: the committed tokens).
    """

    slots: Ints
    positions: Ints
    parents: Ints


@dataclass(frozen=True)
class Results:
    """The k best candidates of each row, best first, of the whole vocabulary.

    ids: int32 [heads, n, k]; a model with one LM head, or none, has one. values: float32, likewise,
    the logits of the candidates; None where they were not asked for (ForwardOptions.values).
    """

    ids: Ints
    values: NDArray[np.float32] | None = None


class Forwards(Protocol):
    """What a worker needs of a model: forwards, launched and waited for."""

    def upload(self, rows: int, tokens: Ints, places: Places | None = None) -> None:
        """Makes the next forward one of `rows` rows, of which the first n = len(tokens) count.

        tokens: int32 [n], what each row reads. The rows behind them are padding.
        """

    def launch(self) -> None:
        """Starts the forward that was last uploaded."""

    def done(self) -> bool:
        """Returns whether the last launched forward is over."""

    def wait(self, waiter: Waiter) -> None:
        """Returns when the last launched forward is over."""

    def elapsed_s(self) -> float:
        """Returns the device time of the last finished forward."""

    def results(self) -> Results:
        """Returns what the last finished forward computed; before the next upload.

        Raises NotImplementedError where nothing is computed.
        """

    def close(self) -> None:
        """Frees the forwards."""


def merged(ids: Ints, values: NDArray[np.float32], width: int) -> Results:
    """Returns the k best of T shards, [heads, n, k], ties to the lowest id.

    ids, values: [heads, T, n, k], each shard's own k best; ids count from the shard's first column.
    width: columns of a shard.
    """
    heads, shards, count, k = ids.shape
    first = np.arange(shards, dtype=np.int32)[:, None, None] * width
    every = (ids + first).swapaxes(1, 2).reshape(heads, count, shards * k)
    scores = values.swapaxes(1, 2).reshape(heads, count, shards * k)
    order = np.lexsort((every, -scores), axis=-1)[..., :k]
    return Results(np.take_along_axis(every, order, -1), np.take_along_axis(scores, order, -1))
