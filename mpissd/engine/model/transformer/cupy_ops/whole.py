"""All layers and the LM head of a forward as one persistent kernel (kernels/whole.cu).

The kernel needs compute capability 9.0, and no norm of q and k. Its numbers are those of the
separate kernels, bit for bit, so that any number of rows may take either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.cupy_ops import whole_plan
from mpissd.engine.model.transformer.cupy_ops.attention import Attention
from mpissd.engine.model.transformer.cupy_ops.launching import Launcher
from mpissd.engine.model.transformer.cupy_ops.norms import Normed
from mpissd.engine.model.transformer.cupy_ops.products import PackedWeight
from mpissd.engine.model.transformer.cupy_ops.whole_plan import (
    ADD,
    ATTEND,
    FFN_NORM,
    GATED,
    LOGITS,
    QKV,
    Step,
)

FIRST_CAPABILITY = 90
OPERATIONS = 5  # of a layer
_LIMIT_NS = 2 * 10**9  # how long blocks wait for one another before they give up
SOURCES = (
    "types", "system", "ampere", "hopper", "inbox", "trace", "arithmetic", "cache", "splits",
    "attend", "plan", "columns", "units", "whole",
)  # fmt: skip
Norm = Callable[[Any, Any, Normed, int, Any], None]


class Whole:
    """Launches forwards of one model; `stop` is the backend's page-locked stop word.

    least_hidden: narrower models keep separate kernels, which are faster there: 30 layers of
    SmolLM2-135M (576) wait five times each for all blocks, for 7 MB of weights. wide: models of
    less take one kernel for few_rows at most: 24 lanes of 1B (2,048) took 1.34 ms so and 1.30 by
    separate kernels of the same bits (docs/performance.md), 16 lanes less than these.
    """

    least_hidden, wide = 2048, 4096
    few_rows, most_rows = 16, whole_plan.MAX_ROWS

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
        norm: Norm,
        count: int = 0,
    ) -> None:
        """Computes all layers and the LM head, behind the embedding.

        norm: enqueues the first norm. count: only so many operations of the table; 0: all.
        """
        if rows not in cache.tables:
            cache.tables[rows] = self._tables(weights, memory, cache, rows)
        table, model = cache.tables[rows]
        norm(memory.hidden, weights.layers[0].attention_norm, memory.x, rows, cache.counters)
        geometry = self._geometry(rows)
        shared = geometry.shared_bytes
        kernel = self._launcher.function("whole", SOURCES, geometry.macros, shared)
        every = OPERATIONS * len(weights.layers) + 1
        stop = np.uintp(self._stop.ctypes.data)
        counts = np.int32(count or every), model, np.int32(rows)
        args = (table, *counts, stop, np.uint64(_LIMIT_NS))
        grid = (self._launcher.multiprocessors,)
        self._launcher.launch(kernel, grid, (whole_plan.THREADS,), args, shared)

    def _geometry(self, rows: int) -> whole_plan.Geometry:
        head, room = self._config.shape.head_dim, self._launcher.shared_bytes
        return whole_plan.geometry(rows, head, self._attention.page, room)

    def _tables(self, weights: Any, memory: Any, cache: Any, rows: int) -> Any:
        """Returns the operations of a forward and struct Model on the device."""
        table = whole_plan.table(_steps(weights, memory), rows)
        arrays = (array.view(np.int32) for array in (table, self._model(memory, cache)))
        return tuple(self._launcher.uploaded(array, np.int32) for array in arrays)

    def _model(self, memory: Any, cache: Any) -> Any:
        """Returns struct Model."""
        model, shape, every = np.zeros(1, whole_plan.MODEL), memory.x.shape, vars(cache)
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


def _steps(weights: Any, memory: Any) -> Iterator[Step]:
    """Yields the operations of a forward in their order."""
    last, x = len(weights.layers) - 1, memory.x.values
    for n, layer in enumerate(weights.layers):
        following = weights.norm if n == last else weights.layers[n + 1].attention_norm
        yield _product(QKV, n, layer.qkv, x, memory.q, layer.qkv_bias)
        yield Step(ATTEND, n, out=address(memory.attended))
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
) -> Step:
    depth, columns = weight.depth, weight.columns
    return Step(
        kind=kind,
        layer=layer,
        weight=address(weight.values),
        x=address(x),
        out=address(out),
        depth=depth,
        tiles=weight.tiles,
        columns=columns,
        vector=address(vector),
        norm=norm,
    )
