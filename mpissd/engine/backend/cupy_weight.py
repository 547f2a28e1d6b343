"""Weights on a GPU, filled in place in the element order that their products read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpissd.engine.backend.base import WeightPart
from mpissd.engine.backend.chain_plan import PAIR, TILE, pack, suits, unpack
from mpissd.engine.backend.cupy_device import ceil_div, device_empty, step

HALF = np.dtype(np.float16)
Launch = Callable[..., None]


@dataclass(frozen=True)
class Weight:
    """A weight: row-major [in, out], or packed in the chain's order in an array of that shape."""

    values: Any
    packed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out), for either order."""
        rows, columns = self.values.shape
        return rows, columns

    def row_major(self, values: Any) -> Any:
        """Converts this weight's host copy to row-major order."""
        return unpack(values) if self.packed else values

    def in_order(self, values: Any) -> Any:
        """Converts row-major host values to this weight's order."""
        return pack(values) if self.packed else values


def made(parts: Sequence[WeightPart], packs: bool, launch: Launch) -> Weight:
    """Makes one weight from these parts, side by side.

    packs: whether to store it in the chain's order if its shape allows it.
    """
    rows = parts[0].in_stop - parts[0].in_start
    widths = [part.out_stop - part.out_start for part in parts]
    values = device_empty((rows, sum(widths)), HALF)
    packed = packs and suits(rows, sum(widths)) and all(width % TILE == 0 for width in widths)
    column = 0
    for part, width in zip(parts, widths, strict=True):
        if packed:
            _fill_packed(launch, values.data.ptr + values.itemsize * rows * column, part)
        else:
            fill(launch, values[:, column : column + width], part)
        column += width
    return Weight(values, packed)


def fill(launch: Launch, out: Any, part: WeightPart) -> None:
    """Fills a row-major array with the values of a part."""
    rows, columns = out.shape
    grid = (ceil_div(columns, 8 * 32), min(ceil_div(rows, 8), 65535))
    sizes = (np.int32(rows), np.int32(columns))
    key, first, scale = _numbers(part)
    launch("fill", grid, (32, 8), (out, np.int64(step(out)), key, *first, *sizes, scale))


def _fill_packed(launch: Launch, address: int, part: WeightPart) -> None:
    rows, columns = part.in_stop - part.in_start, part.out_stop - part.out_start
    lanes = rows * columns // 8
    key, first, scale = _numbers(part)
    args = (np.uintp(address), np.int64(lanes), np.int32(rows // PAIR), key, *first, scale)
    launch("fill_packed", (min(ceil_div(lanes, 256), 1 << 16),), (256,), args)


def _numbers(part: WeightPart) -> tuple[Any, tuple[Any, Any], Any]:
    first = (np.uint32(part.in_start), np.uint32(part.out_start))
    return np.uint32(part.key & 0xFFFFFFFF), first, np.float32(part.scale)
