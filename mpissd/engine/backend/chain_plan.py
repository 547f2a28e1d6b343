"""Prepares the inputs of the persistent kernel that computes a chain of matrix products
(kernels/chain.cu): the table of products, and weights in the kernel's layout.

The module does not use CuPy: operands are addresses, so that it can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TILE = 16  # weight columns in a tile
PAIR = 32  # weight rows (inputs) that a pair of the kernel's steps multiplies, 16 a step
ROW_TILE = 8
MAX_ROWS = 4 * ROW_TILE  # the most rows of x in one product of the kernel
_WARPS = 8
THREADS = 32 * (_WARPS + 1)  # A block has one more warp, which copies weights.
PRODUCT = np.dtype(  # the layout of struct Product in plan.cu
    [(name, np.uint64) for name in ("weight", "x", "out")]
    + [(name, np.int32) for name in ("x_step", "out_step", "rows", "pairs", "tiles")]
    + [(name, np.int32) for name in ("after", "awaited", "exchange", "group_tiles", "before")]
)
_PACKED = (2, 8, 4, 2, 2, 2)  # sizes of a packed weight's axes after column tile and row pair
_ROW_AXES = (1, 4, 2, 5, 7)  # axes of (tile, pair, *_PACKED) whose indices make a row number
_COLUMN_AXES = (0, 6, 3)  # axes of (tile, pair, *_PACKED) whose indices make a column number


@dataclass(frozen=True)
class ChainGeometry:
    """Compile-time sizes of the kernel chain.cu for inputs x of up to `row_tiles` tiles of 8 rows.
    tiles: tiles of 16 weight columns that a thread block computes at once. slots: the slots of a
    block's ring buffer, into which weights are copied. ahead: for how many slots x is prefetched.
    flying: the copies in flight."""

    row_tiles: int
    tiles: int
    slots: int
    ahead: int
    flying: int

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory that a thread block needs."""
        weights = self.slots * ((16 << 10) + 2 * 8)  # A slot holds 16 KiB and two barriers.
        columns = self.ahead * self.row_tiles * 32 * 32 * _WARPS
        peers = 88
        return weights + columns + _WARPS * 4 * 130 * 4 + peers

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        return tuple((name.upper(), value) for name, value in vars(self).items())


GEOMETRIES = {  # the sizes by the number of 8-row tiles of x
    1: ChainGeometry(1, tiles=8, slots=11, ahead=4, flying=3),
    2: ChainGeometry(2, tiles=8, slots=10, ahead=3, flying=4),
    3: ChainGeometry(3, tiles=6, slots=8, ahead=3, flying=4),
    4: ChainGeometry(4, tiles=4, slots=8, ahead=2, flying=4),
}


class Operand(NamedTuple):
    """A float16 matrix [rows, width] at a device address; `step` elements separate its rows."""

    address: int
    rows: int
    width: int
    step: int

    def part(self, first: int, rows: int) -> Operand:
        """Returns `rows` rows of the operand, starting with row `first`."""
        return self._replace(address=self.address + 2 * first * self.step, rows=rows)

    def meets(self, other: Operand) -> bool:
        """Returns whether the two operands can have an element in common."""
        ends = [o.address + 2 * ((o.rows - 1) * o.step + o.width) for o in (self, other)]
        if self.address >= ends[1] or other.address >= ends[0]:
            return False
        if self.step != other.step:
            return True
        # Operands with equal steps may be column ranges of one buffer that do not overlap.
        apart = (other.address - self.address) // 2 % self.step
        return apart < self.width or apart + other.width > self.step


class Multiplication(NamedTuple):
    """One product out = x @ weight, with the packed weight at an address. summed: whether the
    result is then summed over the ranks."""

    weight: int
    x: Operand
    out: Operand
    summed: bool = False

    def depends_on(self, other: Multiplication) -> bool:
        """Returns whether the product must wait for `other`, which comes earlier in the chain."""
        reads = self.x.meets(other.out)
        return reads or self.out.meets(other.x) or self.out.meets(other.out)

    def row_groups(self) -> list[Multiplication]:
        """Splits the product into products of nearly equally many rows of x, at most MAX_ROWS each,
        which the kernel computes at once."""
        count = -(-self.x.rows // MAX_ROWS)
        edges = (self.x.rows * i // count for i in range(count + 1))
        return [
            self._replace(x=self.x.part(a, b - a), out=self.out.part(a, b - a))
            for a, b in pairwise(edges)
        ]


def suits(rows: int, columns: int) -> bool:
    """Returns whether a weight [rows, columns] can be packed for the kernel: whether its rows are a
    multiple of 32, and its columns of 16."""
    return rows > 0 and rows % PAIR == 0 and columns > 0 and columns % TILE == 0


def aligned(x: Operand, out: Operand) -> bool:
    """Returns whether x can be read 16 bytes at a time and `out` be written 4 bytes at a time:
    whether their addresses and the distances of their rows are multiples of so many bytes."""
    return not (x.address % 16 or x.step % 8 or out.address % 4 or out.step % 2)


def row_tiles(table: NDArray[Any]) -> int:
    """Returns the number of row tiles (8 rows of x each) of the table's largest product."""
    return -(-int(table["rows"].max()) // ROW_TILE)


def plan(chain: Sequence[Multiplication]) -> NDArray[Any]:
    """Returns the table of a chain of products that the kernel reads: PRODUCT [n].

    A product waits for the last product before it whose output it reads or overwrites, or whose
    input it overwrites. Sums over ranks keep their order, because two of them may use the same slot
    of the inboxes (the buffers into which other ranks write). Neighbouring products that have the
    same x and need not wait for each other are divided among the thread blocks like one product.
    """
    parts = [part for product in chain for part in product.row_groups()]
    table = np.zeros(len(parts), PRODUCT)
    exchanges = 0
    last_summed = -1
    group = 0
    for i, part in enumerate(parts):
        after = next((j for j in range(i - 1, -1, -1) if part.depends_on(parts[j])), -1)
        after = max(after, last_summed) if part.summed else after
        exchanges += part.summed
        row = table[i]
        row["weight"] = part.weight
        row["x"] = part.x.address
        row["out"] = part.out.address
        row["x_step"] = part.x.step
        row["out_step"] = part.out.step
        row["rows"] = part.x.rows
        row["pairs"] = part.x.width // PAIR
        row["tiles"] = part.out.width // TILE
        row["after"] = after
        row["exchange"] = exchanges if part.summed else 0
        if part.x != parts[group].x or after >= group:
            group = i
        row["before"] = table["tiles"][group:i].sum()
        table["group_tiles"][group : i + 1] = row["before"] + row["tiles"]
        last_summed = i if part.summed else last_summed
    table["awaited"][table["after"][table["after"] >= 0]] = 1
    table["awaited"][-1] = 1
    return table


def pack(values: Any) -> Any:
    """Returns a weight [rows, columns] with its elements in the order that chain.cu reads."""
    rows, columns = values.shape
    axes = (rows // PAIR, 4, 2, 2, 2, columns // TILE, 2, 8)
    order = np.argsort(_ROW_AXES + _COLUMN_AXES)
    return values.reshape(axes).transpose(*order).reshape(rows, columns).copy()


def unpack(packed: Any) -> Any:
    """Reverses `pack`: returns the weight with its elements in row-major order."""
    rows, columns = packed.shape
    axes = (columns // TILE, rows // PAIR, *_PACKED)
    return packed.reshape(axes).transpose(*_ROW_AXES, *_COLUMN_AXES).reshape(rows, columns).copy()
