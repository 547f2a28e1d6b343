"""What a stepper needs of a model's operations, so that another kind of model is another stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions, Shard


class Weights(Protocol):
    """One rank's weights, on which several stacks may stand."""

    max_rows: int  # of the forwards that read them


class Stack(Protocol):
    """One rank's operations over its weights, with the buffers that they need."""

    group: Group
    weights: Any  # its Weights
    buffers: Any  # buffers.tokens: the host buffer, int32 [max_rows], that a forward reads

    def place(self, places: Places) -> None:
        """Takes where the rows of the next forward stand; given where a worker knows it."""

    def body(self, rows: int) -> Callable[[], None]:
        """Returns the operations of one forward of `rows` rows, which a program runs."""

    def read(self, rows: int) -> tuple[Any, Any | None]:
        """Returns what such a forward read out: ids [heads, T, rows, k], and values or None."""


class Stacks(Protocol):
    """Makes one kind of model; equal ones make the same weights, so it is hashable."""

    def weights(
        self, backend: Backend, shard: Shard, options: ForwardOptions, *, max_rows: int, seed: int
    ) -> Weights:
        """Returns one rank's weights; raises MemoryError or ConfigError where there is no room."""

    def stack(
        self,
        backend: Backend,
        group: Group,
        shard: Shard,
        options: ForwardOptions,
        weights: Any,
        *,
        max_rows: int,
        max_sequences: int,
    ) -> Stack:
        """Returns a stack on weights that this made for the same shard, and for as many rows."""
