"""One rank's forward of a model: the interface `Stack`, and a model of bare matrix products.

Most forwards read out one candidate (the likeliest token) per row. Only the first draft forward of
an SSD round reads several: the bonus tokens for which the draft prepares branches. On an H200 19
more candidates of 128,256 logits take 20 µs for 4 rows, and 190 µs for 48 (results/h200-tuned), so
forwards with one candidate and with several are compiled separately.

`GemmStack` is a transformer reduced to its matrix products: seven a layer, or six without a gated
FFN: x → q,k,v → o → all-reduce → gate,up → down → all-reduce → next layer. Attention, norms and
activation functions are left out: the product q replaces the attention's output, and gate for the
FFN's inner vector. k, v and up are computed for their memory traffic only; nothing reads them. A
head-sized draft (common/shapes.py) begins with a product that joins its inputs, or ends in several
heads on the hidden vector, each with its own LM head. Weights are random, and their scales preserve
the variance, so that values neither overflow nor vanish in 80 layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Backend, WeightPart
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions, Shard, TransformerShard
from mpissd.engine.model.transformer.cache import PageTable

if TYPE_CHECKING:
    from mpissd.engine.model.transformer.cupy_ops.draws import CupyDraws

AnyShard = Shard | TransformerShard
Find = Callable[[int, Any, Any], None]  # find(k, ids, values) writes each row's k likeliest tokens


class Stack(ABC):
    """Base class of a model that one rank runs: its weights, its buffers, and the code of a
    forward. weights: may be shared with other stacks. buffers.tokens: a forward's input tokens,
    int32 [max_rows] on the host. candidates: a forward's output, the likeliest tokens of each row.
    pages: the page table of the KV cache; None without a cache. draws: samples tokens from the last
    forward's logits on the device; None if the host samples."""

    pages: PageTable | None = None
    draws: CupyDraws | None = None
    weights: Any
    buffers: Any
    candidates: ReadOut

    def __init__(
        self, backend: Backend, group: Group, shard: AnyShard, options: ForwardOptions
    ) -> None:
        self.backend = backend
        self.group = group
        self.options = options
        self.shard: Any = shard

    def place(self, places: Places | None) -> None:  # noqa: B027  (products keep no cache)
        """Sets where the next forward's rows (tokens) lie in the KV cache (None: in none of it)."""

    def release(self, slots: Sequence[int]) -> None:  # noqa: B027  (products keep no cache)
        """Frees the KV cache's parts (slots) of these sequences, which have ended."""

    @abstractmethod
    def body(self, rows: int, k: int | None = None) -> Callable[[], None]:
        """Returns a function that enqueues one forward of `rows` rows. k: candidates (likeliest
        tokens) that it reads out per row, 1 or ForwardOptions.top_k (None: top_k)."""

    @abstractmethod
    def best(self, rows: int) -> Find:
        """Returns a function that finds the likeliest tokens in the logits of the last forward,
        which had `rows` rows. The model must have an LM head."""

    @abstractmethod
    def read(self, rows: int, k: int | None = None) -> tuple[Ints, Any | None]:
        """Returns the ids and logits of the last forward's candidates, [heads, T ranks, rows, k].
        The logits are None without ForwardOptions.values. rows, k: as passed to `body`."""

    @abstractmethod
    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Returns this rank's share of some rows' last logits, float32 [len(rows), columns]."""


@dataclass(frozen=True)
class Best:
    """Device buffers for the k likeliest tokens of each row. ids, values: their ids (int32) and
    logits (float32) on this rank, [max_rows, k]. all_ids, all_values: those of all T ranks, rank
    after rank, [T · max_rows, k]."""

    ids: Any
    values: Any
    all_ids: Any
    all_values: Any


class ReadOut:
    """Brings the likeliest tokens of each row from all T ranks of a group to the host. ids, values:
    ids and logits of the last forward, flat arrays of [LM heads, T, rows, k]. by_k: the device
    buffers for each number k of tokens per row."""

    def __init__(
        self,
        backend: Backend,
        group: Group,
        max_rows: int,
        top_k: int,
        *,
        heads: int = 1,
        values: bool = True,
    ) -> None:
        """Allocates buffers for forwards of up to max_rows rows, with 1 or top_k tokens per row.
        heads: LM heads of a forward. values: whether the tokens' logits are read out as well."""
        self._backend = backend
        self._group = group
        self._heads = heads
        buffers = backend.top_buffers
        self.by_k = {
            k: Best(*buffers(max_rows, k), *buffers(max_rows * group.size, k)) for k in {1, top_k}
        }
        length = heads * group.size * max_rows * top_k
        self.ids = backend.host_ints(length)
        self.values = backend.host_ints(length).view(np.float32) if values else None

    def issue(self, find: Find, rows: int, k: int, head: int = 0) -> None:
        """Enqueues the call of `find`, which writes this rank's k likeliest tokens of each row, and
        then copies of all ranks' tokens to the host. head: the LM head's number."""
        view = self._backend.view
        memory = self.by_k[k]
        total = self._group.size * rows
        best = [view(memory.ids, rows, 0, k), view(memory.values, rows, 0, k)]
        find(k, *best)
        if self._group.size > 1:
            gathered = [view(memory.all_ids, total, 0, k), view(memory.all_values, total, 0, k)]
            for local, out in zip(best, gathered, strict=True):
                self._group.all_gather(local, out)
            best = gathered
        part = slice(head * total * k, (head + 1) * total * k)
        self._backend.read_out(best[0], self.ids[part])
        if self.values is not None:
            self._backend.read_out(best[1], self.values[part])

    def read(self, rows: int, k: int) -> tuple[Ints, Any]:
        """Returns the ids and logits (None if not read out) of the last forward's candidates,
        [heads, T ranks, rows, k]. An id is a column of its rank's share of the logits, from 0."""
        shape = self._heads, self._group.size, rows, k
        size = math.prod(shape)
        values = None if self.values is None else self.values[:size].reshape(shape)
        return self.ids[:size].reshape(shape), values


TABLE_ENTRIES = 1024
_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(_MATRICES := 7)
# Seeds of random weights: _HEAD_KEY − 2n for LM head n, _HEAD_KEY − 2n − 1 for Medusa head n.
_HEAD_KEY = 0x7FFF0000
_TABLE_KEY = 0x7FFF0001
_FUSION_KEY = 0x7FFF0002
Columns = tuple[str, int, int]  # part of a buffer: (buffer's name, first column, end)


class Product(NamedTuple):
    """One matrix product of a forward: out = x @ weight, all-reduced over the ranks if `summed`."""

    weight: Any
    x: Columns
    out: Columns
    summed: bool = False


class GemmWeights:
    """One rank's random weights of a model of bare matrix products, and its embedding table.
    Several stacks, each with its own buffers, may share them. layers: the matrix products of each
    layer; with ForwardOptions.fuse, q, k, v are one product, and gate, up another. fusion: the
    product that joins an EAGLE or MTP draft's inputs; empty for other models. heads: the product of
    each Medusa head. lm_heads: the product of each LM head."""

    def __init__(
        self, backend: Backend, shard: Shard, options: ForwardOptions, *, max_rows: int, seed: int
    ) -> None:
        """Makes random weights, laid out for forwards of up to max_rows rows."""
        self.backend = backend
        self.shard = shard
        self.options = options
        self.max_rows = max_rows
        self._seed = seed
        shape = shard.shape
        hidden = "hidden", 0, shape.hidden
        backend.plan_rows(max_rows)
        self.layers = [self._layer(n) for n in range(shape.num_layers)]
        self.fusion = [
            self._product(_FUSION_KEY, size, ("entry", 0, shape.fused_width), hidden)
            for size in shard.before_layers()
        ]
        self.heads: list[Product] = []
        for n, size in enumerate(shard.behind_layers()):
            start = sum(shape.head_widths[:n])
            out = "states", start, start + size[1]
            self.heads.append(self._product(_HEAD_KEY - 2 * n - 1, size, hidden, out))
        states = [head.out for head in self.heads] or [hidden] * len(shape.lm_head_inputs)
        self.lm_heads = [
            self._product(_HEAD_KEY - 2 * n, size, state, ("logits", 0, shard.vocab))
            for n, (size, state) in enumerate(zip(shard.lm_heads(options), states, strict=False))
        ]
        backend.plan_rows(None)
        entry = shape.fused_width or shape.hidden
        self.table = backend.table(TABLE_ENTRIES, entry, self.key(_TABLE_KEY))

    @property
    def kernel(self) -> str:
        """Names of the kernels that multiply by these weights, joined by "+" if they differ."""
        products = [*self.fusion, *self.heads, *self.lm_heads]
        for layer in self.layers:
            products += layer
        return "+".join(sorted({self.backend.kernel(product.weight) for product in products}))

    def key(self, matrix: int) -> int:
        """Returns the seed from which matrix number `matrix` of the model gets its elements."""
        return (self._seed * 0x9E3779B9 + matrix * 0x85EBCA77) & 0xFFFFFFFF

    def _layer(self, n: int) -> list[Product]:
        """Makes this rank's products of layer n. q, k, v, gate and up are split by columns; o and
        down are split by rows, and their outputs are all-reduced."""
        shard = self.shard
        hidden = shard.shape.hidden
        rank = shard.rank
        qkv = {_Q: shard.q_width, _K: shard.kv_width, _V: shard.kv_width}
        gate_up = {_GATE: shard.ffn} | ({_UP: shard.ffn} if shard.shape.gated else {})
        products = []
        for x, widths, inner, last, out in (
            ("hidden", qkv, "qkv", _O, "middle"),
            ("middle", gate_up, "gate_up", _DOWN, "hidden"),
        ):
            parts = []
            for matrix, width in widths.items():
                columns = rank * width, (rank + 1) * width
                key = self.key(n * _MATRICES + matrix + 1)
                parts.append(WeightPart(key, 0, hidden, *columns, hidden**-0.5))
            start = 0
            for group in [parts] if self.options.fuse else [[part] for part in parts]:
                stop = start + sum(part.out_stop - part.out_start for part in group)
                weight = self.backend.weight(group)
                products.append(Product(weight, (x, 0, hidden), (inner, start, stop)))
                start = stop
            width = next(iter(widths.values()))  # the width of q or gate: nothing reads k, v and up
            rows = (rank * width, (rank + 1) * width)
            scale = (width * shard.tp) ** -0.5  # 1/√(inputs on all ranks) keeps the variance
            part = WeightPart(self.key(n * _MATRICES + last + 1), *rows, 0, hidden, scale)
            weight = self.backend.weight([part])
            products.append(Product(weight, (inner, 0, width), (out, 0, hidden), summed=True))
        return products

    def _product(self, matrix: int, size: tuple[int, int], x: Columns, out: Columns) -> Product:
        """Makes a matrix product outside the layers; this rank has all rows of its weight and a
        share of the columns. matrix: the number that seeds the weight. size: (rows, columns on this
        rank). x, out: the columns of buffers that hold the input and the output."""
        rows, width = size
        columns = self.shard.rank * width, (self.shard.rank + 1) * width
        part = WeightPart(self.key(matrix), 0, rows, *columns, rows**-0.5)
        return Product(self.backend.weight([part]), x, out)


class GemmStack(Stack):
    """A model of bare matrix products on one rank. The buffers besides the tokens are on the
    device, [max_rows, width], or None if the model has no such part: entry (the joined inputs of an
    EAGLE or MTP draft), hidden, qkv, middle (after o), gate_up, states (outputs of a draft's
    heads), logits (of one LM head after another)."""

    def __init__(
        self,
        backend: Backend,
        group: Group,
        shard: Shard,
        options: ForwardOptions,
        weights: GemmWeights,
        *,
        max_rows: int,
        max_sequences: int,
    ) -> None:
        """Allocates the buffers. weights: made for the same shard, options and max_rows.
        max_sequences: how many sequences' KV caches a forward reads."""
        super().__init__(backend, group, shard, options)
        self.weights = weights
        shape = shard.shape
        widths = {
            "entry": shape.fused_width,
            "hidden": shape.hidden,
            "qkv": shard.q_width + 2 * shard.kv_width,
            "middle": shape.hidden,
            "gate_up": shard.ffn * (2 if shape.gated else 1),
            "states": sum(shape.head_widths),
            "logits": shard.vocab if weights.lm_heads else 0,
        }
        made = {
            n: backend.activation(max_rows, width) if width else None for n, width in widths.items()
        }
        self.buffers = SimpleNamespace(tokens=backend.host_ints(max_rows), **made)
        # Without an LM head the candidates are columns of the hidden vector, which each rank has.
        self.candidates = ReadOut(
            backend,
            group if weights.lm_heads else SoloGroup(),
            max_rows,
            options.top_k,
            heads=max(1, len(weights.heads)),
            values=options.values,
        )
        self._max_sequences = max_sequences
        # Each layer has its own KV buffer: a buffer shared by layers would be read from L2 cache.
        count = shape.num_layers if options.context else 0
        self._read_kv = [backend.read(self._kv_bytes(max_rows)) for _ in range(count)]

    def _kv_bytes(self, rows: int) -> int:
        read: int = self.shard.kv_read(rows, self._max_sequences, self.options)
        return read // max(1, len(self.weights.layers))

    def body(self, rows: int, k: int | None = None) -> Callable[[], None]:
        """Without an LM head, candidates are the columns of the hidden vector's largest values."""
        k = k or self.options.top_k
        backend = self.backend
        weights = self.weights
        memory = self.buffers

        @cache
        def view(name: str, start: int, stop: int) -> Any:
            return backend.view(getattr(memory, name), rows, start, stop)

        shape = self.shard.shape
        hidden = view("hidden", 0, shape.hidden)
        entry = view("entry", 0, shape.fused_width) if weights.fusion else hidden

        def multiply(product: Product) -> None:
            out = view(*product.out)
            backend.matmul(view(*product.x), product.weight, out)
            if product.summed:
                self.group.all_reduce(out)

        def forward() -> None:
            backend.gather(weights.table, memory.tokens[:rows], entry)
            for product in weights.fusion:
                multiply(product)
            for number, layer in enumerate(weights.layers):
                for product in layer:
                    if self._read_kv and product.x[0] == "qkv":
                        self._read_kv[number](self._kv_bytes(rows))
                    multiply(product)
            for number in range(max(1, len(weights.heads))):
                state = hidden
                if weights.heads:
                    multiply(weights.heads[number])
                    state = view(*weights.heads[number].out)
                find: Find = partial(backend.top_k, state)
                if weights.lm_heads:
                    multiply(weights.lm_heads[number])
                    find = self.best(rows)
                self.candidates.issue(find, rows, k, number)

        return forward

    def best(self, rows: int) -> Find:
        scores = self.backend.view(self.buffers.logits, rows, 0, self.shard.vocab)
        return partial(self.backend.top_k, scores)

    def read(self, rows: int, k: int | None = None) -> tuple[Any, Any | None]:
        ids, values = self.candidates.read(rows, k or self.options.top_k)
        first = np.arange(ids.shape[1], dtype=np.int32) * self.shard.vocab
        return ids + first[:, None, None], values

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        scores = self.backend.view(self.buffers.logits, max(rows) + 1, 0, self.shard.vocab)
        return np.asarray(self.backend.to_host(scores)[list(rows)], np.float32)
