"""All layers and the LM head of a forward as one persistent kernel (kernels/whole.cu).

The kernel needs compute capability 9.0, one rank, and no norm of q and k. Its numbers are those of
the separate kernels, bit for bit, so that any number of rows may take either way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.cupy_ops import whole_plan
from mpissd.engine.model.transformer.cupy_ops.attention import Attention
from mpissd.engine.model.transformer.cupy_ops.launching import Launcher
from mpissd.engine.model.transformer.cupy_ops.norms import LATE_FILES, SKINNY_MACROS, Normed
from mpissd.engine.model.transformer.cupy_ops.products import PackedWeight
from mpissd.engine.model.transformer.cupy_ops.whole_places import (
    Places,
    arriving,
    awaited_parts,
    standing,
)
from mpissd.engine.model.transformer.cupy_ops.whole_plan import (
    ADD,
    ATTEND,
    FFN_NORM,
    GATED,
    LOGITS,
    QKV,
    Form,
    Step,
)

FIRST_CAPABILITY = 90
OPERATIONS = 5  # of a layer
_FILL_BLOCKS = 64
_LIMIT_NS = 2 * 10**9  # how long blocks wait for one another before they give up
SOURCES = (
    "types", "system", "ampere", "hopper", "inbox", "trace", "arithmetic", "cache", "attend",
    "plan", "ordered", "units", "whole",
)  # fmt: skip
Norm = Callable[[Any, Any, Normed, int, Any], None]


class Whole:
    """Launches forwards of one model; `stop` is the backend's page-locked stop word.

    least_hidden: narrower models keep separate kernels, which are faster there: 30 layers of
    SmolLM2-135M (576) wait five times each for all blocks, for 7 MB of weights.
    """

    least_hidden = 1024
    most_rows = whole_plan.MAX_ROWS
    form = Form.parse(os.environ.get("MPISSD_WHOLE_FORM", ""))

    def __init__(
        self, launcher: Launcher, config: TransformerConfig, attention: Attention, stop: Any
    ) -> None:
        self._launcher, self._config, self._attention = launcher, config, attention
        self._stop = stop

    def suits(self, rows: int) -> bool:
        """Returns whether a forward of so many rows can be one kernel."""
        return rows <= self.most_rows and self._geometry(rows).fits

    def launch(
        self, weights: Any, memory: Any, cache: Any, rows: int, norm: Norm, count: int = 0
    ) -> None:
        """Computes all layers and the LM head, behind the embedding.

        norm: enqueues the first norm. count: only so many operations of the table; 0: all.
        """
        key = rows, self.form
        if key not in cache.tables:
            cache.tables[key] = self._tables(weights, memory, cache, rows)
        places, table, model = cache.tables[key]
        if places.scratch is not None:
            words = np.int32(places.scratch.nbytes // 16)
            fill = self._launcher.function("late_fill", LATE_FILES, SKINNY_MACROS)
            self._launcher.launch(fill, (_FILL_BLOCKS,), (256,), (places.scratch, words))
        norm(memory.hidden, weights.layers[0].attention_norm, places.first, rows, cache.counters)
        geometry = self._geometry(rows)
        shared = geometry.shared_bytes
        kernel = self._launcher.function("whole", SOURCES, geometry.macros, shared)
        every = OPERATIONS * len(weights.layers) + 1
        stop = np.uintp(self._stop.ctypes.data)
        args = (table, np.int32(count or every), model, np.int32(rows), stop, np.uint64(_LIMIT_NS))
        grid = (self._launcher.multiprocessors,)
        self._launcher.launch(kernel, grid, (whole_plan.THREADS,), args, shared)

    def _geometry(self, rows: int) -> whole_plan.Geometry:
        head, room = self._config.shape.head_dim, self._launcher.shared_bytes
        return whole_plan.geometry(rows, head, self._attention.page, room, self.form)

    def _tables(self, weights: Any, memory: Any, cache: Any, rows: int) -> Any:
        """Returns the places of a forward, and its operations and struct Model on the device."""
        if self.form.arrive:
            layers, width = len(weights.layers), memory.x.shape[1]
            widths = width, memory.attended.shape[1], memory.inner.shape[1]
            places = arriving(self._launcher, rows, layers, *widths)
            if self.form.arrive > 1:
                places.parts.update(awaited_parts(self._launcher, cache, rows, widths[1]))
        else:
            places = standing(memory)
        table = whole_plan.table(self._steps(weights, memory, places), rows)
        model = self._model(memory, cache, places)
        arrays = (array.view(np.int32) for array in (table, model))
        return places, *(self._launcher.uploaded(array, np.int32) for array in arrays)

    def _steps(self, weights: Any, memory: Any, places: Places) -> Iterator[Step]:
        """Yields the operations of a forward in their order."""
        last = len(weights.layers) - 1
        for n, layer in enumerate(weights.layers):
            following = weights.norm if n == last else weights.layers[n + 1].attention_norm
            here, behind = places.of[n % 2], places.of[(n + 1) % 2].x
            yield _product(QKV, n, layer.qkv, behind, memory.q, layer.qkv_bias)
            yield Step(ATTEND, n, out=address(here.attended))
            yield _product(ADD, n, layer.o, here.attended, here.middle, layer.ffn_norm)
            yield _product(GATED, n, layer.gate_up, here.middle, here.inner, norm=FFN_NORM)
            yield _product(ADD, n, layer.down, here.inner, here.x, following, norm=FFN_NORM)
        x = places.of[last % 2].x
        yield _product(LOGITS, last + 1, weights.head, x, memory.logits)

    def _model(self, memory: Any, cache: Any, places: Places) -> Any:
        """Returns struct Model."""
        model, shape, every = np.zeros(1, whole_plan.MODEL), memory.x.shape, vars(cache)
        finished = address(cache.counters)
        done = OPERATIONS * cache.sizes.layers + 1
        pointers = {name: address(every[name]) for name in _OF_CACHE} | {
            "hidden": address(memory.hidden),
            "squares": address(places.first.squares),
            "powers": address(places.first.powers),
            "table": address(cache.words) + 4 * 4 * shape[0],
            "seats": address(cache.words),
            "attend_queries": address(memory.q),
            "queries": address(memory.q),
            "task_count": address(cache.count),
            "finished": finished,
            "merged": finished + 4 * done,
            "arrivals": address(places.arrivals),
            **{name: address(part) for name, part in places.parts.items()},
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
            "norm_rows": places.first.squares.shape[1],
            "arrival_words": 0 if places.arrivals is None else places.arrivals.nbytes // 32,
            "eps": self._config.norm_eps,
            "scale": self._attention.scale,
        }
        for name, value in (pointers | numbers).items():
            model[name] = value
        return model


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
