"""A transformer reduced to its matrix products: seven a layer, or six without a gated FFN.

x → q,k,v → o → all-reduce → gate,up → down → all-reduce → next layer. Attention, norms and
activation functions are left out: q takes the place of the attention's output, gate that of the
FFN's inner vector. Nothing reads k, v and up, because only their memory traffic matters; tests
check that they are written.
A head-sized draft (mpissd.common.shapes) begins with a product that joins its inputs, or ends in
several heads on the hidden vector, each with its own LM head and read out separately.

Weights are random: a rank has its slice of the whole model's matrices. Their scales preserve the
variance, so that values neither overflow nor vanish in 80 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.backend.base import Backend, WeightPart
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stacks import Find, ReadOut, Stack

TABLE_ENTRIES = 1024
_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(7)
_MATRICES = 7
# LM head n has this key − 2n; the product below it, in a head-sized draft, this key − 2n − 1.
_HEAD_KEY = 0x7FFF0000
_TABLE_KEY = 0x7FFF0001
_FUSION_KEY = 0x7FFF0002


@dataclass
class Layer:
    """Weights of one layer; with the option `fuse`, qkv and gate_up hold one weight each."""

    qkv: list[Any]
    o: Any
    gate_up: list[Any]
    down: Any


class GemmWeights:
    """One rank's weights: fusion product, layers, heads, LM heads, and embedding table.

    Stacks that differ only in their buffers (rows, sequences, outputs) may share them.
    """

    def __init__(
        self, backend: Backend, shard: Shard, options: ForwardOptions, *, max_rows: int, seed: int
    ) -> None:
        """Makes the weights; `max_rows`, of their largest forward, decides a GPU's layout."""
        self.backend, self.shard, self.options = backend, shard, options
        self._seed, self.max_rows = seed, max_rows
        heads, lm_heads = enumerate(shard.behind_layers()), enumerate(shard.lm_heads(options))
        backend.plan_rows(max_rows)
        self.layers = [self._layer(n) for n in range(shard.shape.num_layers)]
        self.fusion = [self._whole(_FUSION_KEY, *size) for size in shard.before_layers()]
        self.heads = [self._whole(_HEAD_KEY - 2 * n - 1, *size) for n, size in heads]
        self.lm_heads = [self._whole(_HEAD_KEY - 2 * n, *size) for n, size in lm_heads]
        backend.plan_rows(None)
        entry = shard.shape.fused_width or shard.shape.hidden
        self.table = backend.table(TABLE_ENTRIES, entry, self.key(_TABLE_KEY))

    @property
    def kernel(self) -> str:
        """Names of the kernels that multiply by these weights, joined by "+" if they differ."""
        inside = [
            w for layer in self.layers for w in (*layer.qkv, layer.o, *layer.gate_up, layer.down)
        ]
        every = [*inside, *self.fusion, *self.heads, *self.lm_heads]
        return "+".join(sorted({self.backend.kernel(weight) for weight in every}))

    def key(self, which: int) -> int:
        """Returns the random key of matrix `which`, which determines its elements."""
        return (self._seed * 0x9E3779B9 + which * 0x85EBCA77) & 0xFFFFFFFF

    def _layer(self, n: int) -> Layer:
        shard, hidden, rank = self.shard, self.shard.shape.hidden, self.shard.rank

        def columns(which: int, width: int) -> WeightPart:
            """Describes this rank's column shard [hidden, width] of a matrix."""
            key = self.key(n * _MATRICES + which + 1)
            return WeightPart(key, 0, hidden, rank * width, (rank + 1) * width, hidden**-0.5)

        def rows(which: int, width: int) -> WeightPart:
            """Describes this rank's row shard [width, hidden]; the scale is the whole matrix's."""
            key, scale = self.key(n * _MATRICES + which + 1), (width * shard.tp) ** -0.5
            return WeightPart(key, rank * width, (rank + 1) * width, 0, hidden, scale)

        qkv = [columns(which, shard.kv_width) for which in (_K, _V)]
        gate_up = [columns(which, shard.ffn) for which in (_GATE, _UP)]
        return Layer(
            qkv=self._weights([columns(_Q, shard.q_width), *qkv]),
            o=self.backend.weight([rows(_O, shard.q_width)]),
            gate_up=self._weights(gate_up if shard.shape.gated else gate_up[:1]),
            down=self.backend.weight([rows(_DOWN, shard.ffn)]),
        )

    def _weights(self, parts: list[WeightPart]) -> list[Any]:
        if self.options.fuse:
            return [self.backend.weight(parts)]
        return [self.backend.weight([part]) for part in parts]

    def _whole(self, which: int, rows: int, width: int) -> Any:
        """Makes a weight outside the layers: all rows, and this rank's `width` columns."""
        rank = self.shard.rank
        columns = (rank * width, (rank + 1) * width)
        return self.backend.weight([WeightPart(self.key(which), 0, rows, *columns, rows**-0.5)])


@dataclass
class Buffers:
    """Device and host buffers of a forward, for up to max_rows rows."""

    tokens: Any  # host [max_rows] int32
    entry: Any | None  # [max_rows, fused_width], the joined inputs of a head-sized draft
    hidden: Any  # [max_rows, hidden]
    qkv: Any  # [max_rows, q + 2 kv]
    middle: Any  # [max_rows, hidden], after o
    gate_up: Any  # [max_rows, 2 ffn] (ffn where not gated)
    states: Any | None  # [max_rows, Σ head_widths], outputs of a draft's heads
    logits: Any | None  # [max_rows, vocab / T], reused by each LM head in turn


class GemmStack(Stack):
    """One rank's weights and buffers of the GEMM-only model; `body(rows)` is its forward."""

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
        """Allocates the buffers; `weights` must be of this shard, options and max_rows."""
        super().__init__(backend, group, shard, options)
        self.weights, self.layers, self.table = weights, weights.layers, weights.table
        self.fusion, self.heads, self.lm_heads = weights.fusion, weights.heads, weights.lm_heads
        self.buffers = self._buffers(max_rows)
        # Without an LM head every rank has the whole hidden vector to choose from.
        self.candidates = ReadOut(
            backend,
            group if self.lm_heads else SoloGroup(),
            max_rows,
            options.top_k,
            heads=max(1, len(self.heads)),
            values=options.values,
        )
        self._max_sequences = max_sequences
        # One buffer a layer: a buffer read twice would come from the device's cache.
        count = shard.shape.num_layers if options.context else 0
        self._read_kv = [backend.read(self._kv_bytes(max_rows)) for _ in range(count)]

    def _kv_bytes(self, rows: int) -> int:
        """Returns the bytes of one layer's KV buffer that a forward of `rows` rows reads."""
        read: int = self.shard.kv_read(rows, self._max_sequences, self.options)
        return read // max(1, len(self.layers))

    def body(self, rows: int, k: int | None = None) -> Callable[[], None]:
        k = k or self.options.top_k
        backend, shape, memory = self.backend, self.shard.shape, self.buffers
        hidden = backend.view(memory.hidden, rows, 0, shape.hidden)
        middle = backend.view(memory.middle, rows, 0, shape.hidden)
        entry = backend.view(memory.entry, rows, 0, shape.fused_width) if self.fusion else hidden
        q = backend.view(memory.qkv, rows, 0, self.shard.q_width)
        inner = backend.view(memory.gate_up, rows, 0, self.shard.ffn)

        def forward() -> None:
            backend.gather(self.table, memory.tokens[:rows], entry)
            for weight in self.fusion:
                backend.matmul(entry, weight, hidden)
            for number, layer in enumerate(self.layers):
                self._multiply(hidden, layer.qkv, memory.qkv, rows, self._qkv_widths())
                if self._read_kv:
                    self._read_kv[number](self._kv_bytes(rows))
                backend.matmul(q, layer.o, middle)
                self.group.all_reduce(middle)
                widths = self._ffn_widths()
                self._multiply(middle, layer.gate_up, memory.gate_up, rows, widths)
                backend.matmul(inner, layer.down, hidden)
                self.group.all_reduce(hidden)
            self._read_out(rows, k, hidden)

        return forward

    def _multiply(self, x: Any, weights: list[Any], out: Any, rows: int, widths: list[int]) -> None:
        """Writes the products of x with these weights side by side."""
        start = 0
        for weight, width in zip(weights, widths, strict=True):
            self.backend.matmul(x, weight, self.backend.view(out, rows, start, start + width))
            start += width

    def _read_out(self, rows: int, k: int, hidden: Any) -> None:
        """Reads the top-k of the logits out to the host, one head after the other.

        Without an LM head it reads the top-k of the hidden vector. With T shards every rank gets
        the top-k of each shard, in rank order; ids count from the shard's first column.
        """
        for number, state in enumerate(self._states(rows, hidden)):
            find: Find = partial(self.backend.top_k, state)
            if self.lm_heads:
                scores = self.backend.view(self.buffers.logits, rows, 0, self.shard.vocab)
                self.backend.matmul(state, self.lm_heads[number], scores)
                find = self.best(rows)
            self.candidates.issue(find, rows, k, number)

    def best(self, rows: int) -> Find:
        scores = self.backend.view(self.buffers.logits, rows, 0, self.shard.vocab)
        return partial(self.backend.top_k, scores)

    def read(self, rows: int, k: int | None = None) -> tuple[Any, Any | None]:
        ids, values = self.candidates.read(rows, k or self.options.top_k)
        first = np.arange(ids.shape[1], dtype=np.int32) * self.shard.vocab
        return ids + first[:, None, None], values

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Returns this rank's logits of these rows, of the last LM head."""
        scores = self.backend.view(self.buffers.logits, max(rows) + 1, 0, self.shard.vocab)
        return np.asarray(self.backend.to_host(scores)[list(rows)], np.float32)

    def _states(self, rows: int, hidden: Any) -> Iterator[Any]:
        """Yields the vectors to read out: the hidden vector, or each head's product with it."""
        if not self.heads:
            yield hidden
        start = 0
        for weight, width in zip(self.heads, self.shard.shape.head_widths, strict=True):
            state = self.backend.view(self.buffers.states, rows, start, start + width)
            self.backend.matmul(hidden, weight, state)
            yield state
            start += width

    def _qkv_widths(self) -> list[int]:
        q, kv = self.shard.q_width, self.shard.kv_width
        return [q + 2 * kv] if self.options.fuse else [q, kv, kv]

    def _ffn_widths(self) -> list[int]:
        count = 2 if self.shard.shape.gated else 1
        ffn = self.shard.ffn
        return [count * ffn] if self.options.fuse else [ffn] * count

    def _buffers(self, rows: int) -> Buffers:
        shard, activation = self.shard, partial(self.backend.activation, rows)
        entry, states = shard.shape.fused_width, sum(shard.shape.head_widths)
        return Buffers(
            tokens=self.backend.host_ints(rows),
            entry=activation(entry) if entry else None,
            hidden=activation(shard.shape.hidden),
            qkv=activation(shard.q_width + 2 * shard.kv_width),
            middle=activation(shard.shape.hidden),
            gate_up=activation(sum(self._ffn_widths())),
            states=activation(states) if states else None,
            logits=activation(shard.vocab) if self.lm_heads else None,
        )
