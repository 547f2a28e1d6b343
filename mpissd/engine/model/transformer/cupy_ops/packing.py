"""Packs weights on the device in the order of skinny.cu, and fills embedding tables (pack.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.engine.backend import kernels
from mpissd.engine.backend.kernels import ceil_div
from mpissd.engine.model.transformer.checkpoint import Part
from mpissd.engine.model.transformer.cupy_ops.products import PAIR, TILE, PackedWeight

if TYPE_CHECKING:  # it imports CuPy
    from mpissd.engine.backend.cupy_device import Launcher

_STAGING_ELEMENTS = 1 << 26  # Of a checkpoint's matrix, brought to the device at once.


class Packer:
    """Packs the weights of the model `name` from a checkpoint's values, or from a recipe of random
    ones.

    All methods raise ConfigError for widths that the kernels do not support.
    """

    def __init__(self, launcher: Launcher, name: str) -> None:
        self._launcher, self._name = launcher, name

    def matrix(self, parts: Sequence[Part]) -> PackedWeight:
        """Packs parts side by side."""
        depth, widths = parts[0].shape[1], [part.shape[0] for part in parts]
        self._check(depth, widths[:-1])
        sizes = [ceil_div(width, TILE) * TILE * depth for width in widths]
        values, start = self._launcher.empty((sum(sizes),), np.float16), 0
        for part, size in zip(parts, sizes, strict=True):
            self._fill(values[start : start + size], part, part)
            start += size
        return PackedWeight(values, depth, sum(widths))

    def heads(self, parts: Sequence[Part], head: int) -> PackedWeight:
        """Packs parts side by side; a tile has 8 columns of a head's first half, and 8 that rotate
        with them. head: columns of a head."""
        depth, outputs = parts[0].shape[1], sum(part.shape[0] for part in parts)
        self._check(depth, [head // 2])
        values, start = self._launcher.empty((outputs * depth,), np.float16), 0
        for part in parts:
            for at in range(0, part.shape[0], head):
                middle = at + head // 2
                left, right = part.outputs(at, middle), part.outputs(middle, at + head)
                self._fill(values[start:], left, right)
                start += head * depth
        return PackedWeight(values, depth, outputs, head=head)

    def gate_up(self, gate: Part, up: Part) -> PackedWeight:
        """Packs gate and up so that a tile has 8 columns of each."""
        outputs, depth = gate.shape
        self._check(depth, [])
        size = ceil_div(outputs, TILE // 2) * TILE * depth
        values = self._launcher.empty((size,), np.float16)
        self._fill(values, gate, up)
        return PackedWeight(values, depth, outputs, gated=True)

    def table(self, embedding: Part) -> Any:
        """Returns an embedding table, float16 [entries, width]."""
        entries, width = embedding.shape
        table = self._launcher.empty((entries, width), np.float16)
        recipe = embedding.recipe()
        if recipe is not None:
            first, scale = np.uint32(recipe.out_start), np.float32(recipe.scale)
            key = np.uint32(recipe.key & 0xFFFFFFFF)
            args = (table, np.int64(entries), np.int32(width), key, first, scale)
            self._launch("fill_rows", entries * width, args)
            return table
        step = max(1, _STAGING_ELEMENTS // width)
        for first in range(0, entries, step):
            rows = embedding.outputs(first, min(first + step, entries)).read()
            self._launcher.upload(rows, table[first : first + len(rows)])
        return table

    def _fill(self, out: Any, left: Part, right: Part) -> None:
        """Fills tiles of 16 columns: 8 of `left`, then 8 of `right`.

        One part fills both halves of its own tiles, so that its columns are 16 apart from tile to
        tile; those of two parts, gate and up, are 8 apart.
        """
        outputs, depth = left.shape
        step = TILE if left is right else TILE // 2
        shift = step - TILE // 2  # the right half's first column

        def sizes(count: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            """Returns the lanes (of 16 bytes) and depths of the tiles of so many outputs; the
            columns that each half has from its first one on, and their step."""
            lanes = np.int64(ceil_div(count, step) * TILE * depth // 8)
            columns = np.int32(count), np.int32(count - shift), np.int32(step)
            return (lanes, np.int32(depth // PAIR), np.int32(depth)), columns

        random, other = left.recipe(), right.recipe()
        if random is not None and other is not None:
            around, columns = sizes(outputs)
            keys = [np.uint32(recipe.key & 0xFFFFFFFF) for recipe in (random, other)]
            first = np.uint32(random.out_start), np.uint32(other.out_start + shift)
            halves = np.uint32(random.in_start), keys[0], first[0], keys[1], first[1]
            args = (out, *around, *halves, *columns, np.float32(random.scale))
            self._launch("pack_random", int(around[0]), args)
            return
        # A stored matrix is copied to the device some columns at a time.
        count = max(1, _STAGING_ELEMENTS // (depth * step)) * step
        for start in range(0, outputs, count):
            stop = min(start + count, outputs)
            both = [
                self._launcher.uploaded(part.outputs(start, stop).read(), np.float32)
                for part in ([left] if left is right else [left, right])
            ]
            shifted = both[-1].ravel()[shift * depth :]
            around, columns = sizes(stop - start)
            sources = both[0], shifted if shifted.size else None, np.int64(depth)
            to = out[start // step * TILE * depth :]
            self._launch("pack_lanes", int(around[0]), (to, *around, *sources, *columns))

    def _launch(self, name: str, threads: int, args: tuple[Any, ...]) -> None:
        kernel = self._launcher.function(name, kernels.PACK)
        self._launcher.launch(kernel, (min(ceil_div(threads, 256), 1 << 16),), (256,), args)

    def _check(self, depth: int, inner_widths: list[int]) -> None:
        """Raises ConfigError for a depth, or widths of joined parts, that do not fit tiles."""
        if depth % PAIR:
            raise ConfigError(
                f"{self._name} on a GPU: a width of {depth}: allowed: multiples of {PAIR}"
            )
        if any(width % TILE for width in inner_widths):
            raise ConfigError(
                f"{self._name} on a GPU: {inner_widths}: allowed: multiples of {TILE}"
            )
