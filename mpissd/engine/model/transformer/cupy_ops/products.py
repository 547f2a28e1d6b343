"""Products of a few rows with packed weights, the same bits for any number of rows (skinny.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpissd.engine.backend import kernels
from mpissd.engine.backend.kernels import ceil_div

if TYPE_CHECKING:  # it imports CuPy
    from mpissd.engine.backend.cupy_device import Launcher

TILE, PAIR, ROW_TILE = 16, 32, 8
_FEW_ROW_TILES = 4  # Row tiles of a block with few columns; more rows form groups.
_THREADS = 256
_STAGES = {  # Copies under way, by (tiles of columns, tiles of rows): two or three blocks fit.
    (1, 1): 6, (1, 2): 5, (1, 3): 4, (1, 4): 4, (2, 1): 5, (2, 2): 4, (2, 3): 3, (2, 4): 3,
}  # fmt: skip
_WIDE_TILES = 1024  # From so many tiles on a block has two, which halves its reads of x.
# Blocks for more than 32 rows: (tiles of columns, tiles of rows, stages). Then the cache's rate is
# the limit: a block reads as many bytes as columns and rows together, for columns times rows.
_LARGE = ((4, 8, 3), (2, 8, 4))
_MIN_BLOCKS = 96  # The fewest large blocks: fewer leave much of a GPU idle.


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the order of skinny.cu: `columns` outputs, padded to tiles of 16.

    gated: the columns of gate and up alternate by 8, and an output is a pair of them. head: with
    heads of so many columns, a tile has 8 of a head's first half and those that rotate with them.
    """

    values: Any
    depth: int
    columns: int
    gated: bool = False
    head: int = 0

    @property
    def tiles(self) -> int:
        """Tiles of columns."""
        return int(self.values.size) // (self.depth * TILE)


@dataclass(frozen=True)
class Normed:
    """Rows of the residual stream times a norm's weight, and the factors that complete the norm.

    values: float16 [rows, width], times a power of two. squares: float32 [2, rows, width / 16], the
    sum of each tile. norms, powers, factors: float32 [rows], 1 / rms, the power of two, and the
    factor of sums over `values`. A whole forward in one kernel has two norms in turn, the others
    the first.
    """

    values: Any
    squares: Any
    norms: Any
    powers: Any  # [2, rows]
    factors: Any

    @classmethod
    def over(cls, launcher: Launcher, values: Any) -> Normed:
        """Allocates what `values` need."""
        rows, width = values.shape
        shapes = (2, rows, width // TILE), (rows,), (2, rows), (rows,)
        return cls(values, *(launcher.zeros(shape, np.float32) for shape in shapes))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def state(self) -> tuple[Any, ...]:
        """The arrays that the kernels `late_norm_…` write with the values."""
        return self.squares, self.norms, self.powers, self.factors


def values_and_factors(x: Any) -> tuple[Any, Any]:
    """Returns an operand's rows, and what sums over each row are multiplied by (None: 1)."""
    return (x.values, x.factors) if isinstance(x, Normed) else (x, None)


def multiply(launcher: Launcher, x: Any, weight: PackedWeight, out: Any, rows: int) -> None:
    """Sets out[:rows] = x[:rows] @ weight, in out's type; gated weights give silu(gate) up."""
    x, factors = values_and_factors(x)
    every, row_tiles = weight.tiles, min(_FEW_ROW_TILES, ceil_div(rows, ROW_TILE))
    tiles = 2 if every >= _WIDE_TILES and every % 2 == 0 else 1
    stages = _STAGES[tiles, row_tiles]
    for kind in _LARGE if rows > ROW_TILE * _FEW_ROW_TILES else ():
        blocks = every // kind[0] * ceil_div(rows, ROW_TILE * kind[1])
        fits = _shared_bytes(*kind) <= launcher.shared_bytes
        if every % kind[0] == 0 and blocks >= _MIN_BLOCKS and fits:
            tiles, row_tiles, stages = kind
            break
    macros = (("ROW_TILES", row_tiles), ("TILES", tiles), ("STAGES", stages))
    shared = _shared_bytes(tiles, row_tiles, stages)
    name = f"skinny_{'gated' if weight.gated else out.dtype}"
    blocks = every // tiles * ceil_div(rows, ROW_TILE * row_tiles)
    source = (x, np.int64(x.shape[1]), weight.values, np.int32(weight.depth // PAIR))
    to = (out, np.int64(out.shape[1]), np.int32(rows), np.int32(weight.columns), factors)
    assert x.shape[1] == weight.depth and out.shape[1] == weight.columns
    grid, args = (blocks,), (*source, *to)
    launcher.launch(name, kernels.SKINNY, grid, (_THREADS,), args, shared, macros)


def _shared_bytes(tiles: int, row_tiles: int, stages: int) -> int:
    return stages * _THREADS * (32 * tiles + 16 * row_tiles)
