"""The paged KV cache on a GPU and attention over it (attention.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpissd.engine.backend import kernels
from mpissd.engine.backend.kernels import ceil_div
from mpissd.engine.model.transformer.cache import CacheSizes, RowPlaces
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.ops import Layer

if TYPE_CHECKING:  # it imports CuPy
    from mpissd.engine.backend.cupy_device import Launcher


SPLIT = 128  # A split of the attention covers this many positions.
QUERY_TILES = 1  # A task holds this many tiles of 16 query rows.
_THREADS = 128
_BEGIN_THREADS = 256
_TASK_WORDS = 4
# The most blocks that share the tasks of a KV head; more would wait for a free multiprocessor.
_BLOCKS = 264
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Cache:
    """Keys and values in pages and lanes, and the tables and sums of attention.

    keys, values: float16 [layer, page, kv head, position, head_dim]. lane_keys, lane_values: the
    same for [layer, lane, kv head, step, head_dim]. turns: cosine and sine, float32
    [position, pair, 2]. words: the seats on the device. qkv: a forward's q, k and v, float32.
    partial, tops: each split's sums, and its largest score with the sum of weights.
    """

    sizes: CacheSizes
    seats: RowPlaces
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


class Attention:
    """Operations on the cache of one rank's share of heads."""

    def __init__(
        self, launcher: Launcher, config: TransformerConfig, heads: int, kv_heads: int, page: int
    ) -> None:
        self._launcher, self._config = launcher, config
        self._heads, self._kv_heads, self._every = heads, kv_heads, heads + 2 * kv_heads
        self._head, self.page = config.shape.head_dim, page
        self.macros = (("HEAD", self._head), ("PAGE", page), ("QUERY_TILES", QUERY_TILES))

    @property
    def scale(self) -> float:
        """What queries are multiplied by, so that 2 to the power of a score is its weight."""
        return float(self._head**-0.5 * _LOG2_E)

    def cache(self, sizes: CacheSizes, seats: RowPlaces) -> Cache:
        """Allocates the cache; unwritten positions are zero, because masked ones are multiplied."""
        layers, heads, width = sizes.layers, sizes.kv_heads, sizes.head_dim
        pages = layers, sizes.num_pages, heads, sizes.page, width
        lanes = layers, max(1, sizes.lanes), heads, max(1, sizes.steps), width
        keys, values, lane_keys, lane_values = (
            self._launcher.zeros(shape, np.float16) for shape in (pages, pages, lanes, lanes)
        )
        angles = np.arange(sizes.num_positions)[:, None] * self._config.frequencies()
        turns = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
        rows, splits = seats.rows.shape[1], ceil_div(sizes.num_positions, SPLIT)
        queries = rows * self._heads * splits
        per_row = ceil_div(self._heads // self._kv_heads, 16 * QUERY_TILES)
        return Cache(
            sizes=sizes,
            seats=seats,
            keys=keys,
            values=values,
            lane_keys=lane_keys,
            lane_values=lane_values,
            turns=self._launcher.uploaded(turns, np.float32),
            words=self._launcher.empty((len(seats.ints),), np.int32),
            qkv=self._launcher.empty((rows, self._every * width), np.float32),
            count=self._launcher.zeros((1,), np.int32),
            tasks=self._launcher.empty((rows * per_row * (splits + 1), _TASK_WORDS), np.int32),
            partial=self._launcher.empty((queries, width), np.float32),
            tops=self._launcher.empty((queries, 2), np.float32),
            splits=splits,
        )

    def begin(self, cache: Cache, rows: int) -> None:
        """Brings the seats to the device and lists the tasks of a forward."""
        table = int(cache.seats.pages.size)
        args = (
            np.uintp(cache.seats.ints.ctypes.data),
            cache.words,
            np.int32(cache.seats.rows.shape[1]),
            np.int32(table),
            np.int32(rows),
            np.int32(self._heads // self._kv_heads),
            cache.count,
            cache.tasks,
        )
        grid = (1 + ceil_div(table, _BEGIN_THREADS),)
        self._launch("begin", grid, (_BEGIN_THREADS,), args, 4 * (5 * rows + 1))

    def rotate(
        self,
        layer: Layer,
        cache: Cache,
        number: int,
        q: Any,
        rows: int,
        own: tuple[Any, Any, int] | None = None,
    ) -> None:
        """Takes q, k and v to the queries and the cache.

        own: q, k and v of a chunk's rows, their seats [4, most_rows] on the device, and most_rows
        (None: the forward's).
        """
        qkv, *seats = own or (cache.qkv, cache.words, cache.seats.rows.shape[1])
        args = (
            qkv,
            layer.qkv_bias,
            layer.q_norm,
            layer.k_norm,
            np.float32(self._config.norm_eps),
            cache.turns,
            seats[0],
            np.int32(seats[1]),
            *self.arguments(cache, number),
            np.int32(self._heads),
            np.float32(self.scale),
            q,
            np.int32(layer.qkv.head > 0 and own is None),
        )
        self._launch("rotate", (rows, ceil_div(self._every, 4)), (32, 4), args)

    def attend(self, cache: Cache, number: int, q: Any, out: Any, rows: int) -> None:
        """Attends all splits, then adds them up."""
        heads, splits = np.int32(self._heads), np.int32(cache.splits)
        seats = cache.words, np.int32(cache.seats.rows.shape[1])
        sums = cache.partial, cache.tops
        tasks = heads, cache.count, cache.tasks, splits
        args = (q, *seats, *self.arguments(cache, number), *tasks, *sums)
        grid = min(_BLOCKS, rows * cache.splits), self._kv_heads
        self._launch("attend", grid, (_THREADS,), args, task_bytes(self._head))
        parts = (*seats, heads, splits, *sums, out)
        self._launch("combine", (rows, self._heads), (self._head,), parts)

    def arguments(self, cache: Cache, number: int) -> tuple[Any, ...]:
        """The arguments CACHE of attention.cu, for one layer."""
        arrays = (cache.keys, cache.values, cache.lane_keys, cache.lane_values)
        table = cache.words[4 * cache.seats.rows.shape[1] :]
        sizes = cache.sizes.pages_per_slot, self._kv_heads, max(1, cache.sizes.steps)
        return (*(array[number] for array in arrays), table, *map(np.int32, sizes))

    def _launch(self, name: str, grid: Any, block: Any, args: Any, shared: int = 0) -> None:
        kernel = self._launcher.function(name, kernels.ATTENTION, self.macros, shared)
        self._launcher.launch(kernel, grid, block, args, shared)


def task_bytes(head: int) -> int:
    """Returns ATTEND_BYTES: values, or the warps' sums in their place, then tops and weights."""
    queries = 16 * QUERY_TILES
    values = SPLIT * (2 * head + 16)
    return max(values, 4 * 4 * queries * (head + 4)) + 8 * 4 * queries + 16 * queries
