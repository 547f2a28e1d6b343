"""Packs weights on the device in the order of skinny.cu, and fills embedding tables (pack.cu)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.engine.backend import kernels
from mpissd.engine.backend.base import WeightPart
from mpissd.engine.backend.kernels import ceil_div
from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.cupy_ops.products import PAIR, TILE, PackedWeight
from mpissd.engine.model.transformer.ops import Part

if TYPE_CHECKING:  # it imports CuPy
    from mpissd.engine.backend.cupy_device import Launcher

_STAGING_ELEMENTS = 1 << 26  # Of a checkpoint's matrix, brought to the device at once.


@dataclass(frozen=True)
class _Tiles:
    """What fills tiles of 16 columns: 8 of `left`, then 8 of `right`, `step` columns a tile apart.

    outputs: columns of each part. A part fills both halves of its own tiles (step 16), or gate and
    up alternate (step 8).
    """

    left: Part
    right: Part
    outputs: int
    depth: int

    @property
    def step(self) -> int:
        """Columns of a part between two tiles."""
        return TILE if self.left is self.right else TILE // 2

    @property
    def shift(self) -> int:
        """The right half's first column."""
        return self.step - TILE // 2

    def lanes(self, outputs: int) -> Any:
        """The lanes (of 16 bytes) that the tiles of so many outputs take."""
        return np.int64(ceil_div(outputs, self.step) * TILE * self.depth // 8)

    @property
    def depths(self) -> tuple[Any, Any]:
        """The depth in pairs of 16, and in elements."""
        return np.int32(self.depth // PAIR), np.int32(self.depth)

    def columns(self, outputs: int) -> tuple[Any, Any, Any]:
        """The columns that each half has from its first one on, and their step."""
        return np.int32(outputs), np.int32(outputs - self.shift), np.int32(self.step)


class Packer:
    """Packs weights from a checkpoint's values, or from its recipe of random ones."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def matrix(
        self, checkpoint: Checkpoint, parts: list[tuple[Part, tuple[int, int]]]
    ) -> PackedWeight:
        """Packs parts side by side; each has a size (outputs, inputs).

        Raises ConfigError for widths that the kernels do not support.
        """
        every = [_Tiles(part, part, *size) for part, size in parts]
        depth, widths = every[0].depth, [tiles.outputs for tiles in every]
        _check(checkpoint, depth, widths[:-1])
        sizes = [int(tiles.lanes(tiles.outputs)) * 8 for tiles in every]
        values, start = self._launcher.empty((sum(sizes),), np.float16), 0
        for tiles, size in zip(every, sizes, strict=True):
            self._fill(checkpoint, values[start : start + size], tiles)
            start += size
        return PackedWeight(values, depth, sum(widths))

    def heads(
        self, checkpoint: Checkpoint, parts: list[tuple[Part, tuple[int, int]]], head: int
    ) -> PackedWeight:
        """Packs parts side by side; a tile has 8 columns of a head's first half, and 8 that rotate
        with them. head: columns of a head."""
        depth, outputs = parts[0][1][1], sum(size[0] for _, size in parts)
        _check(checkpoint, depth, [head // 2])
        values, start = self._launcher.empty((outputs * depth,), np.float16), 0
        for part, (rows, _) in parts:
            first = part.rows.start or 0
            for at in range(first, first + rows, head):
                edges = at, at + head // 2, at + head
                left, right = (replace(part, rows=slice(*pair)) for pair in pairwise(edges))
                to = values[start + (at - first) * depth :]
                self._fill(checkpoint, to, _Tiles(left, right, head // 2, depth))
            start += rows * depth
        return PackedWeight(values, depth, outputs, head=head)

    def gate_up(
        self, checkpoint: Checkpoint, gate: Part, up: Part, size: tuple[int, int]
    ) -> PackedWeight:
        """Packs gate and up so that a tile has 8 columns of each."""
        tiles = _Tiles(gate, up, *size)
        _check(checkpoint, tiles.depth, [])
        values = self._launcher.empty((int(tiles.lanes(tiles.outputs)) * 8,), np.float16)
        self._fill(checkpoint, values, tiles)
        return PackedWeight(values, tiles.depth, tiles.outputs, gated=True)

    def table(self, checkpoint: Checkpoint, name: str, size: tuple[int, int]) -> Any:
        """Returns an embedding table, float16 [entries, width]."""
        entries, width = size
        table = self._launcher.empty(size, np.float16)
        recipe = checkpoint.random_part(name, slice(0, entries))
        if recipe is not None:
            first, scale = np.uint32(recipe.out_start), np.float32(recipe.scale)
            args = (table, np.int64(entries), np.int32(width), _key(recipe), first, scale)
            self._launch("fill_rows", entries * width, args)
            return table
        step = max(1, _STAGING_ELEMENTS // width)
        for first in range(0, entries, step):
            rows = checkpoint.matrix(name, slice(first, min(first + step, entries)))
            self._launcher.upload(rows, table[first : first + len(rows)])
        return table

    def _fill(self, checkpoint: Checkpoint, out: Any, tiles: _Tiles) -> None:
        left, right = (
            checkpoint.random_part(part.name, part.rows, part.columns)
            for part in (tiles.left, tiles.right)
        )
        if left is None or right is None:
            self._fill_staged(checkpoint, out, tiles)
            return
        lanes = tiles.lanes(tiles.outputs)
        first = [np.uint32(left.out_start), np.uint32(right.out_start + tiles.shift)]
        halves = (_key(left), first[0], _key(right), first[1])
        row, scale = np.uint32(left.in_start), np.float32(left.scale)
        columns = tiles.columns(tiles.outputs)
        args = (out, lanes, *tiles.depths, row, *halves, *columns, scale)
        self._launch("pack_random", int(lanes), args)

    def _fill_staged(self, checkpoint: Checkpoint, out: Any, tiles: _Tiles) -> None:
        """Copies a matrix to the device, some columns at a time."""
        depth, step = tiles.depth, tiles.step
        count = max(1, _STAGING_ELEMENTS // (depth * step)) * step
        for first in range(0, tiles.outputs, count):
            last = min(first + count, tiles.outputs)
            left = right = self._staged(checkpoint, tiles.left, first, last)
            if tiles.left is not tiles.right:
                right = self._staged(checkpoint, tiles.right, first, last)
            right = right.ravel()[tiles.shift * depth :]
            lanes, columns = tiles.lanes(last - first), tiles.columns(last - first)
            sources = (left, right if right.size else None, np.int64(depth))
            to = out[first // step * TILE * depth :]
            self._launch("pack_lanes", int(lanes), (to, lanes, *tiles.depths, *sources, *columns))

    def _staged(self, checkpoint: Checkpoint, part: Part, first: int, last: int) -> Any:
        start = part.rows.start or 0
        values = checkpoint.matrix(part.name, slice(start + first, start + last), part.columns)
        return self._launcher.uploaded(values, np.float32)

    def _launch(self, name: str, threads: int, args: tuple[Any, ...]) -> None:
        kernel = self._launcher.function(name, kernels.PACK)
        self._launcher.launch(kernel, (min(ceil_div(threads, 256), 1 << 16),), (256,), args)


def _key(part: WeightPart) -> Any:
    return np.uint32(part.key & 0xFFFFFFFF)


def _check(checkpoint: Checkpoint, depth: int, inner_widths: list[int]) -> None:
    """Raises ConfigError for a depth, or widths of joined parts, that do not fit tiles."""
    name = checkpoint.config.shape.name
    if depth % PAIR:
        raise ConfigError(f"{name} on a GPU: a width of {depth}: allowed: multiples of {PAIR}")
    if any(width % TILE for width in inner_widths):
        raise ConfigError(f"{name} on a GPU: {inner_widths}: allowed: multiples of {TILE}")
