"""A transformer reduced to its matrix products: seven a layer, or six without a gated FFN.

x → q,k,v → o → all-reduce → gate,up → down → all-reduce → next layer. Attention, norms and
activation functions are left out: q takes the place of the attention's output, gate that of the
FFN's inner vector. Nothing reads k, v and up, because only their memory traffic matters; tests
check that they are written.
A head-sized draft (mpissd.common.heads) begins with a product that joins its inputs, or ends in
several heads on the hidden vector, each with its own LM head and read out separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.gemm_weights import GemmWeights, Layer
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stacks import Find, ReadOut


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


class GemmStack:
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
        self.backend, self.group, self.shard, self.options = backend, group, shard, options
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
        read = self.shard.kv_read(rows, self._max_sequences, self.options)
        return read // max(1, len(self.layers))

    def place(self, places: Places | None) -> None:
        """Does nothing: the products keep no cache."""

    chunk_rows = 0

    def place_chunk(self, slot: int, start: int, tokens: Ints) -> Callable[[], None]:
        """Is never called: products alone know no prompts."""
        raise NotImplementedError("no chunks of a prompt")

    def release(self, slots: Sequence[int]) -> None:
        """Does nothing: the products keep no cache."""

    def body(self, rows: int, k: int | None = None) -> Callable[[], None]:
        """Returns a function that issues a forward of `rows` rows, with k candidates read out."""
        k = k or self.options.top_k
        backend, view, memory = self.backend, self.backend.view, self.buffers
        hidden = view(memory.hidden, rows, 0, self.shard.shape.hidden)
        middle = view(memory.middle, rows, 0, self.shard.shape.hidden)

        entry = view(memory.entry, rows, 0, self.shard.shape.fused_width) if self.fusion else hidden

        def forward() -> None:
            backend.gather(self.table, memory.tokens[:rows], entry)
            for weight in self.fusion:
                backend.matmul(entry, weight, hidden)
            for number, layer in enumerate(self.layers):
                self._attention(number, layer, rows, hidden, middle)
                self._feed_forward(layer, rows, middle, hidden)
            self._read_out(rows, k, hidden)

        return forward

    def _attention(self, number: int, layer: Layer, rows: int, hidden: Any, middle: Any) -> None:
        start = 0
        for weight, width in zip(layer.qkv, self._qkv_widths(), strict=True):
            out = self.backend.view(self.buffers.qkv, rows, start, start + width)
            self.backend.matmul(hidden, weight, out)
            start += width
        if self._read_kv:
            self._read_kv[number](self._kv_bytes(rows))
        q = self.backend.view(self.buffers.qkv, rows, 0, self.shard.q_width)
        self.backend.matmul(q, layer.o, middle)
        self.group.all_reduce(middle)

    def _feed_forward(self, layer: Layer, rows: int, middle: Any, hidden: Any) -> None:
        start = 0
        for weight, width in zip(layer.gate_up, self._ffn_widths(), strict=True):
            out = self.backend.view(self.buffers.gate_up, rows, start, start + width)
            self.backend.matmul(middle, weight, out)
            start += width
        inner = self.backend.view(self.buffers.gate_up, rows, 0, self.shard.ffn)
        self.backend.matmul(inner, layer.down, hidden)
        self.group.all_reduce(hidden)

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
        """Returns a function that enqueues the choice among the last LM head's logits."""
        scores = self.backend.view(self.buffers.logits, rows, 0, self.shard.vocab)
        return partial(self.backend.top_k, scores)

    def read(self, rows: int, k: int | None = None) -> tuple[Any, Any | None]:
        """Returns the (ids, values) that a forward of `rows` rows read out; values may be None.

        Both are [heads, T, rows, k].
        """
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
        backend, shard = self.backend, self.shard
        entry, states = shard.shape.fused_width, sum(shard.shape.head_widths)
        return Buffers(
            tokens=backend.host_ints(rows),
            entry=backend.activation(rows, entry) if entry else None,
            hidden=backend.activation(rows, shard.shape.hidden),
            qkv=backend.activation(rows, shard.q_width + 2 * shard.kv_width),
            middle=backend.activation(rows, shard.shape.hidden),
            gate_up=backend.activation(rows, sum(self._ffn_widths())),
            states=backend.activation(rows, states) if states else None,
            logits=backend.activation(rows, shard.vocab) if self.lm_heads else None,
        )


@dataclass(frozen=True)
class GemmStacks:
    """Factory of the weights and stacks of GEMM-only models (see stacks.Stacks)."""

    def weights(
        self, backend: Backend, shard: Shard, options: ForwardOptions, *, max_rows: int, seed: int
    ) -> GemmWeights:
        """Returns one rank's random weights."""
        return GemmWeights(backend, shard, options, max_rows=max_rows, seed=seed)

    def stack(
        self,
        backend: Backend,
        group: Group,
        shard: Shard,
        options: ForwardOptions,
        weights: GemmWeights,
        *,
        max_rows: int,
        max_sequences: int,
    ) -> GemmStack:
        """Returns a GemmStack that uses these weights."""
        return GemmStack(
            backend, group, shard, options, weights, max_rows=max_rows, max_sequences=max_sequences
        )
