"""Interfaces of a model's weights and operations, and the read-out of each row's best candidates.

Almost every forward needs one candidate a row; only SSD's first draft forward of a round reads
lists (the bonus tokens to prepare for). On an H200 19 more candidates of 128,256 logits take 20 µs
for 4 rows, and 190 µs for 48 (results/h200-tuned), so both ways are programs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.transformer.shard import TransformerShard

AnyShard = Shard | TransformerShard
Find = Callable[[int, Any, Any], None]  # (k, ids, values): writes this rank's k best of each row


class Weights(Protocol):
    """One rank's weights, which several stacks may share."""

    @property
    def max_rows(self) -> int:
        """Rows of the largest forward that reads them."""


class Stack(Protocol):
    """One rank's operations over its weights, with the buffers that they need."""

    group: Group
    weights: Any  # the Weights that it reads
    buffers: Any  # buffers.tokens: host int32 [max_rows], the input of a forward

    def place(self, places: Places | None) -> None:
        """Sets the cache positions of the next forward's rows; called at every upload.

        None: the rows have no place, so they store nothing and attend nothing.
        """

    @property
    def chunk_rows(self) -> int:
        """Rows of the chunks in which long prompts are computed; 0: there are none."""

    def place_chunk(self, slot: int, start: int, tokens: Ints) -> Callable[[], None]:
        """Sets tokens start … of a slot as the next chunk; returns what issues its operations."""

    def release(self, slots: Sequence[int]) -> None:
        """Frees the cache of these slots."""

    def body(self, rows: int, k: int | None = None) -> Callable[[], None]:
        """Returns a function that issues one forward of `rows` rows.

        k: candidates a row that it reads out, 1 or ForwardOptions.top_k (None: the latter).
        """

    def best(self, rows: int) -> Find:
        """Returns a function that enqueues the choice among the logits of the last forward's rows.

        Needs an LM head.
        """

    def read(self, rows: int, k: int | None = None) -> tuple[Any, Any | None]:
        """Returns the (ids, values) that the forward read out.

        Both are [heads, T, rows, k], and ids are those of tokens; values may be None without
        ForwardOptions.values.
        """

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Returns this rank's logits of these rows of the last forward: float32 [n, columns]."""


class Stacks(Protocol):
    """Factory of one kind of model; hashable, and equal factories make equal weights.

    A shard is of the kind (AnyShard) that the factory's model is split into.
    """

    def weights(
        self, backend: Backend, shard: Any, options: ForwardOptions, *, max_rows: int, seed: int
    ) -> Weights:
        """Returns one rank's weights; raises MemoryError or ConfigError if they do not fit."""

    def stack(
        self,
        backend: Backend,
        group: Group,
        shard: Any,
        options: ForwardOptions,
        weights: Any,
        *,
        max_rows: int,
        max_sequences: int,
    ) -> Stack:
        """Returns a stack over weights that this factory made for the same shard and rows."""


@dataclass(frozen=True)
class Best:
    """Device buffers for k candidates a row: this rank's, and those of all ranks."""

    ids: Any
    values: Any
    all_ids: Any
    all_values: Any


class ReadOut:
    """The candidates of up to max_rows rows and several heads, from every rank of a group.

    ids, values: on the host, [heads, T, rows, k] of the last forward, one behind the other. by_k:
    the device buffers by k.
    """

    def __init__(
        self,
        backend: Backend,
        group: Group,
        max_rows: int,
        most: int,
        *,
        heads: int = 1,
        values: bool = True,
    ) -> None:
        """Allocates the buffers for 1 and for `most` candidates a row.

        heads: outputs of a forward, read out one after the other. values: whether the candidates'
        logits are read out, too.
        """
        self._backend, self._group, self._heads = backend, group, heads
        self.by_k = {k: _buffers(backend, group.size, max_rows, k) for k in {1, most}}
        length = heads * group.size * max_rows * most
        self.ids = backend.host_ints(length)
        self.values = backend.host_ints(length).view(np.float32) if values else None

    def issue(self, find: Find, rows: int, k: int, head: int = 0) -> None:
        """Enqueues the choice of k candidates of each row, on every rank, and their copies."""
        view, memory, ranks = self._backend.view, self.by_k[k], self._group.size
        ids, values = view(memory.ids, rows, 0, k), view(memory.values, rows, 0, k)
        find(k, ids, values)
        if ranks > 1:
            ids, local = view(memory.all_ids, ranks * rows, 0, k), ids
            self._group.all_gather(local, ids)
            values, local = view(memory.all_values, ranks * rows, 0, k), values
            self._group.all_gather(local, values)
        count = ranks * rows * k
        part = slice(head * count, (head + 1) * count)
        self._backend.read_out(ids, self.ids[part])
        if self.values is not None:
            self._backend.read_out(values, self.values[part])

    def read(self, rows: int, k: int) -> tuple[Ints, Any]:
        """Returns (ids, values or None) of the last forward of so many rows, [heads, T, rows, k].

        ids count from the first column of each rank.
        """
        shape = self._heads, self._group.size, rows, k
        size = math.prod(shape)
        values = None if self.values is None else self.values[:size].reshape(shape)
        return self.ids[:size].reshape(shape), values


def _buffers(backend: Backend, ranks: int, rows: int, k: int) -> Best:
    return Best(*backend.top_buffers(rows, k), *backend.top_buffers(rows * ranks, k))
