"""The operations of a transformer's forward on a GPU (see ops.Ops)."""

from __future__ import annotations

from collections.abc import Sequence
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
from mpissd.engine.model.transformer.cupy_ops.attention import SPLIT, Attention, Cache
from mpissd.engine.model.transformer.cupy_ops.draws import CupyDraws
from mpissd.engine.model.transformer.cupy_ops.packing import Packer
from mpissd.engine.model.transformer.cupy_ops.prefill import CupyChunks
from mpissd.engine.model.transformer.cupy_ops.products import (
    PAIR,
    PackedWeight,
    multiply,
    values_and_factors,
)
from mpissd.engine.model.transformer.ops import Layer, Ops
from mpissd.engine.model.transformer.shard import TransformerShard

if TYPE_CHECKING:  # it imports CuPy
    from mpissd.engine.backend.cupy_device import Launcher

_PAGE = 256
_FIRST_CAPABILITY = 80
_NORM_THREADS, _MAX_WIDTH = 512, 16384
_CHAINED_THREADS = 64
_SHARED_BYTES = 4 * _NORM_THREADS // 32


class CupyOps(Ops):
    """Operations of one model's share of heads on one GPU.

    Kernels are enqueued on the backend's stream, so that a graph may capture a forward. Raises
    ConfigError for a GPU or a model that the kernels do not support.
    """

    kernel = "cuda"
    computes_padding = True
    early = True  # whether kernels may start before the one before them ends

    def __init__(
        self,
        backend: Any,
        config: TransformerConfig,
        *,
        heads: int,
        kv_heads: int,
        max_rows: int,
        page: int | None = None,
    ) -> None:
        _check(backend, config, page)
        self.page = page or _PAGE
        self._backend, self._config = backend, config
        self._is_shard = heads < config.shape.num_heads
        self._launcher: Launcher = backend.launcher(early=self.early)
        self._packer = Packer(self._launcher, config.shape.name)
        self._attention = Attention(self._launcher, config, heads, kv_heads, self.page)
        self._gathered: dict[int, Any] = {}
        self._unpacked: dict[int, Any] = {}  # see CupyChunks

    def matrix(self, parts: Sequence[Part]) -> PackedWeight:
        return self._packer.matrix(parts)

    def gate_up(self, gate: Part, up: Part) -> PackedWeight:
        return self._packer.gate_up(gate, up)

    def table(self, embedding: Part) -> Any:
        return self._packer.table(embedding)

    def vector(self, values: Floats) -> Any:
        return self._launcher.uploaded(values, np.float32)

    def overwrite(self, old: Any, new: Any) -> None:
        """Copies a weight or a vector on the device; `old` keeps its address, as graphs read it."""
        if isinstance(old, PackedWeight):
            old, new = old.values, new.values
        self._launcher.copy(new, old)

    def buffer(self, rows: int, width: int) -> Any:
        return self._backend.activation(rows, width)

    def hidden(self, rows: int) -> Any:
        return self._launcher.empty((rows, self._config.shape.hidden), np.float32)

    def logits(self, rows: int, width: int) -> Any:
        return self._launcher.empty((rows, width), np.float32)

    def delta(self, rows: int) -> Any:
        """Returns a buffer for what o and down give: float16 where ranks exchange it."""
        if self._is_shard:
            return self.buffer(rows, self._config.shape.hidden)
        return self.hidden(rows)

    def cache(self, sizes: CacheSizes, seats: RowPlaces) -> Cache:
        return self._attention.cache(sizes, seats)

    def clear(self, cache: Cache) -> None:
        for part in (cache.keys, cache.values, cache.lane_keys, cache.lane_values):
            self._launcher.copy(0, part)

    def states(self, slots: int, positions: int) -> Any:
        return self._launcher.zeros((slots, positions, self._config.shape.hidden), np.float16)

    def keep(self, x: Any, cache: Cache, states: Any, rows: int) -> None:
        args = (*values_and_factors(x), *self._seated(cache, states), states)
        self._launch("keep", (rows,), (256,), args)

    def recall(self, states: Any, own: Any, cache: Cache, hidden: Any, rows: int) -> None:
        args = (states, own, *self._seated(cache, states), hidden)
        self._launch("recall", (rows,), (256,), args)

    @staticmethod
    def _seated(cache: Cache, states: Any) -> tuple[Any, ...]:
        """Returns the seats on the device, their most rows, and the positions and width of
        states."""
        sizes = cache.seats.rows.shape[1], *states.shape[1:]
        return cache.words, *map(np.int32, sizes)

    def begin(self, cache: Cache, rows: int) -> None:
        self._attention.begin(cache, rows)

    def embed(self, table: Any, tokens: Any, hidden: Any, rows: int) -> None:
        entries, width = table.shape
        host = np.uintp(tokens.ctypes.data)
        args = (table, np.int32(entries), np.int32(width), host, hidden)
        self._launch("embed", (rows,), (256,), args)

    def norm(self, hidden: Any, delta: Any | None, weight: Any, x: Any, rows: int) -> None:
        kind = "float32" if delta is None else str(delta.dtype)
        sizes = (np.int32(hidden.shape[1]), np.float32(self._config.norm_eps))
        args = (hidden, delta, weight, x, *sizes)
        self._launch(f"norm_{kind}", (rows,), (_NORM_THREADS,), args)

    def qkv(self, x: Any, layer: Layer, cache: Cache, number: int, q: Any, rows: int) -> None:
        multiply(self._launcher, x, layer.qkv, cache.qkv, rows)
        self._attention.rotate(layer, cache, number, q, rows)

    def attend(self, cache: Cache, number: int, q: Any, out: Any, rows: int) -> None:
        self._attention.attend(cache, number, q, out, rows)

    def product(self, x: Any, weight: PackedWeight, out: Any, rows: int) -> None:
        multiply(self._launcher, x, weight, out, rows)

    def gated(self, x: Any, gate_up: PackedWeight, inner: Any, rows: int) -> None:
        multiply(self._launcher, x, gate_up, inner, rows)

    def sum_ranks(self, group: Group, delta: Any, rows: int) -> None:
        """Sums in rank order: by the group's own kernel; without one, gathers and adds."""
        part = delta[:rows]
        if group.name == "oneshot":
            group.all_reduce(part)
            return
        words = part.size // 2
        if rows not in self._gathered:
            self._gathered[rows] = self._launcher.empty((group.size * words,), np.int32)
        gathered = self._gathered[rows]
        group.all_gather(part.ravel().view(np.int32), gathered)
        args = (gathered, np.int32(group.size), np.int64(words), part)
        self._launch("add_ranks", (ceil_div(words, 256),), (256,), args)

    def top_k(self, logits: Any, k: int, ids: Any, values: Any, rows: int) -> None:
        self._backend.top_k(logits[:rows], k, ids[:rows], values[:rows])

    def chunks(self, shard: TransformerShard, weights: Any, cache: Any) -> CupyChunks | None:
        """Returns chunks of a prompt by cuBLAS; None on a shard, or where it cannot be captured."""
        if self._is_shard or not self._backend.capture:
            return None
        tools = self._backend, self._launcher, self._attention, self.embed
        return CupyChunks(*tools, shard, weights.table, weights.layers, cache, self._unpacked)

    def ids(self, ids: Ints) -> Any:
        return self._launcher.uploaded(ids, np.int32)

    def chained(self, stage: Any) -> None:
        """Computes a stage by chained.cu, which reads and writes page-locked host memory."""
        sheet, target = stage.sheet, stage.target
        draft = stage.draft or target  # without a draft, nothing is read of it
        parts = sheet.state, sheet.forced[stage.turn], sheet.told[stage.turn]
        arrays = [np.uintp(part.ctypes.data) for part in parts]
        sizes = np.int32(stage.number), np.int32(sheet.sequences), np.int32(sheet.lookahead)
        # Where the host keeps the tokens and the seats of a forward, and their most rows.
        drafts, targets = (
            (
                np.uintp(ends.tokens.ctypes.data),
                np.uintp(ends.seats.ints.ctypes.data),
                np.int32(ends.seats.rows.shape[1]),
            )
            for ends in (draft, target)
        )
        best = stage.ids, draft.best.ids, np.int32(1)
        tops = target.best.ids, target.best.values, np.int32(1)
        kernel = self._launcher.function("chained", kernels.CHAINED)
        args = (*sizes, *arrays, *best, *drafts, *tops, *targets)
        self._launcher.launch(kernel, (1,), (_CHAINED_THREADS,), args)

    def draws(self, logits: Any) -> CupyDraws:
        return CupyDraws(self._backend, self._launcher, logits)

    def read(self, logits: Any, rows: Sequence[int]) -> Floats:
        return np.stack([self._backend.to_host(logits[row]) for row in rows])

    def _launch(self, name: str, grid: Any, block: Any, args: Any) -> None:
        kernel = self._launcher.function(name, kernels.ROWS)
        self._launcher.launch(kernel, grid, block, args, _SHARED_BYTES)


def _check(backend: Any, config: TransformerConfig, page: int | None) -> None:
    """Raises ConfigError for a GPU or a model that the kernels do not support."""
    shape, capability = config.shape, backend.info.compute_capability
    if int(str(capability).replace(".", "")) < _FIRST_CAPABILITY:
        raise ConfigError(
            f"forward=transformer on compute capability {capability}: allowed: 8.0 or more"
        )
    wrong = {
        "hidden": (shape.hidden, shape.hidden % PAIR == 0 and shape.hidden <= _MAX_WIDTH),
        "head_dim": (shape.head_dim, shape.head_dim % PAIR == 0 and shape.head_dim <= 256),
        "page": (page, (page or _PAGE) % SPLIT == 0),
    }
    for what, (value, is_supported) in wrong.items():
        if not is_supported:
            raise ConfigError(
                f"{shape.name} on a GPU: {what}={value}: allowed: multiples of "
                f"{SPLIT if what == 'page' else PAIR}"
            )
