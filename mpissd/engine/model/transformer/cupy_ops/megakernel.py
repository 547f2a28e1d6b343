"""All layers and the LM head of a forward of up to 32 rows as one persistent kernel, a megakernel.

kernels/whole.cu reads a table of operations. It needs compute capability 9.0, a model on one GPU,
and no norm of q and k. RMSNorm is split in two (arithmetic.cu), and q and k are stored in the order
of their rotation, so that no operation is needed between two products. Larger forwards use separate
kernels with the same bits (late.cu).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.backend import kernels
from mpissd.engine.backend.chain_plan import MAX_ROWS, PAIR, PRODUCT, ROW_TILE, THREADS
from mpissd.engine.model.transformer.cache import CacheSizes, RowPlaces
from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.cupy_ops import attention
from mpissd.engine.model.transformer.cupy_ops.attention import Attention, Cache, task_bytes
from mpissd.engine.model.transformer.cupy_ops.ops import CupyOps
from mpissd.engine.model.transformer.cupy_ops.products import Normed, PackedWeight
from mpissd.engine.model.transformer.ops import Part

if TYPE_CHECKING:  # it imports CuPy
    from mpissd.engine.backend.cupy_device import Launcher

FIRST_CAPABILITY = 90
OPERATIONS = 5  # of a layer
_LIMIT_NS = 2 * 10**9  # how long blocks wait for one another before they give up
_NORM_THREADS, _MAX_WIDTH = 512, 16384
_NORM_BYTES = 4 * _MAX_WIDTH // 16  # its tiles' squares
QKV, ATTEND, ADD, GATED, LOGITS = range(5)  # enum Kind
FFN_NORM = 1  # of the two norms; 0: attention's, or the head's
OPERATION = np.dtype(  # struct Operation
    [*((name, PRODUCT[name]) for name in PRODUCT.names or ()), ("vector", np.uint64)]
    + [(name, np.int32) for name in ("kind", "layer", "columns", "norm")]
    + [("padding", np.uint64)]
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
        )

    @property
    def fits(self) -> bool:
        """Whether a block's shared memory has room for a ring that bridges waits."""
        return self.slots >= _LEAST_SLOTS


def geometry_of(rows: int, head: int, page: int, room: int) -> Geometry:
    """Returns the geometry of a forward of so many rows, with as many slots of weights as fit.

    head: head_dim. room: bytes of shared memory that a block may have.
    """
    row_tiles = -(-rows // ROW_TILE)
    team = _TEAMS[row_tiles] * task_bytes(head)
    columns = _AHEAD[row_tiles] * _SLOT_PAIRS * row_tiles * 16 * 32
    rest = max(columns + _SUM_BYTES, team) + _PEERS_BYTES + 32 + MODEL.itemsize
    rest += row_tiles * ROW_TILE * _SEAT_BYTES + 2 * OPERATION.itemsize
    rest += row_tiles * ROW_TILE * 4
    size = _SLOT_PAIRS * _PIECE_BYTES
    slots = min(_MOST_SLOTS, (room - rest) // (size + 16))
    return Geometry(row_tiles, slots, team, slots * (size + 16) + rest, head, page)


def table(steps: Iterator[dict[str, int]], rows: int) -> NDArray[Any]:
    """Returns the kernel's table, OPERATION [n], for a forward of so many rows."""
    every = list(steps)
    out = np.zeros(len(every), OPERATION)
    out["rows"] = rows
    for row, step in zip(out, every, strict=True):
        for name, value in step.items():
            row[name] = value
    return out


class Megakernel:
    """Launches forwards of one model; `stop` is the backend's page-locked stop word.

    least_hidden: narrower models use separate kernels, which are faster for them: 30 layers of
    SmolLM2-135M (576) wait five times each for all blocks, for 7 MB of weights. wide: narrower
    models use the megakernel for up to few_rows rows: 24 lanes of 1B (2,048) took 1.34 ms with it
    and 1.30 ms with separate kernels of the same bits (docs/performance.md).
    """

    least_hidden, wide = 2048, 4096
    few_rows, most_rows = 16, MAX_ROWS

    def __init__(
        self, launcher: Launcher, config: TransformerConfig, attention: Attention, stop: Any
    ) -> None:
        self._launcher, self._config, self._attention = launcher, config, attention
        self._stop = stop

    def suits(self, rows: int) -> bool:
        """Returns whether a forward of so many rows can be one kernel."""
        is_wide = self._config.shape.hidden >= self.wide
        most = self.most_rows if is_wide else min(self.few_rows, self.most_rows)
        return rows <= most and self._geometry(rows).fits

    def launch(
        self,
        weights: Any,
        memory: Any,
        cache: Any,
        rows: int,
        count: int = 0,
    ) -> None:
        """Computes all layers and the LM head, after the first norm.

        count: operations of the table to compute; 0: all.
        """
        if rows not in cache.tables:
            steps = table(_steps(weights, memory), rows), self._model(memory, cache)
            cache.tables[rows] = tuple(
                self._launcher.uploaded(array.view(np.int32), np.int32) for array in steps
            )
        operations, model = cache.tables[rows]
        geometry = self._geometry(rows)
        shared = geometry.shared_bytes
        kernel = self._launcher.function("whole", kernels.WHOLE, geometry.macros, shared)
        every = OPERATIONS * len(weights.layers) + 1
        stop, limit = np.uintp(self._stop.ctypes.data), np.uint64(_LIMIT_NS)
        args = (operations, np.int32(count or every), model, np.int32(rows), stop, limit)
        grid = (self._launcher.multiprocessors,)
        self._launcher.launch(kernel, grid, (THREADS,), args, shared)

    def _geometry(self, rows: int) -> Geometry:
        head, room = self._config.shape.head_dim, self._launcher.shared_bytes
        return geometry_of(rows, head, self._attention.page, room)

    def _model(self, memory: Any, cache: Any) -> Any:
        """Returns struct Model."""
        model, shape, every = np.zeros(1, MODEL), memory.x.shape, vars(cache)
        finished = address(cache.counters)
        done = OPERATIONS * cache.sizes.layers + 1
        pointers = {name: address(every[name]) for name in _OF_CACHE} | {
            "hidden": address(memory.hidden),
            "squares": address(memory.x.squares),
            "powers": address(memory.x.powers),
            "table": address(cache.words) + 4 * 4 * shape[0],
            "seats": address(cache.words),
            "attend_queries": address(memory.q),
            "queries": address(memory.q),
            "task_count": address(cache.count),
            "finished": finished,
            "merged": finished + 4 * done,
        }
        numbers = {
            "most_pages": cache.sizes.pages_per_slot,
            "kv_heads": cache.sizes.kv_heads,
            "steps": max(1, cache.sizes.steps),
            "heads": memory.q.shape[1] // cache.sizes.head_dim,
            "splits": cache.splits,
            "page_layer": cache.keys[0].size,
            "lane_layer": cache.lane_keys[0].size,
            "most_rows": shape[0],
            "width": shape[1],
            "norm_rows": memory.x.squares.shape[1],
            "eps": self._config.norm_eps,
            "scale": self._attention.scale,
        }
        for name, value in (pointers | numbers).items():
            model[name] = value
        return model


def _steps(weights: Any, memory: Any) -> Iterator[dict[str, int]]:
    """Yields the operations of a forward in their order, by the names of struct Operation."""
    last, x = len(weights.layers) - 1, memory.x.values
    for n, layer in enumerate(weights.layers):
        following = weights.norm if n == last else weights.layers[n + 1].attention_norm
        yield _product(QKV, n, layer.qkv, x, memory.q, layer.qkv_bias)
        yield {"kind": ATTEND, "layer": n, "out": address(memory.attended)}
        yield _product(ADD, n, layer.o, memory.attended, x, layer.ffn_norm)
        yield _product(GATED, n, layer.gate_up, x, memory.inner, norm=FFN_NORM)
        yield _product(ADD, n, layer.down, memory.inner, x, following, norm=FFN_NORM)
    yield _product(LOGITS, last + 1, weights.head, x, memory.logits)


def counters(layers: int, kv_heads: int) -> int:
    """Returns the counters of a forward: of blocks by operation, of tasks by layer and KV head."""
    return OPERATIONS * layers + 1 + layers * kv_heads


_OF_CACHE = ("keys", "values", "lane_keys", "lane_values", "turns", "partial", "tops", "tasks")


def address(array: Any) -> int:
    """Returns where a device array, or the emulator's NumPy array, begins; 0 for None."""
    if array is None:
        return 0
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _product(
    kind: int, layer: int, weight: PackedWeight, x: Any, out: Any, vector: Any = None, norm: int = 0
) -> dict[str, int]:
    addresses = {"weight": weight.values, "x": x, "out": out, "vector": vector}
    return {
        **{name: address(array) for name, array in addresses.items()},
        "kind": kind,
        "layer": layer,
        "x_step": weight.depth,
        "out_step": weight.columns,
        "columns": weight.columns,
        "pairs": weight.depth // PAIR,
        "tiles": weight.tiles,
        "group_tiles": weight.tiles,
        "norm": norm,
    }


def shares_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a daemon of CUDA's MPS may give parts of the GPU to other processes.

    The kernel's blocks wait for one another, so all of them have to be on the GPU at once.
    """
    return Path(environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


@dataclass(frozen=True)
class MegakernelCache(Cache):
    """A cache with the counters and tables of the kernel `whole`.

    counters: uint32, set to 0 by the first norm of a forward. tables: on the device, by rows.
    """

    counters: Any = None
    tables: dict[int, Any] = field(default_factory=dict)


class MegakernelOps(CupyOps):
    """Operations of one model on one GPU of compute capability 9.0 or more."""

    kernel = "whole"

    def __init__(self, backend: Any, config: TransformerConfig, **sizes: Any) -> None:
        super().__init__(backend, config, **sizes)
        self._megakernel = Megakernel(self._launcher, config, self._attention, backend.stop)

    @classmethod
    def suits(cls, backend: Any, config: TransformerConfig, heads: int) -> bool:
        """Returns whether these operations compute so many heads of a model on this GPU."""
        shape = config.shape
        capability = int(str(backend.info.compute_capability).replace(".", ""))
        if heads < shape.num_heads or shape.hidden < Megakernel.least_hidden:
            return False
        if config.qk_norm or config.kind or capability < FIRST_CAPABILITY or shares_gpu():
            return False
        room = backend.launcher(early=cls.early).shared_bytes
        return geometry_of(1, shape.head_dim, 0, room).fits

    def qkv_matrix(self, checkpoint: Checkpoint, parts: Sequence[Part]) -> PackedWeight:
        """Packs q, k and v so that a tile has 8 columns of a head's first half, and 8 that rotate
        with them."""
        sized = [(part, self._size(part)) for part in parts]
        return self._packer.heads(checkpoint, sized, self._config.shape.head_dim)

    def normed(self, rows: int, width: int) -> Normed:
        return Normed.over(self._launcher, self.buffer(rows, width))

    def cache(self, sizes: CacheSizes, seats: RowPlaces) -> MegakernelCache:
        made = self._attention.cache(sizes, seats)
        count = counters(sizes.layers, sizes.kv_heads)
        return MegakernelCache(**vars(made), counters=self._launcher.zeros((count,), np.int32))

    def norm(
        self,
        hidden: Any,
        delta: Any | None,
        weight: Any,
        x: Normed,
        rows: int,
        zeroed: Any = None,
    ) -> None:
        """Sets x as Ops.norm does, in two parts (late.cu), and the counters `zeroed` to 0."""
        sizes = np.int32(hidden.shape[1]), np.float32(self._config.norm_eps)
        words = np.int32(0 if zeroed is None else zeroed.size)
        args = (hidden, delta, weight, x.values, *x.state, *sizes, zeroed, words)
        kind = "float32" if delta is None else str(delta.dtype)
        kernel = self._launcher.function(f"late_norm_{kind}", kernels.LATE)
        self._launcher.launch(kernel, (rows,), (_NORM_THREADS,), args, _NORM_BYTES)

    def at_once(self, weights: Any, memory: Any, cache: Any, rows: int) -> bool:
        if not self._megakernel.suits(rows):
            return False
        first = weights.layers[0].attention_norm
        self.norm(memory.hidden, None, first, memory.x, rows, cache.counters)
        self._megakernel.launch(weights, memory, cache, rows)
        return True


def chosen(backend: Any, config: TransformerConfig, *, heads: int, **sizes: Any) -> CupyOps:
    """Returns the operations of a model's share of heads; raises as CupyOps."""
    kind = MegakernelOps if MegakernelOps.suits(backend, config, heads) else CupyOps
    return kind(backend, config, heads=heads, **sizes)
