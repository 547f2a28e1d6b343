"""Chunks of a prompt on a GPU: many positions of one slot, with products by cuBLAS (prefill.cu).

A chunk has a fixed number of rows, padded, and begins at an absolute multiple of it, so that a
position's numbers depend on its own request only. Its products differ from a decoding row's, so
the numbers are equal up to rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.backend import kernels
from mpissd.engine.backend.kernels import ceil_div
from mpissd.engine.model.transformer.cupy_ops.products import TILE, PackedWeight
from mpissd.engine.model.transformer.shard import TransformerShard

_TILE_ROWS, _THREADS, _NORM_THREADS = 64, 128, 512
_SPARE_BYTES = 16 << 30  # left free after a second copy of the weights


class CupyChunks:
    """The forward of one chunk; see ops.Chunks.

    cuBLAS cannot read packed weights. If a second copy of them fits, they are unpacked once; if
    not, every forward unpacks each one into the same scratch.
    """

    rows = 1024
    keeps: bool | None = None  # whether a copy is kept; None: where it fits

    def __init__(self, ops: Any, shard: TransformerShard, weights: Any, cache: Any) -> None:
        """Allocates the buffers, and unpacks all weights if they fit; otherwise allocates the
        scratch of the largest.

        ops: CupyOps. weights: TransformerWeights, over which stacks share the unpacked rows.
        """
        backend, launcher = ops.backend, ops.launcher
        self._ops, self._backend, self._launcher = ops, backend, launcher
        self._table, self._layers, self._cache = weights.table, weights.layers, cache
        shape, rows, empty = shard.shape, self.rows, launcher.empty
        self._eps, self._heads, self._ffn = shard.config.norm_eps, shard.heads, shard.ffn_width
        every = shard.q_width + 2 * shard.kv_width
        self._tokens, self._place = backend.host_ints(rows), backend.host_ints(3)
        self._seats = empty((4 * rows,), np.int32)
        self._hidden, self._delta = (empty((rows, shape.hidden), np.float32) for _ in range(2))
        self._x = empty((rows, shape.hidden), np.float16)
        self._q, self._attended = launcher.zeros((2, rows, shard.q_width), np.float16)
        self._qkv = empty((rows, every), np.float32)
        self._both = empty((rows, 2 * self._ffn), np.float16)
        self._inner = empty((rows, self._ffn), np.float16)
        self._kept = ops.unpacked  # rows of weights by their identity
        packed = self._weights()
        if all(id(weight) in self._kept for weight in packed):
            return
        sizes = [_size(weight) for weight in packed]
        fits = 2 * sum(sizes) + _SPARE_BYTES < launcher.free_bytes
        if not (fits if self.keeps is None else self.keeps):
            self._scratch = empty((max(sizes),), np.float16)
            return
        for weight, size in zip(packed, sizes, strict=True):
            self._kept[id(weight)] = empty((size,), np.float16)
            self._unpack(weight, self._kept[id(weight)])

    def upload(self, slot: int, start: int, tokens: Ints) -> None:
        """Sets the chunk: tokens of positions start … of a slot."""
        assert start % self.rows == 0 and 0 < len(tokens) <= self.rows, f"{start}, {len(tokens)}"
        self._tokens[: len(tokens)] = tokens
        self._place[:] = slot, start, len(tokens)

    def body(self) -> None:
        """Enqueues the chunk's forward, which stores keys and values only."""
        ops, cache, rows = self._ops, self._cache, self.rows
        pages, table = cache.seats.pages, cache.words[-cache.seats.pages.size :]
        places = np.uintp(self._place.ctypes.data), np.int32(rows), self._seats
        args = (*places, np.uintp(pages.ctypes.data), table, np.int32(pages.size))
        self._launch("begin_chunk", (ceil_div(max(rows, pages.size), 256),), (256,), args)
        ops.embed(self._table, self._tokens, self._hidden, rows)
        own, seats = (self._qkv, self._seats, rows), (self._seats, np.int32(rows))
        shared = 2 * 4 * _TILE_ROWS * (cache.sizes.head_dim + 8)
        count = rows * self._ffn // 8
        halves = self._both, self._inner, np.int32(self._ffn // 8), np.int64(count)
        for number, layer in enumerate(self._layers):
            self._norm(layer.attention_norm, self._delta if number else None)
            self._multiply(self._x, layer.qkv, self._qkv)
            ops.rotate(layer, cache, number, self._q, rows, own)
            if number == len(self._layers) - 1:  # the last layer's K and V are stored
                return
            held = ops.arguments(cache, number)
            args = (self._q, *seats, *held, np.int32(self._heads), self._attended)
            grid = ceil_div(rows, _TILE_ROWS), self._heads
            self._launch("attend_chunk", grid, (_THREADS,), args, shared)
            self._multiply(self._attended, layer.o, self._delta)
            self._norm(layer.ffn_norm, self._delta)
            self._multiply(self._x, layer.gate_up, self._both)
            self._launch("swiglu_chunk", (ceil_div(count, 256),), (256,), halves)
            self._multiply(self._inner, layer.down, self._delta)

    def _norm(self, weight: Any, delta: Any) -> None:
        width = np.int32(self._hidden.shape[1])
        args = self._hidden, delta, weight, self._x, width, np.float32(self._eps)
        how = (self.rows,), (_NORM_THREADS,), args, _NORM_THREADS // 8
        self._launcher.launch("norm_float32", kernels.ROWS, *how)

    def _multiply(self, x: Any, weight: PackedWeight, out: Any) -> None:
        rows = self._kept.get(id(weight))
        if rows is None:
            rows = self._scratch[: _size(weight)]
            self._unpack(weight, rows)
        self._backend.multiply_rows(x, rows.reshape(-1, weight.depth), out)

    def refresh(self) -> None:
        """Unpacks the kept weights again, which were overwritten."""
        for weight in self._weights():
            if (rows := self._kept.get(id(weight))) is not None:
                self._unpack(weight, rows)

    def _weights(self) -> list[PackedWeight]:
        return [
            w for layer in self._layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)
        ]

    def _unpack(self, weight: PackedWeight, rows: Any) -> None:
        """Writes the rows of a weight; gate's come before up's."""
        half, pairs, count = TILE // 2, weight.depth // 32, 1
        if weight.head:  # the heads of q, k and v are packed like gate and up
            count = weight.columns // weight.head
            weight = replace(weight, columns=weight.head // 2, head=0, gated=True)
        # Of a pair of columns the second one lies 8 columns on, or among up's columns.
        apart = weight.columns if weight.gated else half
        columns = weight.columns, weight.columns - (0 if weight.gated else half)
        lanes = weight.tiles // count * pairs * 32
        step = np.int32(half if weight.gated else TILE)
        args = (weight.values, np.int64(lanes), np.int32(pairs), rows, rows[apart * weight.depth :])
        grid = (min(ceil_div(lanes, 256), 1 << 16), count)
        self._launch("unpack_rows", grid, (256,), (*args, *map(np.int32, columns), step))

    def _launch(self, name: str, grid: Any, block: Any, args: Any, shared: int = 0) -> None:
        how = grid, block, args, shared, self._ops.macros
        self._launcher.launch(name, kernels.PREFILL, *how)


def _size(weight: PackedWeight) -> int:
    """Returns the elements of an unpacked weight."""
    return weight.columns * (2 if weight.gated else 1) * weight.depth
