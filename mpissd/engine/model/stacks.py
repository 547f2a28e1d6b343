"""Interfaces of a model's weights and operations, which each kind of model implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.read_out import Find
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.transformer.shard import TransformerShard

AnyShard = Shard | TransformerShard


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
