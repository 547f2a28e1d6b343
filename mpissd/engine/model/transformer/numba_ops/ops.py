"""A transformer's operations on the CPU: bfloat16 weights, float32 arithmetic (see ops.Ops)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group
from mpissd.engine.model.transformer.cache import CacheSizes, RowPlaces
from mpissd.engine.model.transformer.checkpoint import Floats, Part
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.numba_ops import kernels
from mpissd.engine.model.transformer.numba_ops.tiles import WIDTH
from mpissd.engine.model.transformer.ops import Layer, Ops

_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Packed:
    """A weight in bfloat16, two inputs in a word: uint32 [blocks, ⌈inputs / 2⌉, columns]; or in
    int8 [blocks, inputs, columns] with scales [blocks, inputs / 32, columns] (products)."""

    words: NDArray[Any]
    scales: Floats  # empty for bfloat16
    outputs: int


@dataclass(frozen=True)
class Cache:
    """The keys and values of one rank, and the places of a forward's rows in them.

    arrays: float32 keys [layers, pages, kv heads, head_dim, page] and values [layers, pages, kv
    heads, page, head_dim], then the lanes' keys and values, with steps in place of positions. A
    last axis is padded to a multiple of 16. turns: the cosines and sines of each position.
    """

    arrays: tuple[Floats, Floats, Floats, Floats]
    turns: tuple[Floats, Floats]
    places: tuple[Ints, Ints]


@dataclass(frozen=True)
class Logits:
    """A buffer of logits, of which the first `width` columns are tokens'."""

    scores: Floats
    width: int


class NumbaOps(Ops):
    """The operations on NumPy arrays; activations are padded to whole blocks of columns."""

    kernel = "numba"
    computes_padding = False

    def __init__(
        self,
        backend: Backend,
        config: TransformerConfig,
        *,
        heads: int,
        kv_heads: int,
        page: int | None = None,
    ) -> None:
        """Makes the operations; a page has a multiple of 16 positions, 64 by default."""
        self.page = page or 64
        assert self.page % 16 == 0, f"a page of {self.page} positions"
        self._config, self._eps = config, np.float32(config.norm_eps)
        self._sizes = heads, kv_heads, config.shape.head_dim
        self._products: dict[int, Floats] = {}

    def matrix(self, parts: Sequence[Part]) -> Packed:
        """Packs the parts side by side: int8 if all of them are stored so, bfloat16 if not."""
        stored = [pair for part in parts if (pair := part.int8()) is not None]
        if len(stored) == len(parts):
            values, scales = (np.concatenate(each) for each in zip(*stored, strict=True))
            return Packed(*kernels.pack_int8(values, scales), len(values))
        outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        words = np.zeros((-(-outputs // WIDTH), -(-inputs // 2), WIDTH), np.uint32)
        first = 0
        for part in parts:
            kernels.pack(np.ascontiguousarray(part.read()), first, words)
            first += part.shape[0]
        return Packed(words, _NOTHING, outputs)

    def gate_up(self, gate: Part, up: Part) -> Packed:
        return self.matrix([gate, up])

    def table(self, embedding: Part) -> NDArray[np.uint16]:
        values = np.ascontiguousarray(embedding.read())
        table = np.empty(values.shape, np.uint16)
        kernels.round_table(values, table)
        return table

    def vector(self, values: Floats) -> Floats:
        return np.array(values, np.float32)

    def overwrite(self, old: Packed | Floats, new: Packed | Floats) -> None:
        pairs: Any = [(old, new)]
        if isinstance(old, Packed) and isinstance(new, Packed):
            pairs = (old.words, new.words), (old.scales, new.scales)
        for to, source in pairs:
            np.copyto(to, source)

    def buffer(self, rows: int, width: int) -> Floats:
        """Returns zeros, float32 [rows, ⌈width⌉], whole blocks of columns."""
        return np.zeros((rows, -(-width // kernels.BLOCK) * kernels.BLOCK), np.float32)

    def hidden(self, rows: int) -> Floats:
        return self.buffer(rows, self._config.shape.hidden)

    def logits(self, rows: int, width: int) -> Logits:
        """Returns a buffer of logits."""
        return Logits(self.buffer(rows, width), width)

    def cache(self, sizes: CacheSizes, seats: RowPlaces) -> Cache:
        """Returns an empty cache, all of it written.

        The context of an imposed acceptance is never computed. Memory that was never written is one
        page of zeros, which attention would read from the processor's cache.
        """
        width, padded = sizes.head_dim, _to_16(sizes.head_dim)
        lanes, steps = max(1, sizes.lanes), _to_16(max(1, sizes.steps))
        pages, lane = (sizes.layers, sizes.num_pages), (sizes.layers, lanes)
        heads, page = sizes.kv_heads, sizes.page
        shapes = [(*pages, heads, width, page), (*pages, heads, page, padded)]
        shapes += [(*lane, heads, width, steps), (*lane, heads, steps, padded)]
        keys, values, lane_keys, lane_values = (np.full(shape, 0, np.float32) for shape in shapes)
        # The angle is a float32 product, as in Hugging Face's code, with which models were trained.
        positions = np.arange(sizes.num_positions, dtype=np.float32)[:, None]
        angles = (positions * self._config.frequencies().astype(np.float32)).astype(np.float64)
        turns = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        return Cache((keys, values, lane_keys, lane_values), turns, (seats.rows, seats.pages))

    def clear(self, cache: Cache) -> None:
        for array in cache.arrays:
            array.fill(0)

    def states(self, slots: int, positions: int) -> Floats:
        return np.zeros((slots, positions, self._config.shape.hidden), np.float32)

    def keep(self, x: Floats, cache: Cache, states: Floats, count: int) -> None:
        kernels.keep(x, cache.places[0], states, count)

    def recall(self, states: Floats, own: Floats, cache: Cache, hidden: Floats, count: int) -> None:
        kernels.recall(states, own, cache.places[0], hidden, count)

    def begin(self, cache: Cache, rows: int) -> None:
        """Does nothing: the places are read where they were written."""

    def embed(self, table: NDArray[np.uint16], tokens: Ints, hidden: Floats, count: int) -> None:
        kernels.embed(table, tokens, hidden, count)

    def norm(
        self, hidden: Floats, delta: Floats | None, weight: Floats, x: Floats, count: int
    ) -> None:
        adds = delta is not None
        kernels.norm(hidden, delta if adds else x, adds, weight, self._eps, x, count)

    def qkv(
        self, x: Floats, layer: Layer, cache: Cache, number: int, q: Floats, count: int
    ) -> None:
        qkv = self._scratch(layer.qkv, count)
        self.product(x, layer.qkv, qkv, count)
        biased = layer.qkv_bias, layer.q_norm, layer.k_norm
        norms = tuple(_NOTHING if part is None else part for part in biased)
        model, held = (self._sizes, number, norms, self._eps), (cache.places, cache.arrays)
        kernels.store(qkv, *model, cache.turns, *held, q, count)

    def attend(self, cache: Cache, number: int, q: Floats, out: Floats, count: int) -> None:
        kernels.attend(q, out, self._sizes, number, cache.places, cache.arrays, count)

    def product(self, x: Floats, weight: Packed, out: Floats | Logits, count: int) -> None:
        to = out.scores if isinstance(out, Logits) else out
        kernels.product(x, weight.words, weight.scales, to, count)

    def gated(self, x: Floats, gate_up: Packed, inner: Floats, count: int) -> None:
        both = self._scratch(gate_up, count)
        self.product(x, gate_up, both, count)
        kernels.swiglu(both, inner, gate_up.outputs // 2, count)

    def _scratch(self, weight: Packed, count: int) -> Floats:
        """Returns a buffer for a product of `count` rows that only the calling operation uses."""
        scratch = self._products.get(weight.outputs)
        if scratch is None or len(scratch) < count:
            scratch = self._products[weight.outputs] = self.buffer(count, weight.outputs)
        return scratch

    def sum_ranks(self, group: Group, delta: Floats, count: int) -> None:
        parts = np.empty((group.size, count, delta.shape[1]), np.float32)
        group.all_gather(delta[:count], parts)
        kernels.sum_parts(parts, delta, count)

    def top_k(self, logits: Logits, k: int, ids: Ints, values: Floats, count: int) -> None:
        kernels.top_k(logits.scores, logits.width, k, ids, values, count)

    def chained(self, stage: Any) -> None:
        stage.run()

    def read(self, logits: Logits, chosen: Sequence[int]) -> Floats:
        return logits.scores[list(chosen), : logits.width]


def _to_16(count: int) -> int:
    return -(-count // 16) * 16
