"""One persistent kernel (a megakernel) for all layers and the LM head of up to 24 rows.

The kernel, kernels/whole.cu, reads a table of operations. It needs compute capability 9.0 and no
norm of q and k. Kernels of several ranks run together and add up over the inboxes of
OneshotGroup. RMSNorm is split in two: a product's input is multiplied by the norm's weight, and the
product's sums by 1 / rms. q and k are stored in the order of their rotation, so that no operation
is needed between two products. Larger forwards, and other collectives, use separate kernels that
give the same bits.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpissd.engine.backend import kernels
from mpissd.engine.backend.chain_plan import PAIR, PRODUCT, ROW_TILE, THREADS
from mpissd.engine.model.transformer.cache import CacheSizes, RowPlaces
from mpissd.engine.model.transformer.checkpoint import Part
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.cupy_ops.draws import address
from mpissd.engine.model.transformer.cupy_ops.ops import (
    QUERY_TILES,
    CupyOps,
    GpuCache,
    Normed,
    PackedWeight,
    capability_of,
    task_bytes,
)

OPERATIONS = 5  # of a layer
_LIMIT_NS = 2 * 10**9  # longest wait of the kernel's blocks for one another, in nanoseconds
_NORM_THREADS = 512
_NORM_BYTES = 4 * 16384 // 16  # bytes for a float32 per 16 columns of the widest row, 16,384
QKV, ATTEND, ADD, GATED, LOGITS = range(5)  # enum Kind
FFN_NORM = 1  # value of Operation.norm for the FFN's RMSNorm; 0 stands for any other RMSNorm
OPERATION = np.dtype(  # struct Operation
    [*((name, PRODUCT[name]) for name in PRODUCT.names or ()), ("vector", np.uint64)]
    + [(name, np.int32) for name in ("kind", "layer", "columns", "norm")]
    + [("padding", np.uint64)]
)
MODEL = np.dtype(  # struct Model
    [(name, np.uint64) for name in ("hidden", "squares", "powers", "x", "other_x", "inner")]
    + [(name, np.uint64) for name in ("keys", "values", "lane_keys", "lane_values", "table")]
    + [(name, np.int32) for name in ("most_pages", "kv_heads", "steps", "gap")]
    + [(name, np.uint64) for name in ("seats", "turns", "attend_queries", "out", "partial", "tops")]
    + [(name, np.int32) for name in ("heads", "splits")]
    + [(name, np.uint64) for name in ("queries", "task_count", "tasks", "finished", "merged")]
    + [(name, np.uint64) for name in ("page_layer", "lane_layer")]
    + [(name, np.int32) for name in ("most_rows", "width", "inner_width", "norm_rows", "exchanges")]
    + [(name, np.float32) for name in ("eps", "scale")]
    + [("gap_1", np.int32)]
)
_SLOT_PAIRS = 16
_PEERS_BYTES = 88
_SUM_BYTES = 8 * 4 * 129 * 4
_ROW_BYTES = 36
_ITEM_BYTES = 16 * 48
_HELPERS = 3  # warps beside those that multiply and the one that reads weights
_THREADS = THREADS + 32 * _HELPERS


# By number of 8-row tiles: (4-warp teams for attention, prefetched slots of x, weight copies, tiles
# whose sums are finished at once). More rows need more teams; each takes two slots of weights.
_SIZES = {1: (1, 3, 4, 1), 2: (2, 3, 4, 2), 3: (2, 2, 4, 3)}


class MegakernelGeometry(NamedTuple):
    """Compile-time parameters of the megakernel whole.cu, which depend on a forward's rows. slots:
    the slots of a thread block's ring buffer, into which weights are loaded ahead. macros: the
    (name, value) of the preprocessor's constants."""

    slots: int
    shared_bytes: int
    macros: tuple[tuple[str, int], ...]

    @property
    def fits(self) -> bool:
        """Whether the ring buffer has enough slots to keep loading weights while blocks wait."""
        return self.slots >= 7


def geometry_of(
    rows: int, head: int, page: int, room: int, *, sharded: bool = False
) -> MegakernelGeometry:
    """Returns the megakernel's parameters for `rows` rows, with as many ring slots as fit, at most
    12. head: head_dim. page: positions of a KV page. room: bytes of a block's shared memory.
    sharded: whether several ranks share the model."""
    row_tiles = -(-rows // ROW_TILE)
    teams, ahead, flying, rounds = _SIZES[row_tiles]
    team_bytes = teams * task_bytes(head)
    columns = ahead * _SLOT_PAIRS * row_tiles * 16 * 32
    rest = max(columns + rounds * _SUM_BYTES, team_bytes)
    rest += 2 * 8 + _PEERS_BYTES + 32 + MODEL.itemsize + 2 * OPERATION.itemsize
    rest += row_tiles * ROW_TILE * _ROW_BYTES + teams * _ITEM_BYTES
    size = _SLOT_PAIRS * 1024 + 16
    slots = min(12, (room - rest) // size)
    macros = {
        "ORDERED": 1,
        "ROW_TILES": row_tiles,
        "TILES": 4,  # of a unit
        "AHEAD": ahead,
        "FLYING": flying,
        "SHARED_ROUNDS": rounds,
        "SLOTS": slots,
        "TEAMS": teams,
        "TEAM_BYTES": team_bytes,
        "HELPERS": _HELPERS,
        "SHARED_BYTES": slots * size + rest,
        "HEAD": head,
        "PAGE": page,
        "QUERY_TILES": QUERY_TILES,
        "SHARDED": int(sharded),
    }
    return MegakernelGeometry(slots, slots * size + rest, tuple(macros.items()))


_OF_CACHE = ("keys", "values", "lane_keys", "lane_values", "turns", "partial", "tops", "tasks")


def _steps(weights: Any, memory: Any) -> Iterator[dict[str, int]]:
    """Yields a forward's operations in order, each as the fields of the kernel's struct Operation
    by name. weights, memory: the model's TransformerWeights and Buffers."""

    def product(
        kind: int,
        weight: PackedWeight,
        x: Any,
        out: Any,
        vector: Any = None,
        norm: int = 0,
        **more: int,
    ) -> dict[str, int]:
        return {
            "weight": address(weight.values),
            "x": address(x),
            "out": address(out),
            "vector": address(vector),
            "kind": kind,
            "layer": n,
            "x_step": weight.depth,
            "out_step": weight.columns,
            "columns": weight.columns,
            "pairs": weight.depth // PAIR,
            "tiles": weight.tiles,
            "group_tiles": weight.tiles,
            "norm": norm,
            "after": -1,
            **more,
        }

    layers = weights.layers
    x = memory.x.values
    other = memory.x.other
    norms = [*(layer.attention_norm for layer in layers[1:]), weights.norm]
    for n, (layer, following) in enumerate(zip(layers, norms, strict=True)):
        at = OPERATIONS * n
        yield product(QKV, layer.qkv, x, memory.q, layer.qkv_bias, awaited=1)
        yield {"kind": ATTEND, "layer": n, "after": at, "awaited": 1}
        sums = {"after": at + 1, "exchange": 2 * n + 1}
        yield product(ADD, layer.o, memory.attended, other, layer.ffn_norm, **sums)
        yield product(GATED, layer.gate_up, other, memory.inner, norm=FFN_NORM)
        yield product(ADD, layer.down, memory.inner, x, following, FFN_NORM, exchange=2 * n + 2)
    n = len(layers)
    yield product(LOGITS, weights.head, x, memory.logits, awaited=1)


@dataclass(frozen=True)
class MegakernelCache(GpuCache):
    """The KV cache, with counters and tables of the kernel for all layers (megakernel). counters:
    how many thread blocks have finished each awaited operation, then how many attention tasks of
    each layer are finished; all are 0 when the kernel starts. tables: for each number of rows, the
    kernel's list of operations and its struct Model on the device."""

    counters: Any = None
    tables: dict[int, tuple[Any, Any]] = field(default_factory=dict)


class MegakernelOps(CupyOps):
    """A transformer's operations on a GPU (compute capability 9.0 or more), with one kernel for all
    layers, the megakernel. least_hidden: the smallest hidden width of a model that uses the
    megakernel, because its blocks all wait for one another twice a layer. most_rows: above it,
    separate kernels are faster (wide.cu)."""

    kernel = "whole"
    least_hidden = 2048
    most_rows = 24

    @classmethod
    def suits(cls, backend: Any, config: TransformerConfig) -> bool:
        """Returns whether the megakernel can run a model, or a rank's share of it, on this GPU."""
        shape = config.shape
        if shape.hidden < cls.least_hidden:
            return False
        # The kernel's blocks wait for one another, so all of them have to be on the GPU at once.
        # CUDA's MPS shares a GPU among processes, and does not promise to run all blocks at once.
        mps = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
        is_shared = Path(mps, "control").exists()
        if config.qk_norm or config.kind or capability_of(backend) < 90 or is_shared:
            return False
        room = backend.launcher(early=cls.early).shared_bytes
        return geometry_of(1, shape.head_dim, 0, room).fits

    def qkv_matrix(self, parts: Sequence[Part]) -> PackedWeight:
        """Packs q, k and v. A tile holds 8 columns of a head's first half, then those 8 of its
        second half that RoPE rotates with them."""
        head = self._head
        depth = parts[0].shape[1]
        outputs = sum(part.shape[0] for part in parts)
        self._check_widths(depth, [head // 2])
        values = self.launcher.empty((outputs * depth,), np.float16)
        start = 0
        for part in parts:
            for at in range(0, part.shape[0], head):
                middle = at + head // 2
                halves = part.outputs(at, middle), part.outputs(middle, at + head)
                self._fill(values[start:], *halves)
                start += head * depth
        return PackedWeight(values, depth, outputs, head=head)

    def normed(self, rows: int, width: int) -> Normed:
        return Normed.over(self.launcher, self.buffer(rows, width))

    def cache(self, sizes: CacheSizes, row_places: RowPlaces) -> MegakernelCache:
        made = super().cache(sizes, row_places)
        count = OPERATIONS * sizes.layers + 1 + sizes.layers
        return MegakernelCache(**vars(made), counters=self.launcher.zeros((count,), np.int32))

    def norm(
        self, hidden: Any, delta: Any | None, weight: Any, x: Normed, rows: int, zeroed: Any = None
    ) -> None:
        """Adds delta (if any) to the residual stream `hidden`. Sets x to the stream times the
        norm's weight; the factor 1 / rms is stored apart and applied after the next product (see
        Normed). zeroed: counters that are set to 0."""
        sizes = np.int32(hidden.shape[1]), np.float32(self._config.norm_eps)
        words = np.int32(0 if zeroed is None else zeroed.size)
        args = (hidden, delta, weight, x.values, *x.state, *sizes, zeroed, words)
        kind = "float32" if delta is None else str(delta.dtype)
        how = (rows,), (_NORM_THREADS,), args, _NORM_BYTES
        self.launcher.launch(f"late_norm_{kind}", kernels.LATE, *how)

    def _geometry(self, group: Any, rows: int) -> MegakernelGeometry:
        room = self.launcher.shared_bytes
        return geometry_of(rows, self._head, self.page, room, sharded=group.size > 1)

    def _takes(self, group: Any, rows: int) -> bool:
        """Returns whether the megakernel computes a forward of `rows` rows on all ranks of the
        group: a rank without it could wait for a word that the others send after its own."""
        if rows > self.most_rows or not self._geometry(group, rows).fits:
            return False
        words = rows * self._config.shape.hidden // 2
        return bool(group.in_kernels and (group.size == 1 or words <= group.capacity))

    def at_once(self, group: Any, weights: Any, memory: Any, cache: Any, rows: int) -> bool:
        if not self._takes(group, rows):
            return False
        first = weights.layers[0].attention_norm
        self.norm(memory.hidden, None, first, memory.x, rows, cache.counters)
        if rows not in cache.tables:
            cache.tables[rows] = self._tables(weights, memory, cache, rows)
        operations, model = cache.tables[rows]
        geometry = self._geometry(group, rows)
        layers = len(weights.layers)
        table = operations, np.int32(OPERATIONS * layers + 1), model, np.int32(rows)
        ranks: tuple[Any, ...] = None, np.int32(0), np.int32(0)
        limit_ns = np.uint64(_LIMIT_NS)
        if group.size > 1:
            ranks = np.uintp(group.everybody), np.int32(2 * layers), np.int32(group.done_counts)
            limit_ns = group.limit_ns
        args = (*table, *ranks, np.uintp(self.backend.stop.ctypes.data), limit_ns)
        grid = (self.launcher.multiprocessors,)
        how = (_THREADS,), args, geometry.shared_bytes, geometry.macros
        self.launcher.launch("whole", kernels.WHOLE, grid, *how)
        return True

    def _tables(self, weights: Any, memory: Any, cache: Any, rows: int) -> tuple[Any, Any]:
        """Returns the kernel's table of operations and its struct Model, copied to the device."""
        steps = [*_steps(weights, memory)]
        model = np.zeros(1, MODEL)
        operations = np.zeros(len(steps), OPERATION)
        operations["rows"] = rows
        for row, step in zip(operations, steps, strict=True):
            for name, value in step.items():
                row[name] = value
        max_rows, width = memory.x.shape
        finished = address(cache.counters)
        words = address(cache.words)
        fields = {name: address(getattr(cache, name)) for name in _OF_CACHE} | {
            "hidden": address(memory.hidden),
            "squares": address(memory.x.squares),
            "powers": address(memory.x.powers),
            "x": address(memory.x.values),
            "other_x": address(memory.x.other),
            "inner": address(memory.inner),
            "inner_width": memory.inner.shape[1],
            "table": words + 4 * 4 * max_rows,
            "seats": words,
            "attend_queries": address(memory.q),
            "out": address(memory.attended),
            "queries": address(memory.q),
            "task_count": address(cache.count),
            "finished": finished,
            "merged": finished + 4 * (OPERATIONS * cache.sizes.layers + 1),
            "most_pages": cache.sizes.pages_per_slot,
            "kv_heads": cache.sizes.kv_heads,
            "steps": max(1, cache.sizes.steps),
            "heads": memory.q.shape[1] // cache.sizes.head_dim,
            "splits": cache.splits,
            "page_layer": cache.keys[0].size,
            "lane_layer": cache.lane_keys[0].size,
            "most_rows": max_rows,
            "width": width,
            "norm_rows": memory.x.squares.shape[1],
            "eps": self._config.norm_eps,
            "scale": self.scale,
        }
        for name, value in fields.items():
            model[name] = value
        uploaded = self.launcher.uploaded
        tables = [uploaded(array.view(np.int32), np.int32) for array in (operations, model)]
        return tables[0], tables[1]


def chosen(backend: Any, config: TransformerConfig, *, heads: int, **sizes: Any) -> CupyOps:
    """Makes a model's operations on a GPU, with the megakernel if it can run the model. Raises
    ConfigError for a GPU or a model that no kernels support."""
    kind = MegakernelOps if MegakernelOps.suits(backend, config) else CupyOps
    return kind(backend, config, heads=heads, **sizes)
