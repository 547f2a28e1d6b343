"""A transformer's operations on the CPU (see ops.Ops).

ggml's blocks stay as they are stored (packed); other matrices are rounded to bfloat16, and their
products computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group
from mpissd.engine.model.transformer.cache import CacheSizes, RowPlaces
from mpissd.engine.model.transformer.checkpoint import Floats, Part
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.numba_ops import kernels, packed
from mpissd.engine.model.transformer.numba_ops.tiles import HOST, WIDTH
from mpissd.engine.model.transformer.ops import Layer, Ops

_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Packed:
    """A weight: (its first output, type and words) of each piece, whose outputs have one type.

    A piece's type is ggml's (packed.pack), or 0 for bfloat16 (kernels.pack).
    """

    pieces: list[tuple[int, int, NDArray[np.uint32]]]
    outputs: int


@dataclass(frozen=True)
class Table:
    """An embedding, float32 [entries, hidden], of which the rows that `known` marks were read."""

    part: Part
    values: Floats
    known: NDArray[np.bool_]


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
        """Packs the parts side by side, each as it is stored or in bfloat16.

        A piece ends with whole blocks of columns. Parts of several types whose outputs are no
        multiples of them are all bfloat16.
        """
        nothing = 0, np.zeros(0, np.uint8)
        stored = [(HOST != "sse" and part.blocks()) or nothing for part in parts]
        kinds = [kind for kind, _ in stored]
        if len(set(kinds)) > 1 and any(part.shape[0] % kernels.BLOCK for part in parts):
            kinds = [0] * len(parts)
        pieces, first = list[tuple[int, int, NDArray[np.uint32]]](), 0
        for kind, numbers in groupby(range(len(parts)), kinds.__getitem__):
            some = list(numbers)
            if kind:
                words = packed.pack(kind, np.concatenate([stored[n][1] for n in some]))
            else:
                words = _bfloat16([parts[n] for n in some])
            pieces.append((first, kind, words))
            first += sum(parts[n].shape[0] for n in some)
        return Packed(pieces, first)

    def gate_up(self, gate: Part, up: Part) -> Packed:
        return self.matrix([gate, up])

    def table(self, embedding: Part) -> Table:
        """Returns an empty table: a row is read when its token is first used."""
        return Table(
            embedding, np.zeros(embedding.shape, np.float32), np.zeros(embedding.shape[0], bool)
        )

    def vector(self, values: Floats) -> Floats:
        return np.array(values, np.float32)

    def overwrite(self, old: Any, new: Any) -> None:
        if isinstance(old, Packed):
            old.pieces[:] = new.pieces
        else:
            np.copyto(old, new)

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

    def move(self, cache: Cache, lane: int, slot: int, start: int, stop: int) -> None:
        keys, values, lane_keys, lane_values = cache.arrays
        for step, position in enumerate(range(start, stop)):
            number, at = divmod(position, self.page)
            page = cache.places[1][slot, number]
            keys[:, page, ..., at] = lane_keys[:, lane, ..., step]
            values[:, page, :, at] = lane_values[:, lane, :, step]

    def inherit(self, cache: Cache, copies: Ints) -> None:
        keys, values = cache.arrays[2:]
        for lane, to, count in copies.tolist():
            if lane >= 0:
                keys[:, to, ..., :count] = keys[:, lane, ..., :count]
                values[:, to, :, :count] = values[:, lane, :, :count]

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

    def embed(self, table: Table, tokens: Ints, hidden: Floats, count: int) -> None:
        wanted = tokens[:count] % len(table.known)
        for token in wanted[~table.known[wanted]].tolist():
            table.values[token] = table.part.outputs(token, token + 1).read()[0]
            table.known[token] = True
        hidden[:count, : table.values.shape[1]] = table.values[wanted]

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
        for first, kind, words in weight.pieces:
            product = packed.PRODUCTS[kind] if kind else kernels.product
            product(x, words, to, first, count)

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


def _bfloat16(parts: Sequence[Part]) -> NDArray[np.uint32]:
    """Returns the parts' outputs side by side, uint32 [blocks, ⌈inputs / 2⌉, WIDTH]."""
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    words = np.zeros((-(-outputs // WIDTH), -(-inputs // 2), WIDTH), np.uint32)
    first = 0
    for part in parts:
        kernels.pack(np.ascontiguousarray(part.read()), first, words)
        first += part.shape[0]
    return words


def _to_16(count: int) -> int:
    return -(-count // 16) * 16
