"""A transformer's operations on the CPU, which implement ops.Ops.

Matrices of a .gguf stay in ggml's blocks (packed.py); others are rounded to bfloat16, and their
products are computed in float32.
"""

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
from mpissd.engine.model.transformer.ops import LayerWeights, Ops

_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Packed:
    """A packed weight matrix. pieces: (first output, ggml's type or 0 for bfloat16, packed words)
    of each piece, in rising order of outputs. outputs: the number of all outputs."""

    pieces: list[tuple[int, int, NDArray[np.uint32]]]
    outputs: int


@dataclass(frozen=True)
class Table:
    """An embedding that is read row by row from the stored tensor `part`. values: float32 [entries,
    hidden]. is_read: which rows of `values` were read."""

    part: Part
    values: Floats
    is_read: NDArray[np.bool_]


@dataclass(frozen=True)
class CpuCache:
    """The keys and values of one rank, and where a forward's rows lie among them.

    arrays: float32 keys [layers, pages, kv heads, head_dim, page] and values [layers, pages, kv
    heads, page, head_dim], then keys and values of the lanes (scratch memory of branches), with a
    lane's tokens in place of a page's positions. A last axis is padded to a multiple of 16. turns:
    the cosines and sines of each position, [positions, head_dim / 2]. places: where each row lies,
    and the page table (RowPlaces.rows and .pages).
    """

    arrays: tuple[Floats, Floats, Floats, Floats]
    turns: tuple[Floats, Floats]
    places: tuple[Ints, Ints]


@dataclass(frozen=True)
class Logits:
    """A buffer of logits, float32; its first `width` columns are logits, the others are padding."""

    scores: Floats
    width: int


class NumbaOps(Ops):
    """A transformer's operations on NumPy arrays, with activations padded to whole blocks."""

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
        """Makes a model's operations, as ops_of describes. page: a multiple of 16."""
        self.page = page or 64
        assert self.page % 16 == 0, f"a page of {self.page} positions"
        self._config = config
        self._eps = np.float32(config.norm_eps)
        self._sizes = heads, kv_heads, config.shape.head_dim
        self._products: dict[int, Floats] = {}

    def matrix(self, parts: Sequence[Part]) -> Packed:
        """Packs parts of weights, with their outputs joined: in ggml's quantised blocks where they
        are stored so, else in bfloat16. If the parts are of several types, and do not fill whole
        blocks of columns, all are packed in bfloat16."""
        nothing = 0, np.zeros(0, np.uint8)
        stored = [(HOST != "sse" and part.blocks()) or nothing for part in parts]
        kinds = [kind for kind, _ in stored]
        if len(set(kinds)) > 1 and any(part.shape[0] % kernels.BLOCK for part in parts):
            kinds = [0] * len(parts)
        pieces = list[tuple[int, int, NDArray[np.uint32]]]()
        first = 0
        for kind, numbers in groupby(range(len(parts)), kinds.__getitem__):
            group = list(numbers)
            if kind:
                words = packed.pack(kind, np.concatenate([stored[n][1] for n in group]))
            else:
                words = _bfloat16([parts[n] for n in group])
            pieces.append((first, kind, words))
            first += sum(parts[n].shape[0] for n in group)
        return Packed(pieces, first)

    def gate_up(self, gate: Part, up: Part) -> Packed:
        return self.matrix([gate, up])

    def table(self, embedding: Part) -> Table:
        """Returns an embedding table whose rows are read when their tokens first occur."""
        values = np.zeros(embedding.shape, np.float32)
        return Table(embedding, values, np.zeros(len(values), bool))

    def vector(self, values: Floats) -> Floats:
        return np.array(values, np.float32)

    def overwrite(self, old: Any, new: Any) -> None:
        if isinstance(old, Packed):
            old.pieces[:] = new.pieces
        else:
            np.copyto(old, new)

    def buffer(self, rows: int, width: int) -> Floats:
        """Returns zeros, float32 [rows, width rounded up to whole blocks of columns]."""
        return np.zeros((rows, -(-width // kernels.BLOCK) * kernels.BLOCK), np.float32)

    def hidden(self, rows: int) -> Floats:
        return self.buffer(rows, self._config.shape.hidden)

    def logits(self, rows: int, width: int) -> Logits:
        return Logits(self.buffer(rows, width), width)

    def cache(self, sizes: CacheSizes, row_places: RowPlaces) -> CpuCache:
        """Allocates the KV cache, and writes zeros to all of it. Benchmarks read a context that was
        never computed; memory that was never written would map to one page of zeros, which the
        processor's cache holds."""
        width = sizes.head_dim
        steps = _to_16(max(1, sizes.steps))
        arrays = list[Floats]()
        for count, positions in ((sizes.num_pages, sizes.page), (max(1, sizes.lanes), steps)):
            shape = sizes.layers, count, sizes.kv_heads
            arrays.append(np.full((*shape, width, positions), 0, np.float32))
            arrays.append(np.full((*shape, positions, _to_16(width)), 0, np.float32))
        keys, values, lane_keys, lane_values = arrays
        # The angle is a float32 product, as in Hugging Face's code, with which models are trained.
        numbers = np.arange(sizes.num_positions, dtype=np.float32)[:, None]
        angles = (numbers * self._config.frequencies().astype(np.float32)).astype(np.float64)
        turns = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        places = (row_places.rows, row_places.pages)
        return CpuCache((keys, values, lane_keys, lane_values), turns, places)

    def move(self, cache: CpuCache, lane: int, slot: int, start: int, stop: int) -> None:
        keys, values, lane_keys, lane_values = cache.arrays
        for step, position in enumerate(range(start, stop)):
            number, at = divmod(position, self.page)
            page = cache.places[1][slot, number]
            keys[:, page, ..., at] = lane_keys[:, lane, ..., step]
            values[:, page, :, at] = lane_values[:, lane, :, step]

    def inherit(self, cache: CpuCache, copies: Ints) -> None:
        keys, values = cache.arrays[2:]
        for source, lane, count in copies.tolist():
            if source >= 0:
                keys[:, lane, ..., :count] = keys[:, source, ..., :count]
                values[:, lane, :, :count] = values[:, source, :, :count]

    def clear(self, cache: CpuCache) -> None:
        for array in cache.arrays:
            array.fill(0)

    def states(self, slots: int, positions: int) -> Floats:
        return np.zeros((slots, positions, self._config.shape.hidden), np.float32)

    def keep(self, x: Floats, cache: CpuCache, states: Floats, count: int) -> None:
        slots, positions, lanes, _ = cache.places[0][:, :count]
        kept = (slots >= 0) & (lanes < 0) & (positions + 1 < states.shape[1])
        states[slots[kept], positions[kept] + 1] = x[:count, : states.shape[2]][kept]

    def recall(
        self, target: Floats, draft: Floats, cache: CpuCache, hidden: Floats, count: int
    ) -> None:
        slots, positions, _, trunks = cache.places[0][:, :count]
        read = hidden[:count, : target.shape[2]]
        read[...] = 0
        is_drafted = (trunks >= 0) & (trunks < positions)
        for states, rows in ((target, ~is_drafted), (draft, is_drafted)):
            rows &= slots >= 0
            read[rows] = states[slots[rows], positions[rows]]

    def begin(self, cache: CpuCache, rows: int) -> None:
        """Does nothing, because operations read the rows' places where the host wrote them."""

    def embed(self, table: Table, tokens: Ints, hidden: Floats, count: int) -> None:
        wanted = tokens[:count] % len(table.values)
        for token in wanted[~table.is_read[wanted]].tolist():
            table.values[token] = table.part.outputs(token, token + 1).read()[0]
            table.is_read[token] = True
        hidden[:count, : table.values.shape[1]] = table.values[wanted]

    def norm(
        self, hidden: Floats, delta: Floats | None, weight: Floats, x: Floats, count: int
    ) -> None:
        adds = delta is not None
        kernels.norm(hidden, delta if adds else x, adds, weight, self._eps, x, count)

    def qkv(
        self, x: Floats, layer: LayerWeights, cache: CpuCache, n: int, q: Floats, count: int
    ) -> None:
        qkv = self._scratch(layer.qkv, count)
        self.product(x, layer.qkv, qkv, count)
        optional = layer.qkv_bias, layer.q_norm, layer.k_norm
        norms = tuple(_NOTHING if part is None else part for part in optional)
        model = self._sizes, n, norms, self._eps
        kernels.store(qkv, *model, cache.turns, cache.places, cache.arrays, q, count)

    def attend(self, cache: CpuCache, number: int, q: Floats, out: Floats, count: int) -> None:
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
        """Returns a buffer for a product of `count` rows, which only the calling operation uses."""
        scratch = self._products.get(weight.outputs)
        if scratch is None or len(scratch) < count:
            scratch = self._products[weight.outputs] = self.buffer(count, weight.outputs)
        return scratch

    def sum_ranks(self, group: Group, delta: Floats, count: int) -> None:
        parts = np.empty((group.size, count, delta.shape[1]), np.float32)
        group.all_gather(delta[:count], parts)
        delta[:count] = parts[0]
        for part in parts[1:]:  # in order of ranks, so that every rank gets the same bits
            delta[:count] += part

    def top_k(self, logits: Logits, k: int, ids: Ints, values: Floats, count: int) -> None:
        kernels.top_k(logits.scores, logits.width, k, ids, values, count)

    def read(self, logits: Logits, chosen: Sequence[int]) -> Floats:
        return logits.scores[list(chosen), : logits.width]


def _bfloat16(parts: Sequence[Part]) -> NDArray[np.uint32]:
    """Packs the outputs of all parts side by side in bfloat16, as kernels.pack does."""
    outputs = sum(part.shape[0] for part in parts)
    words = np.zeros((-(-outputs // WIDTH), -(-parts[0].shape[1] // 2), WIDTH), np.uint32)
    first = 0
    for part in parts:
        kernels.pack(np.ascontiguousarray(part.read()), first, words)
        first += part.shape[0]
    return words


def _to_16(count: int) -> int:
    return -(-count // 16) * 16
