"""The table of operations of a whole forward in one kernel (kernels/whole.cu), and its geometry.

This module does not use a GPU: arrays are addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.backend.chain_plan import MAX_ROWS, PAIR, PRODUCT, ROW_TILE, THREADS
from mpissd.engine.model.transformer.cupy_ops import attention

__all__ = ["MAX_ROWS", "MODEL", "OPERATION", "THREADS", "Geometry", "Step", "geometry", "table"]
QKV, ATTEND, ADD, GATED, LOGITS = range(5)  # enum Kind
ATTENTION_NORM, FFN_NORM = 0, 1
OPERATION = np.dtype(  # struct Operation
    [*((name, PRODUCT[name]) for name in PRODUCT.names or ()), ("vector", np.uint64)]
    + [(name, np.int32) for name in ("kind", "layer", "columns", "norm")]
    + [("unused", np.uint64)]
)
MODEL = np.dtype(  # struct Model
    [(name, np.uint64) for name in ("hidden", "squares", "powers")]
    + [(name, np.uint64) for name in ("keys", "values", "lane_keys", "lane_values", "table")]
    + [(name, np.int32) for name in ("most_pages", "kv_heads", "steps", "gap")]
    + [(name, np.uint64) for name in ("seats", "turns", "attend_queries", "partial", "tops")]
    + [(name, np.int32) for name in ("heads", "splits")]
    + [(name, np.uint64) for name in ("queries", "task_count", "tasks", "finished", "merged")]
    + [(name, np.uint64) for name in ("page_layer", "lane_layer")]
    + [(name, np.int32) for name in ("most_rows", "width", "norm_rows", "gap_1")]
    + [(name, np.float32) for name in ("eps", "scale")]
)
_SLOT_PAIRS, _PIECE_BYTES, _PEERS_BYTES, _SEAT_BYTES = 16, 1 << 10, 88, 24
_SUM_BYTES = 8 * 4 * 129 * 4
_TILES, _LEAST_SLOTS, _MOST_SLOTS = 4, 8, 12  # of a unit; of weights
# By row tiles. One team leaves two slots more in the ring; more rows have more tasks to attend.
_TEAMS = {1: 1, 2: 2, 3: 2, 4: 2}  # that attend in a block
_AHEAD = {1: 2, 2: 3, 3: 3, 4: 2}  # slots of x ahead
_FLYING = {1: 3, 2: 4, 3: 4, 4: 4}  # copies of weights under way
extra_macros: tuple[tuple[str, int], ...] = ()  # set by a program that traces the kernel


@dataclass(frozen=True)
class Geometry:
    """The macros that whole.cu is compiled with."""

    row_tiles: int
    slots: int
    team_bytes: int
    shared_bytes: int
    head: int
    page: int

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """Names and values of all macros."""
        return (
            ("ORDERED", 1),
            ("ROW_TILES", self.row_tiles),
            ("TILES", _TILES),
            ("AHEAD", _AHEAD[self.row_tiles]),
            ("FLYING", _FLYING[self.row_tiles]),
            ("SLOTS", self.slots),
            ("TEAMS", _TEAMS[self.row_tiles]),
            ("TEAM_BYTES", self.team_bytes),
            ("SHARED_BYTES", self.shared_bytes),
            ("HEAD", self.head),
            ("PAGE", self.page),
            ("QUERY_TILES", attention.QUERY_TILES),
            *extra_macros,
        )

    @property
    def fits(self) -> bool:
        """Whether a block's shared memory has room for a ring that bridges waits."""
        return self.slots >= _LEAST_SLOTS


def geometry(rows: int, head: int, page: int, room: int) -> Geometry:
    """Returns the geometry of a forward of so many rows, with as many slots of weights as fit.

    head: head_dim. room: bytes of shared memory that a block may have.
    """
    row_tiles = -(-rows // ROW_TILE)
    team = _TEAMS[row_tiles] * _task_bytes(head)
    columns = _AHEAD[row_tiles] * _SLOT_PAIRS * row_tiles * 16 * 32
    rest = max(columns + _SUM_BYTES, team) + _PEERS_BYTES + 32 + MODEL.itemsize
    rest += row_tiles * ROW_TILE * _SEAT_BYTES + 2 * OPERATION.itemsize
    rest += row_tiles * ROW_TILE * 4
    size = _SLOT_PAIRS * _PIECE_BYTES
    slots = min(_MOST_SLOTS, (room - rest) // (size + 16))
    return Geometry(row_tiles, slots, team, slots * (size + 16) + rest, head, page)


def _task_bytes(head: int) -> int:
    """Returns ATTEND_BYTES: values, or the warps' sums in their place, then tops and weights."""
    queries = 16 * attention.QUERY_TILES
    values = attention.SPLIT * (2 * head + 16)
    return max(values, 4 * 4 * queries * (head + 4)) + 8 * 4 * queries + 16 * queries


@dataclass(frozen=True)
class Step:
    """One operation; addresses of device arrays. weight 0: an attention.

    depth: inputs; tiles: of 16 columns; columns: of `out`. vector, norm: see struct Operation.
    """

    kind: int
    layer: int
    weight: int = 0
    x: int = 0
    out: int = 0
    depth: int = 0
    tiles: int = 0
    columns: int = 0
    vector: int = 0
    norm: int = ATTENTION_NORM


def table(steps: Iterator[Step], rows: int) -> NDArray[Any]:
    """Returns the kernel's table, OPERATION [n], for a forward of so many rows."""
    every = list(steps)
    out = np.zeros(len(every), OPERATION)
    for row, step in zip(out, every, strict=True):
        for field in fields(Step):
            if field.name != "depth":
                row[field.name] = getattr(step, field.name)
        row["x_step"], row["out_step"], row["rows"] = step.depth, step.columns, rows
        row["pairs"], row["group_tiles"] = step.depth // PAIR, step.tiles
    return out
