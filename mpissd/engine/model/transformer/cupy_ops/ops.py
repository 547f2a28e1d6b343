"""The operations of a transformer's forward on a GPU, which implement ops.Ops.

The kernel pack.cu packs weights in the order that skinny.cu reads. Products by skinny.cu have the
same bits for any number of rows. The KV cache is paged; attention.cu reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Ints
from mpissd.engine.backend import kernels
from mpissd.engine.backend.kernels import ceil_div
from mpissd.engine.comm.group import Group
from mpissd.engine.model.transformer.cache import CacheSizes, RowPlaces
from mpissd.engine.model.transformer.checkpoint import Floats, Part
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.cupy_ops.draws import CupyDraws
from mpissd.engine.model.transformer.ops import LayerWeights, Ops
from mpissd.engine.model.transformer.trees import CHOICES, COPY, PLANT

if TYPE_CHECKING:  # it imports CuPy
    from mpissd.engine.backend.cupy_device import Launcher

TILE = 16
PAIR = 32
ROW_TILE = 8
_FEW_ROW_TILES = 4  # the most tiles of 8 rows in a thread block, except in _LARGE
_THREADS = 256
_STAGES = {  # weight copies in flight of a thread block, by its (tiles of columns, tiles of rows)
    (1, 1): 6, (1, 2): 5, (1, 3): 4, (1, 4): 4, (2, 1): 5, (2, 2): 4, (2, 3): 3, (2, 4): 3,
}  # fmt: skip
_WIDE_TILES = 1024  # From so many column tiles on, a block computes two, which halves reads of x.
# Blocks for more than 32 rows: (tiles of columns, tiles of rows, copies in flight).
# Large blocks save L2 bandwidth: they load (columns + rows) data for (columns · rows) work.
_LARGE = ((4, 8, 3), (2, 8, 4))
_MIN_BLOCKS = 96  # With fewer large blocks, small ones are used, to keep the GPU busy.
_CLUSTER = 4  # thread blocks of wide.cu that share a product's depth
_WIDE_THREADS = 320
_WIDE_ROWS = range(25, 129)  # for clusters; more were not measured
# By tiles of 8 rows: (tiles of columns of a warp, slots of weights, steps of x loaded ahead).
_WIDE = {4: (4, 8, 2), 6: (4, 8, 2), 8: (3, 10, 2)}
_WIDE_DEPTH = 1024  # the least depth for clusters, two steps
_PAGE = 256
_NORM_THREADS = 512
_STAGE_THREADS = 128
_COPY_THREADS = 512
_SHARED_BYTES = 4 * _NORM_THREADS // 32
SPLIT = 128  # positions in a split; attention is computed split by split
QUERY_TILES = 1  # the number of tiles of 16 query rows in an attention task
_ATTEND_THREADS = 128
_BEGIN_THREADS = 256
# The most thread blocks for a KV head's attention: more would wait for a multiprocessor.
_BLOCKS = 264
_STAGING_ELEMENTS = 1 << 26  # the most elements of a matrix that are copied to the GPU at once


@dataclass(frozen=True)
class PackedWeight:
    """A weight matrix packed for skinny.cu: `depth` inputs, `columns` outputs in tiles of 16.
    gated: whether each tile has 8 columns of gate and 8 of up, which give 8 outputs. head: head_dim
    if each tile has 8 columns of a head's first half and 8 rotated with them, or 0."""

    values: Any
    depth: int
    columns: int
    gated: bool = False
    head: int = 0

    @property
    def tiles(self) -> int:
        """The number of tiles of 16 outputs."""
        return int(self.values.size) // (self.depth * TILE)


@dataclass(frozen=True)
class Normed:
    """An RMSNorm's output, without the factor 1 / rms, which is applied to the next product's sums.
    values: float16 [rows, width], rows of the residual stream times the norm's weight and a power
    of two that keeps them in float16's range. squares: float32 [2, rows, width / 16], each tile's
    sum of squares. norms: float32 [rows], 1 / rms. powers: float32 [rows], the powers of two.
    factors: float32 [rows], what sums over `values` are multiplied by. The megakernel uses `values`
    and `other`, and both halves of squares in turn; separate kernels use the first."""

    values: Any
    other: Any
    squares: Any
    norms: Any
    powers: Any
    factors: Any

    @classmethod
    def over(cls, launcher: Launcher, values: Any) -> Normed:
        """Makes a Normed whose values are this buffer, and allocates its factors."""
        rows, width = values.shape
        shapes = (2, rows, width // TILE), (rows,), (rows,), (rows,)
        other = launcher.empty((rows, width), np.float16)
        return cls(values, other, *(launcher.zeros(shape, np.float32) for shape in shapes))

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def state(self) -> tuple[Any, ...]:
        """The arrays that the norm's kernels (late_norm_…) write in addition to the values."""
        return self.squares, self.norms, self.powers, self.factors


def values_and_factors(x: Any) -> tuple[Any, Any]:
    """Returns the array of a product's input x, and the factors [rows] by which the product's sums
    are multiplied (None: by 1)."""
    return (x.values, x.factors) if isinstance(x, Normed) else (x, None)


def multiply(launcher: Launcher, x: Any, weight: PackedWeight, out: Any, rows: int) -> None:
    """Sets out[:rows] = x[:rows] @ weight, or silu(x @ gate) · (x @ up) if the weight is gated."""
    x, factors = values_and_factors(x)
    assert x.shape[1] == weight.depth and out.shape[1] == weight.columns
    kind = "gated" if weight.gated else out.dtype
    source = (x, np.int64(x.shape[1]), weight.values, np.int32(weight.depth // PAIR))
    to = (out, np.int64(out.shape[1]), np.int32(rows), np.int32(weight.columns), factors)
    if rows in _WIDE_ROWS and weight.depth >= _WIDE_DEPTH:
        groups = ceil_div(rows, ROW_TILE * max(_WIDE))
        macros, shared = _wide_geometry(ceil_div(rows, ROW_TILE * groups))
        name = f"wide_{kind}"
        how = _CLUSTER, _WIDE_THREADS, shared, macros
        clusters = launcher.num_clusters(name, kernels.WIDE, *how)
        if clusters >= groups and weight.tiles >= clusters * _CLUSTER // groups:
            threads = (_WIDE_THREADS,)
            grid = (_CLUSTER * clusters,)
            every = (*source, *to, np.int32(weight.tiles))
            launcher.launch(name, kernels.WIDE, grid, threads, every, shared, macros)
            return
    row_tiles = min(_FEW_ROW_TILES, ceil_div(rows, ROW_TILE))
    tiles = 2 if weight.tiles >= _WIDE_TILES and weight.tiles % 2 == 0 else 1
    stages = _STAGES[tiles, row_tiles]
    for size in _LARGE if rows > ROW_TILE * _FEW_ROW_TILES else ():
        blocks = weight.tiles // size[0] * ceil_div(rows, ROW_TILE * size[1])
        fits = _shared_bytes(*size) <= launcher.shared_bytes
        if weight.tiles % size[0] == 0 and blocks >= _MIN_BLOCKS and fits:
            tiles, row_tiles, stages = size
            break
    macros = (("ROW_TILES", row_tiles), ("TILES", tiles), ("STAGES", stages))
    shared = _shared_bytes(tiles, row_tiles, stages)
    grid = (weight.tiles // tiles * ceil_div(rows, ROW_TILE * row_tiles),)
    args = (*source, *to)
    launcher.launch(f"skinny_{kind}", kernels.SKINNY, grid, (_THREADS,), args, shared, macros)


def _wide_geometry(row_tiles: int) -> tuple[tuple[tuple[str, int], ...], int]:
    """Returns the macros of wide.cu and its bytes of shared memory, for so many tiles of 8 rows in
    a cluster."""
    row_tiles = max(min(_WIDE), row_tiles + row_tiles % 2)
    tiles, slots, stages = _WIDE[row_tiles]
    half_stage = 4 * row_tiles * 256 + 64
    sums = 8 * 3 * tiles * 512
    barriers = 8 * 2 * (slots + stages + 8)
    shared = slots * tiles * 4096 + stages * 2 * half_stage + sums + barriers
    macros = ("ROW_TILES", row_tiles), ("TILES", tiles), ("SLOTS", slots), ("STAGES", stages)
    return macros, shared


def _shared_bytes(tiles: int, row_tiles: int, stages: int) -> int:
    return stages * _THREADS * (32 * tiles + 16 * row_tiles)


@dataclass(frozen=True)
class GpuCache:
    """The KV cache, in pages and lanes (scratch memory of branches), and attention's buffers.

    keys, values: float16 [layer, page, kv head, position, head_dim]. lane_keys, lane_values: the
    same, [layer, lane, kv head, step, head_dim]. turns: cosine and sine, float32 [position, pair,
    2]. words: where a forward's rows lie, and the page table, on the device (RowPlaces.ints). qkv:
    a forward's q, k and v, float32. count, tasks: the number and the list of attention tasks.
    partial, tops: for each split (range of positions) its weighted sum of values, and its largest
    score with the sum of its weights. splits: the most splits of a sequence.
    """

    sizes: CacheSizes
    row_places: RowPlaces
    keys: Any
    values: Any
    lane_keys: Any
    lane_values: Any
    turns: Any
    words: Any
    qkv: Any
    count: Any
    tasks: Any
    partial: Any
    tops: Any
    splits: int

    @property
    def places(self) -> tuple[Any, Any]:
        """Two kernel arguments: the array that says where a forward's rows lie in the cache, and
        the most rows that it can hold."""
        return self.words, np.int32(self.row_places.rows.shape[1])


def task_bytes(head: int) -> int:
    """Returns the bytes of an attention block's shared memory (ATTEND_BYTES). head: head_dim."""
    queries = 16 * QUERY_TILES
    values = SPLIT * (2 * head + 16)
    return max(values, 4 * 4 * queries * (head + 4)) + (8 * 4 + 16 + 4) * queries


class CupyOps(Ops):
    """A transformer's operations on one GPU, for this rank's share of heads. Kernels are enqueued
    on the backend's stream, where a graph may capture them. early: whether a kernel may start
    before the previous kernel ends. Raises ConfigError for a GPU or model that lacks support."""

    kernel = "cuda"
    computes_padding = True
    early = True

    def __init__(
        self,
        backend: Any,
        config: TransformerConfig,
        *,
        heads: int,
        kv_heads: int,
        page: int | None = None,
    ) -> None:
        _check(backend, config, page)
        self.page = page or _PAGE
        self.backend = backend
        self._config = config
        self._is_shard = heads < config.shape.num_heads
        self.launcher: Launcher = backend.launcher(early=self.early)
        self._heads = heads
        self._kv_heads = kv_heads
        self._head = config.shape.head_dim
        self.macros = (("HEAD", self._head), ("PAGE", self.page), ("QUERY_TILES", QUERY_TILES))
        self._gathered = dict[int, Any]()  # buffers by rows
        self._spread = dict[int, Any]()  # buffers by count

    def matrix(self, parts: Sequence[Part]) -> PackedWeight:
        depth = parts[0].shape[1]
        widths = [part.shape[0] for part in parts]
        self._check_widths(depth, widths[:-1])
        sizes = [ceil_div(width, TILE) * TILE * depth for width in widths]
        values = self.launcher.empty((sum(sizes),), np.float16)
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            self._fill(values[start : start + size], part, part)
            start += size
        return PackedWeight(values, depth, sum(widths))

    def gate_up(self, gate: Part, up: Part) -> PackedWeight:
        """Packs gate and up so that each tile of 16 columns has 8 of each."""
        outputs, depth = gate.shape
        self._check_widths(depth, [])
        values = self.launcher.empty((ceil_div(outputs, TILE // 2) * TILE * depth,), np.float16)
        self._fill(values, gate, up)
        return PackedWeight(values, depth, outputs, gated=True)

    def table(self, embedding: Part) -> Any:
        """Returns the embedding on the device, float16 [entries, width]."""
        entries, width = embedding.shape
        table = self.launcher.empty((entries, width), np.float16)
        recipe = embedding.recipe()
        if recipe is not None:
            first = np.uint32(recipe.out_start)
            key = np.uint32(recipe.key & 0xFFFFFFFF)
            args = (table, np.int64(entries), np.int32(width), key, first, np.float32(recipe.scale))
            self._pack("fill_rows", entries * width, args)
            return table
        step = max(1, _STAGING_ELEMENTS // width)
        for first in range(0, entries, step):
            rows = embedding.outputs(first, min(first + step, entries)).read()
            self.launcher.upload(rows, table[first : first + len(rows)])
        return table

    def _fill(self, out: Any, left: Part, right: Part) -> None:
        """Packs weights into tiles of 16 columns, 8 of `left`, then 8 of `right`. If both are the
        same part, each tile has 16 of its columns."""
        outputs, depth = left.shape
        step = TILE if left is right else TILE // 2
        shift = step - TILE // 2  # the first column of the tiles' right half

        def sizes(count: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            """Returns two tuples of kernel arguments for `count` outputs: (16-byte units, depth /
            32, depth), and (outputs, outputs from column `shift` on, outputs per tile)."""
            units = np.int64(ceil_div(count, step) * TILE * depth // 8)
            columns = np.int32(count), np.int32(count - shift), np.int32(step)
            return (units, np.int32(depth // PAIR), np.int32(depth)), columns

        random = left.recipe()
        other = right.recipe()
        if random is not None and other is not None:
            around, columns = sizes(outputs)
            keys = [np.uint32(recipe.key & 0xFFFFFFFF) for recipe in (random, other)]
            first = np.uint32(random.out_start), np.uint32(other.out_start + shift)
            halves = np.uint32(random.in_start), keys[0], first[0], keys[1], first[1]
            args = (out, *around, *halves, *columns, np.float32(random.scale))
            self._pack("pack_random", int(around[0]), args)
            return
        # A stored matrix is copied to the device in pieces of `count` outputs.
        count = max(1, _STAGING_ELEMENTS // (depth * step)) * step
        for start in range(0, outputs, count):
            stop = min(start + count, outputs)
            values = [
                self.launcher.uploaded(part.outputs(start, stop).read(), np.float32)
                for part in ([left] if left is right else [left, right])
            ]
            shifted = values[-1].ravel()[shift * depth :]
            around, columns = sizes(stop - start)
            sources = values[0], shifted if shifted.size else None, np.int64(depth)
            to = out[start // step * TILE * depth :]
            self._pack("pack_lanes", int(around[0]), (to, *around, *sources, *columns))

    def _pack(self, name: str, threads: int, args: tuple[Any, ...]) -> None:
        grid = (min(ceil_div(threads, 256), 1 << 16),)
        self.launcher.launch(name, kernels.PACK, grid, (256,), args)

    def _check_widths(self, depth: int, inner_widths: list[int]) -> None:
        """Raises ConfigError unless 32 divides the depth, and 16 divides each of `inner_widths`,
        the outputs of all parts of a matrix but the last."""
        where = f"{self._config.shape.name} on a GPU"
        if depth % PAIR:
            raise ConfigError(f"{where}: a width of {depth}: allowed: multiples of {PAIR}")
        if any(width % TILE for width in inner_widths):
            raise ConfigError(f"{where}: {inner_widths}: allowed: multiples of {TILE}")

    def vector(self, values: Floats) -> Any:
        return self.launcher.uploaded(values, np.float32)

    def overwrite(self, old: Any, new: Any) -> None:
        """Copies `new` over `old` in place. The address stays, because captured graphs read it."""
        if isinstance(old, PackedWeight):
            old = old.values
            new = new.values
        self.launcher.copy(new, old)

    def buffer(self, rows: int, width: int) -> Any:
        return self.backend.activation(rows, width)

    def hidden(self, rows: int) -> Any:
        return self.launcher.empty((rows, self._config.shape.hidden), np.float32)

    def logits(self, rows: int, width: int) -> Any:
        return self.launcher.empty((rows, width), np.float32)

    def delta(self, rows: int) -> Any:
        """Allocates the output [rows, hidden] of a product, summed over ranks, that is added to the
        residual stream: float16 if there are several ranks, else float32."""
        if self._is_shard:
            return self.buffer(rows, self._config.shape.hidden)
        return self.hidden(rows)

    def clear(self, cache: GpuCache) -> None:
        for part in (cache.keys, cache.values, cache.lane_keys, cache.lane_values):
            self.launcher.copy(0, part)

    def states(self, slots: int, positions: int) -> Any:
        return self.launcher.zeros((slots, positions, self._config.shape.hidden), np.float16)

    def keep(self, x: Any, cache: GpuCache, states: Any, rows: int) -> None:
        args = (*values_and_factors(x), *cache.places, *map(np.int32, states.shape[1:]), states)
        self._launch("keep", (rows,), (256,), args)

    def recall(self, target: Any, draft: Any, cache: GpuCache, hidden: Any, rows: int) -> None:
        args = (target, draft, *cache.places, *map(np.int32, target.shape[1:]), hidden)
        self._launch("recall", (rows,), (256,), args)

    def embed(self, table: Any, tokens: Any, hidden: Any, rows: int) -> None:
        entries, width = table.shape
        sizes = np.int32(entries), np.int32(width)
        args = (table, *sizes, np.uintp(tokens.ctypes.data), hidden)
        self._launch("embed", (rows,), (256,), args)

    def norm(self, hidden: Any, delta: Any | None, weight: Any, x: Any, rows: int) -> None:
        kind = "float32" if delta is None else str(delta.dtype)
        sizes = (np.int32(hidden.shape[1]), np.float32(self._config.norm_eps))
        args = (hidden, delta, weight, x, *sizes)
        self._launch(f"norm_{kind}", (rows,), (_NORM_THREADS,), args)

    def qkv(self, x: Any, layer: LayerWeights, cache: GpuCache, n: int, q: Any, rows: int) -> None:
        self.product(x, layer.qkv, cache.qkv, rows)
        eps = np.float32(self._config.norm_eps)
        source = (cache.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, eps, cache.turns)
        place = (*cache.places, *self.arguments(cache, n))
        is_paired = np.int32(layer.qkv.head > 0)
        queries = (np.int32(self._heads), np.float32(self.scale), q, is_paired)
        grid = rows, ceil_div(self._heads + 2 * self._kv_heads, 4)
        self._attention("rotate", grid, (32, 4), (*source, *place, *queries))

    @property
    def scale(self) -> float:
        """The factor on queries, log2(e) / √head_dim, so that softmax can use powers of 2."""
        return float(self._head**-0.5 * 1.4426950408889634)  # log2 e

    def cache(self, sizes: CacheSizes, row_places: RowPlaces) -> GpuCache:
        """Allocates the KV cache, zeroed: masked values are multiplied by 0, and 0 · NaN is NaN."""
        layers = sizes.layers
        heads = sizes.kv_heads
        width = sizes.head_dim
        pages = layers, sizes.num_pages, heads, sizes.page, width
        lanes = layers, max(1, sizes.lanes), heads, max(1, sizes.steps), width
        keys, values, lane_keys, lane_values = (
            self.launcher.zeros(shape, np.float16) for shape in (pages, pages, lanes, lanes)
        )
        angles = np.arange(sizes.num_positions)[:, None] * self._config.frequencies()
        turns = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
        rows = row_places.rows.shape[1]
        splits = ceil_div(sizes.num_positions, SPLIT)
        queries = rows * self._heads * splits
        tasks = rows * ceil_div(self._heads // self._kv_heads, 16 * QUERY_TILES) * (splits + 1)
        columns = (self._heads + 2 * self._kv_heads) * width
        return GpuCache(
            sizes=sizes,
            row_places=row_places,
            keys=keys,
            values=values,
            lane_keys=lane_keys,
            lane_values=lane_values,
            turns=self.launcher.uploaded(turns, np.float32),
            words=self.launcher.empty((len(row_places.ints),), np.int32),
            qkv=self.launcher.empty((rows, columns), np.float32),
            count=self.launcher.zeros((1,), np.int32),
            tasks=self.launcher.empty((tasks, 4), np.int32),
            partial=self.launcher.empty((queries, width), np.float32),
            tops=self.launcher.empty((queries, 2), np.float32),
            splits=splits,
        )

    def move(self, cache: GpuCache, lane: int, slot: int, start: int, stop: int) -> None:
        for step, position in enumerate(range(start, stop)):
            page = int(cache.row_places.pages[slot, position // self.page])
            at = position % self.page
            self.launcher.copy(cache.lane_keys[:, lane, :, step], cache.keys[:, page, :, at])
            self.launcher.copy(cache.lane_values[:, lane, :, step], cache.values[:, page, :, at])

    def begin(self, cache: GpuCache, rows: int) -> None:
        """Copies to the device where the rows lie in the cache, and lists attention's tasks."""
        table = int(cache.row_places.pages.size)
        host = np.uintp(cache.row_places.ints.ctypes.data)
        sizes = map(np.int32, (table, rows, self._heads // self._kv_heads))
        args = (host, *cache.places, *sizes, cache.count, cache.tasks)
        grid = (1 + ceil_div(table, _BEGIN_THREADS),)
        self._attention("begin", grid, (_BEGIN_THREADS,), args, 4 * (5 * rows + 1))

    def attend(self, cache: GpuCache, number: int, q: Any, out: Any, rows: int) -> None:
        """Computes attention over each split (range of positions), then combines the splits."""
        heads = np.int32(self._heads)
        splits = np.int32(cache.splits)
        sums = cache.partial, cache.tops
        tasks = heads, cache.count, cache.tasks, splits
        args = (q, *cache.places, *self.arguments(cache, number), *tasks, *sums)
        grid = min(_BLOCKS, rows * cache.splits), self._kv_heads
        self._attention("attend", grid, (_ATTEND_THREADS,), args, task_bytes(self._head))
        parts = (*cache.places, heads, splits, *sums, out)
        self._attention("combine", (rows, self._heads), (self._head,), parts)

    def arguments(self, cache: GpuCache, number: int) -> tuple[Any, ...]:
        """Returns the kernel arguments for a layer's KV cache (the macro CACHE of attention.cu)."""
        assert (cache.sizes.kv_heads, cache.sizes.head_dim) == (self._kv_heads, self._head)
        arrays = (cache.keys, cache.values, cache.lane_keys, cache.lane_values)
        table = cache.words[4 * cache.row_places.rows.shape[1] :]
        sizes = cache.sizes.pages_per_slot, self._kv_heads, max(1, cache.sizes.steps)
        return (*(array[number] for array in arrays), table, *map(np.int32, sizes))

    def _attention(self, name: str, grid: Any, block: Any, args: Any, shared: int = 0) -> None:
        self.launcher.launch(name, kernels.ATTENTION, grid, block, args, shared, self.macros)

    def product(self, x: Any, weight: PackedWeight, out: Any, rows: int) -> None:
        multiply(self.launcher, x, weight, out, rows)

    def gated(self, x: Any, gate_up: PackedWeight, inner: Any, rows: int) -> None:
        self.product(x, gate_up, inner, rows)

    def sum_ranks(self, group: Group, delta: Any, rows: int) -> None:
        """Sums delta over the ranks in place, in rank order: by the group's one-shot kernel, or
        else by gathering all parts and adding them."""
        part = delta[:rows]
        if group.name == "oneshot":
            group.all_reduce(part)
            return
        words = part.size // 2
        if rows not in self._gathered:
            self._gathered[rows] = self.launcher.empty((group.size * words,), np.int32)
        gathered = self._gathered[rows]
        group.all_gather(part.ravel().view(np.int32), gathered)
        args = (gathered, np.int32(group.size), np.int64(words), part)
        self._launch("add_ranks", (ceil_div(words, 256),), (256,), args)

    def top_k(self, logits: Any, k: int, ids: Any, values: Any, rows: int) -> None:
        self.backend.top_k(logits[:rows], k, ids[:rows], values[:rows])

    def ids(self, ids: Ints) -> Any:
        return self.launcher.uploaded(ids, np.int32)

    def run_stage(self, stage: Any) -> None:
        """Enqueues the kernel between two forwards that writes the inputs of the second one to
        page-locked memory (chained.cu or dynamic.cu). stage: a device_rounds.RoundStage."""
        sheet = stage.sheet
        target = stage.target
        shapes = stage.shapes
        draft = stage.draft or target  # Without a draft, kernels ignore these arguments.
        number = stage.number
        nodes = sheet.nodes
        depth = sheet.tree.depth
        parts = sheet.state, sheet.moves, sheet.forced[stage.turn], sheet.decided[stage.turn]
        state, *host, parents = (np.uintp(part.ctypes.data) for part in (*parts, sheet.parents))
        drafts = _input_of(draft)
        targets = _input_of(target)
        if shapes is not None and number == PLANT:
            sizes = map(np.int32, (nodes, sheet.lanes, sheet.back))
            args = (*sizes, parents, state, shapes.tables, *targets)
            self._stage("plant", sheet.sequences, args, 4 * 5 * (nodes + 1))
            return
        copying = sheet.copying
        history = np.uintp(sheet.history.ctypes.data if copying else 0)
        tokens = history, np.int32(sheet.history.shape[1])
        if number == COPY:
            longest, filler, _ = copying
            sizes = map(np.int32, (nodes, longest, filler, sheet.history.shape[1]))
            args = (*sizes, state, history, host[1], targets[0])
            self._stage("copy", sheet.sequences, args, 4 * _COPY_THREADS, _COPY_THREADS)
            return
        best = stage.ids, draft.best.ids, draft.best.values
        if shapes is not None and sheet.masks and number == 1:
            sizes = map(np.int32, (depth, nodes, 2 * sheet.back, sheet.back))
            shared = 4 * (depth * CHOICES + 5 * (nodes + 1))
            args = (*sizes, host[1], *best, parents, targets[0])
            self._stage("search", sheet.sequences, args, shared, 32)
            return
        if shapes is not None and 0 < number <= depth:
            sizes = map(np.int32, (number, depth, nodes, sheet.draft_lanes))
            arrays = shapes.nodes, shapes.copies, shapes.tables, parents, state
            args = (*sizes, *arrays, *best, *drafts, targets[0])
            self._stage("find", sheet.sequences, args, 4 * 2 * shapes.size.most_found)
            return
        tables = stage.table, np.int32(0)
        if shapes is not None:
            tables = shapes.tables, np.int32(shapes.tables[0].size)
        masks = sheet.back, sheet.masks.start
        shape = nodes, depth, sheet.lanes, sheet.draft_lanes, *masks
        sizes = map(np.int32, (number, sheet.sequences, *shape, *stage.level))
        candidates = np.int32(0 if stage.draft is None else draft.best.ids.shape[1])
        tops = target.best.ids, target.best.values, stage.firsts, np.int32(len(stage.firsts))
        shards = np.uintp(0), np.int32(1)
        if stage.draft_firsts is not None:
            shards = stage.draft_firsts, np.int32(len(stage.draft_firsts))
        args = (*sizes, *tables, state, *host, *tokens, *best, candidates, *shards)
        args = (*args, *drafts, *tops, *targets)
        self._stage("chained", 1, args)

    def _stage(
        self,
        name: str,
        blocks: int,
        args: tuple[Any, ...],
        shared: int = 0,
        threads: int = _STAGE_THREADS,
    ) -> None:
        self.launcher.launch(name, kernels.STAGES, (blocks,), (threads,), args, shared)

    def grow(self, sheet: Any, rows: int, draft: Any, ids: Any) -> None:
        """Enqueues the kernel grow.cu, which appends a token to each speculative branch of a draft,
        and writes the inputs of the draft's next forward to page-locked memory."""
        best = draft.best.ids
        host = np.uintp(sheet.ints.ctypes.data)
        sizes = np.int32(rows), np.int32(sheet.places.shape[1])
        args = (*sizes, host, ids, best, np.int32(best.shape[1]), *_input_of(draft))
        self.launcher.launch("grow", kernels.GROW, (1,), (_STAGE_THREADS,), args)

    def spread(self, group: Group, ints: Any, count: int) -> None:
        if count not in self._spread:
            self._spread[count] = self.launcher.empty((1 + group.size, count), np.int32)
        part = self._spread[count][0]
        parts = self._spread[count][1:]
        self.backend.copy_in(ints[:count], part)
        group.all_gather(part, parts)
        self.backend.read_out(parts[0], ints)

    def adopt(self, cache: GpuCache, moves: Ints) -> None:
        strides = np.int64(cache.keys[0].size), np.int64(cache.lane_keys[0].size)
        args = np.uintp(moves.ctypes.data), *self.arguments(cache, 0), *strides
        self._attention("adopt", (cache.sizes.layers, len(moves)), (_BEGIN_THREADS,), args)

    def inherit(self, cache: GpuCache, copies: Any) -> None:
        args = copies, *self.arguments(cache, 0), np.int64(cache.lane_keys[0].size)
        self._attention("inherit", (cache.sizes.layers, len(copies)), (_BEGIN_THREADS,), args)

    def draws(self, logits: Any) -> CupyDraws:
        return CupyDraws(self.backend, self.launcher, logits)

    def read(self, logits: Any, rows: Sequence[int]) -> Floats:
        return np.stack([self.backend.to_host(logits[row]) for row in rows])

    def _launch(self, name: str, grid: Any, block: Any, args: Any) -> None:
        self.launcher.launch(name, kernels.ROWS, grid, block, args, _SHARED_BYTES)


def _input_of(ends: Any) -> tuple[Any, Any, Any]:
    """Returns three kernel arguments of a model's next forward: the host addresses of its tokens
    and of its row places, and the most rows."""
    places = ends.row_places
    tokens = np.uintp(ends.tokens.ctypes.data)
    return tokens, np.uintp(places.ints.ctypes.data), np.int32(places.rows.shape[1])


def capability_of(backend: Any) -> int:
    """Returns a GPU's compute capability as an integer, 80 for 8.0."""
    return int(str(backend.info.compute_capability).replace(".", ""))


def _check(backend: Any, config: TransformerConfig, page: int | None) -> None:
    """Raises ConfigError for a GPU or a model that the kernels do not support."""
    shape = config.shape
    capability = backend.info.compute_capability
    if capability_of(backend) < 80:
        raise ConfigError(
            f"forward=transformer on compute capability {capability}: allowed: 8.0 or more"
        )
    wrong = {
        "hidden": (shape.hidden, shape.hidden % PAIR == 0 and shape.hidden <= 16384),
        "head_dim": (shape.head_dim, shape.head_dim % PAIR == 0 and shape.head_dim <= 256),
        "page": (page, (page or _PAGE) % SPLIT == 0),
    }
    for what, (value, is_supported) in wrong.items():
        if not is_supported:
            raise ConfigError(
                f"{shape.name} on a GPU: {what}={value}: allowed: multiples of "
                f"{SPLIT if what == 'page' else PAIR}"
            )
