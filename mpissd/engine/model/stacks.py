"""One rank's forward of a model, whatever its kind, and the read-out of each row's best candidates.

Almost every forward needs one candidate a row; only SSD's first draft forward of a round reads
lists (the bonus tokens to prepare for). On an H200 19 more candidates of 128,256 logits take 20 µs
for 4 rows, and 190 µs for 48 (results/h200-tuned), so both ways are programs of their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group
from mpissd.engine.model.forwards import Draws, Places
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.transformer.cache import PageTable
from mpissd.engine.model.transformer.shard import TransformerShard

AnyShard = Shard | TransformerShard
Find = Callable[[int, Any, Any], None]  # (k, ids, values): writes this rank's k best of each row


class Stack(ABC):
    """One rank's operations over its weights, with the buffers that they need.

    weights: other stacks may share them. buffers.tokens: host int32 [max_rows], the
    input of a forward. pages: the pages of its KV cache, None without one. draws: what draws tokens
    from the last forward's logits on the device; None: the host does.
    """

    chunk_rows = 0  # rows of the chunks in which long prompts are computed; 0: there are none
    pages: PageTable | None = None
    draws: Draws | None = None
    weights: Any
    buffers: Any
    candidates: ReadOut

    def __init__(
        self, backend: Backend, group: Group, shard: AnyShard, options: ForwardOptions
    ) -> None:
        self.backend, self.group, self.options = backend, group, options
        self.shard: Any = shard

    def place(self, places: Places | None) -> None:  # noqa: B027  (products keep no cache)
        """Sets the cache positions of the next forward's rows; called at every upload.

        None: the rows have no place, so they store nothing and attend nothing.
        """

    def place_chunk(self, slot: int, start: int, tokens: Ints) -> Callable[[], None]:
        """Sets tokens start … of a slot as the next chunk; returns what issues its operations."""
        raise NotImplementedError("no chunks of a prompt")

    def release(self, slots: Sequence[int]) -> None:  # noqa: B027  (products keep no cache)
        """Frees the cache of these slots."""

    @abstractmethod
    def body(self, rows: int, k: int | None = None) -> Callable[[], None]:
        """Returns a function that issues one forward of `rows` rows.

        k: candidates a row that it reads out, 1 or ForwardOptions.top_k (None: the latter).
        """

    @abstractmethod
    def best(self, rows: int) -> Find:
        """Returns a function that enqueues the choice among the logits of the last forward's rows.

        Needs an LM head.
        """

    @abstractmethod
    def read(self, rows: int, k: int | None = None) -> tuple[Ints, Any | None]:
        """Returns the (token ids, logits) that the last forward of this bucket read out.

        Both are [heads, T, rows, k]; logits may be None without ForwardOptions.values.
        """

    @abstractmethod
    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Returns this rank's logits of these rows of the last forward: float32 [n, columns]."""


@dataclass(frozen=True)
class Best:
    """Device buffers for k candidates a row: of this rank, and of all ranks."""

    ids: Any
    values: Any
    all_ids: Any
    all_values: Any


class ReadOut:
    """The candidates of up to max_rows rows and several heads, from every rank of a group.

    ids, values: on the host, [heads, T, rows, k] of the last forward, without gaps. by_k: the
    device buffers by k.
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
        buffers = backend.top_buffers
        self.by_k = {
            k: Best(*buffers(max_rows, k), *buffers(max_rows * group.size, k)) for k in {1, most}
        }
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
