"""A transformer's forward on one rank: embedding, layers with attention over the cache, LM head.

q, k, v, gate, up and the LM head are split by columns, o and down by rows, as in Shard; what o and
down give is summed over the ranks in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Array, Backend
from mpissd.engine.comm.group import Group
from mpissd.engine.model.forwards import Draws, Places
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import Find, ReadOut
from mpissd.engine.model.transformer.cache import PageTable, RowPlaces, cache_sizes
from mpissd.engine.model.transformer.checkpoint import Floats
from mpissd.engine.model.transformer.ops import Chunks, Ops
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.model.transformer.versions import Arrays, Version
from mpissd.engine.model.transformer.weights import TransformerWeights, load_weights, reload

_EMULATED_PAGE = 64


@dataclass
class Buffers:
    """Host and device buffers of a forward, for up to max_rows rows; only `tokens` if emulated."""

    tokens: Any  # host int32 [max_rows]
    hidden: Any = None  # [max_rows, hidden], the residual stream
    x: Any = None  # [max_rows, hidden], normalised
    delta: Any = None  # [max_rows, hidden], the sum that is added to the residual stream
    q: Any = None  # [max_rows, q]
    attended: Any = None  # [max_rows, q]
    inner: Any = None  # [max_rows, ffn]
    logits: Any = None  # [max_rows, local vocabulary]


class TransformerStack:
    """One rank's weights, buffers and KV cache; `body(rows)` is its forward."""

    def __init__(
        self,
        backend: Backend,
        group: Group,
        shard: TransformerShard,
        options: ForwardOptions,
        weights: TransformerWeights,
        *,
        max_rows: int,
        max_sequences: int,
    ) -> None:
        """Allocates the buffers and the cache, for max_sequences slots."""
        self.backend, self.group, self.shard, self.options = backend, group, shard, options
        self.weights = weights
        page = _EMULATED_PAGE if weights.ops is None else weights.ops.page
        shape = shard.shape
        sizes = cache_sizes(
            shard.kv_layers,
            shard.kv_heads,
            shape.head_dim,
            options,
            slots=max_sequences,
            page=page,
        )
        seats = RowPlaces(backend.host_ints(RowPlaces.size(max_rows, sizes)), max_rows, sizes)
        self.pages = PageTable(seats, sizes)
        self.cache = None if weights.ops is None else weights.ops.cache(sizes, seats)
        self.buffers = _buffers(backend, shard, weights.ops, max_rows)
        # What draws tokens from the logits where they are; shares of them are the host's.
        self.draws: Draws | None = None
        if weights.ops is not None and group.size == 1:
            self.draws = weights.ops.draws(self.buffers.logits)
        self.states = None
        if options.states and weights.ops is not None:
            self.states = weights.ops.states(max_sequences, options.capacity + 1)
        self.candidates = ReadOut(backend, group, max_rows, options.top_k)
        # Whether long prompts may be computed in chunks of their own. A server stores a prompt's
        # rows beside others, and again where pages ran out: they need one kind of products. Chunks
        # keep no hidden states.
        self.library_prefill = options.pool == 0 and not options.states
        self._placed, self._reads = 0, True
        ranks = [replace(shard, rank=rank) for rank in range(group.size)]
        self._first = np.array([rank.vocab_range.start for rank in ranks], np.int32)
        self._allocate(max_rows)

    def _allocate(self, max_rows: int) -> None:
        """Allocates what another kind of forward needs beside, before any is captured."""

    def place(self, places: Places | None) -> None:
        """Sets the cache positions of the next forward's rows, and takes the pages they need."""
        self._placed = self.pages.place(places)
        self._reads = places is None or places.reads

    def steer(self) -> None:
        """Makes the next forward compute its whole bucket: its rows' places are in the seats."""
        self._placed, self._reads = 0, True

    @property
    def chunk_rows(self) -> int:
        """Rows of the chunks in which prompts are computed by themselves; 0: there are none."""
        if not self.library_prefill or self.chunks is None:
            return 0
        return self.chunks.rows

    @cached_property
    def chunks(self) -> Chunks | None:
        """What computes the chunks, made when a long prompt needs it."""
        weights = self.weights
        if weights.ops is None:
            return None
        return weights.ops.chunks(self.shard, weights.table, weights.layers, self.cache)

    def place_chunk(self, slot: int, start: int, tokens: Ints) -> Callable[[], None]:
        """Sets the next chunk, and takes the pages that it needs; returns the chunks' body."""
        assert self.chunks is not None
        self.pages.hold(np.array([slot]), np.array([start + len(tokens) - 1]))
        self.chunks.upload(slot, start, tokens)
        return self.chunks.body

    def reload(self, arrays: Arrays | None) -> Iterator[None]:
        """Replaces the weights by these tensors, None: by its files', in steps; see weights.reload.

        Raises ProtocolError for arrays that are not the model's. The cache is void then.
        """
        source, ops = self.weights.source, self.weights.ops
        assert source is not None, "weights that nothing computes with"
        version = source if arrays is None else Version(source, arrays)
        yield from reload(self.weights, version, self.shard)
        if arrays is None and ops is not None:
            ops.clear(self.cache)
        if "chunks" in vars(self) and self.chunks is not None:
            self.chunks.refresh()

    def release(self, slots: Sequence[int]) -> None:
        """Gives the pages of these slots back."""
        self.pages.release(slots)

    def _rows(self, bucket: int) -> int:
        """Returns the rows that a forward of this bucket computes."""
        assert self.weights.ops is not None
        return bucket if self.weights.ops.computes_padding else self._placed or bucket

    def body(self, rows: int, k: int | None = None) -> Callable[[], None]:
        """Returns a function that issues a forward of up to `rows` rows, and reads k candidates."""
        ops, wanted = self.weights.ops, k or self.options.top_k
        return lambda: None if ops is None else self._forward(ops, self._rows(rows), wanted)

    def _forward(self, ops: Ops, rows: int, k: int) -> None:
        """Issues a forward of exactly `rows` rows."""
        ops.begin(self.cache, rows)
        delta = self._enter(ops, rows)
        is_read = self._reads or ops.computes_padding
        parts = self.weights, self.buffers, self.cache
        if self.states is not None or not ops.at_once(*parts, rows):
            self._compute(ops, rows, delta, is_read)
        if is_read:
            self.candidates.issue(self.best(rows), rows, k)

    def _compute(self, ops: Ops, rows: int, delta: Array | None, is_read: bool) -> None:
        """Issues all layers, and the LM head if it is read, one operation after the other."""
        for number in range(len(self.weights.layers)):
            self._attention(ops, number, rows, delta)
            self._feed_forward(ops, number, rows)
            delta = self.buffers.delta
        if is_read or self.states is not None:
            self._leave(ops, rows)
        if is_read:
            ops.product(self.buffers.x, self.weights.head, self.buffers.logits, rows)

    def _enter(self, ops: Ops, rows: int) -> Array | None:
        """Starts the residual stream; returns what is still to be added to it."""
        ops.embed(self.weights.table, self.buffers.tokens, self.buffers.hidden, rows)
        return None

    def _attention(self, ops: Ops, number: int, rows: int, delta: Array | None) -> None:
        layer, memory = self.weights.layers[number], self.buffers
        ops.norm(memory.hidden, delta, layer.attention_norm, memory.x, rows)
        ops.qkv(memory.x, layer, self.cache, number, memory.q, rows)
        ops.attend(self.cache, number, memory.q, memory.attended, rows)
        ops.product(memory.attended, layer.o, memory.delta, rows)
        self._sum(ops, rows)

    def _feed_forward(self, ops: Ops, number: int, rows: int) -> None:
        layer, memory = self.weights.layers[number], self.buffers
        ops.norm(memory.hidden, memory.delta, layer.ffn_norm, memory.x, rows)
        ops.gated(memory.x, layer.gate_up, memory.inner, rows)
        ops.product(memory.inner, layer.down, memory.delta, rows)
        self._sum(ops, rows)

    def _sum(self, ops: Ops, rows: int) -> None:
        if self.group.size > 1:
            ops.sum_ranks(self.group, self.buffers.delta, rows)

    def _leave(self, ops: Ops, rows: int) -> None:
        """Normalises the last hidden state, and keeps it where a draft reads it."""
        memory = self.buffers
        ops.norm(memory.hidden, memory.delta, self.weights.norm, memory.x, rows)
        if self.states is not None:
            ops.keep(memory.x, self.cache, self.states, rows)

    def best(self, rows: int) -> Find:
        """Returns a function that enqueues the choice among the logits of the last forward's
        rows."""
        ops = self.weights.ops

        def find(k: int, ids: Any, values: Any) -> None:
            if ops is not None:
                ops.top_k(self.buffers.logits, k, ids, values, rows)

        return find

    def read(self, rows: int, k: int | None = None) -> tuple[Ints, Floats]:
        """Returns the candidates of the last forward: (token ids, logits), [1, T, n, k].

        rows: the forward's bucket; n: the rows that it computed.
        """
        return self._read(self._rows(rows), k)

    def _read(self, rows: int, k: int | None) -> tuple[Ints, Floats]:
        ids, values = self.candidates.read(rows, k or self.options.top_k)
        ids = ids + self._first[:, None, None]
        if self.weights.head_ids is not None:
            ids = self.weights.head_ids[ids]
        return ids, values

    def logits(self, rows: Sequence[int]) -> Floats:
        """Returns this rank's logits of these rows, float32 [n, local vocabulary]."""
        assert self.weights.ops is not None
        return self.weights.ops.read(self.buffers.logits, rows)


def _buffers(backend: Backend, shard: TransformerShard, ops: Ops | None, rows: int) -> Buffers:
    if ops is None:
        return Buffers(backend.host_ints(rows))
    hidden, q = shard.shape.hidden, shard.q_width
    return Buffers(
        tokens=backend.host_ints(rows),
        hidden=ops.hidden(rows),
        x=ops.normed(rows, hidden),
        delta=ops.delta(rows),
        q=ops.buffer(rows, q),
        attended=ops.buffer(rows, q),
        inner=ops.buffer(rows, shard.ffn_width),
        logits=ops.logits(rows, shard.vocab),
    )


@dataclass(frozen=True)
class TransformerStacks:
    """Factory of the weights and stacks of one model (see stacks.Stacks).

    where: the model's weights, as open_checkpoint takes it. target: the target's, for a draft that
    reads the target's embedding. page: positions of a page (None: the backend's own).
    """

    where: str
    target: str | None = None
    page: int | None = None

    def weights(
        self,
        backend: Backend,
        shard: TransformerShard,
        options: ForwardOptions,
        *,
        max_rows: int,
        seed: int,
    ) -> TransformerWeights:
        """Returns one rank's share of the weights; see load_weights for what it raises."""
        checkpoint = open_checkpoint(self.where, seed, self.target)
        return load_weights(backend, checkpoint, shard, max_rows=max_rows, page=self.page)

    def stack(
        self,
        backend: Backend,
        group: Group,
        shard: TransformerShard,
        options: ForwardOptions,
        weights: TransformerWeights,
        *,
        max_rows: int,
        max_sequences: int,
    ) -> TransformerStack:
        """Returns a stack that uses these weights."""
        return self._kind(weights)(
            backend, group, shard, options, weights, max_rows=max_rows, max_sequences=max_sequences
        )

    def _kind(self, weights: TransformerWeights) -> type[TransformerStack]:
        return TransformerStack
