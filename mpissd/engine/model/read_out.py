"""Brings each row's best candidates to the host: the likeliest alone, or lists of k.

Almost every forward needs one candidate a row; only a glue forward of SSD reads lists (the bonus
tokens to prepare for). On an H200 19 more candidates of 128,256 logits take 20 µs for 4 rows, and
190 µs for 48 (results/h200-tuned), so both ways are programs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group

Find = Callable[[int, Any, Any], None]  # (k, ids, values): writes this rank's k best of each row


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
