"""A transformer on one rank: its share of the weights, and its forward over the cache.

q, k, v, gate, up and the LM head are split by columns, o and down by rows, as in Shard; what o and
down give is summed over the ranks in rank order.

Drafts that read their target's last hidden state (shapes.STATE_KINDS) differ at both ends. With e
the embedding of a position's token, h the target's normalised last hidden state before that
position, and n, n' RMSNorms of their own:

    mlp, eagle   u = h + S·n(h) + E·n'(e); one layer on u (mlp: its SwiGLU block only); its final
                 norm gives s. The LM head reads s, and s is h of the next position.
    medusa       s_i = norm_i(h + SwiGLU_i(n_i(h))) for each head i; one forward drafts all tokens.

S and E side by side are the product that fuses both in EAGLE (2401.15077, section 4.1) and in
DeepSeek-V3's module (2412.19437, equation 21). Where Wertheimer et al. (2404.19124) have a
normalised sum and GELU with weights for each place, `mlp` has SwiGLU and the same weights at each
place; a Medusa head's block (2401.10774, section 2.1.1) is SwiGLU in place of one SiLU product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Array, Backend
from mpissd.engine.comm.group import Group
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions, TransformerShard
from mpissd.engine.model.stacks import Find, ReadOut, Stack
from mpissd.engine.model.transformer.cache import CacheSizes, PageTable, RowPlaces
from mpissd.engine.model.transformer.checkpoint import (
    EMBEDDING,
    HEAD,
    HEAD_NORM,
    JOINED,
    JOINS,
    LAST_NORM,
    Arrays,
    Checkpoint,
    Floats,
    new_version,
    replaced,
)
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.ops import Layer, Ops, ops_of

_EMULATED_PAGE = 64


@dataclass(frozen=True)
class TransformerWeights:
    """Weights of one rank; the arrays are absent (None, no layers) where nothing is computed.

    head_ids: the token of each row of a reduced LM head; None where all tokens have one. source:
    the checkpoint they were read from. Of a draft that reads hidden states (stack.py):
    joined_norms, joins, of a token's embedding, and of the state; head_norms, of each Medusa head.
    """

    config: TransformerConfig
    max_rows: int
    ops: Ops | None
    layers: tuple[Layer, ...] = ()
    table: Array = None
    norm: Array = None
    head: Array = None
    head_ids: Ints | None = None
    source: Checkpoint | None = None
    joined_norms: tuple[Array, ...] = ()
    joins: tuple[Array, ...] = ()
    head_norms: tuple[Array, ...] = ()

    @property
    def kernel(self) -> str:
        """Name of the kernels that read these weights."""
        return "modelled" if self.ops is None else self.ops.kernel


def load_weights(
    backend: Backend,
    checkpoint: Checkpoint,
    shard: TransformerShard,
    *,
    max_rows: int,
    page: int | None = None,
) -> TransformerWeights:
    """Reads and packs one rank's share; shard.shape has the number of layers.

    page: see ops_of. Raises ConfigError for a checkpoint that lacks a part, and MemoryError.
    """
    config, heads, kv_heads = checkpoint.config, shard.heads, shard.kv_heads
    ops = ops_of(backend, config, heads=heads, kv_heads=kv_heads, page=page)
    if ops is None:
        return TransformerWeights(config, max_rows, None)
    part, is_medusa = checkpoint.part, config.kind == "medusa"
    joined, joins = (JOINED, JOINS) if config.kind in ("mlp", "eagle") else ((), ())
    prefixes = [f"model.layers.{n}." for n in range(shard.shape.num_layers)]
    norms = [prefix + HEAD_NORM for prefix in prefixes] if is_medusa else []
    return TransformerWeights(
        config,
        max_rows,
        ops,
        tuple(_layer(ops, checkpoint, shard, prefix) for prefix in prefixes),
        None if is_medusa else ops.table(part(EMBEDDING)),
        None if is_medusa else ops.vector(checkpoint.read(LAST_NORM)),
        ops.matrix([part(HEAD, shard.vocab_range)]),
        checkpoint.head_ids,
        checkpoint,
        tuple(ops.vector(checkpoint.read(name)) for name in joined),
        tuple(ops.matrix([part(name)]) for name in joins),
        tuple(ops.vector(checkpoint.read(name)) for name in norms),
    )


def _layer(ops: Ops, checkpoint: Checkpoint, shard: TransformerShard, prefix: str) -> Layer:
    """Packs the layer whose tensors' names begin with `prefix`; its attention, if it has one."""
    config, part = checkpoint.config, checkpoint.part

    def vector(*parts: tuple[str, slice]) -> Array:
        return ops.vector(
            np.concatenate([checkpoint.read(prefix + name, at) for name, at in parts])
        )

    whole = slice(None)
    layer = Layer(
        ffn_norm=vector(("post_attention_layernorm.weight", whole)),
        gate_up=ops.gate_up(
            part(f"{prefix}mlp.gate_proj.weight", shard.ffn),
            part(f"{prefix}mlp.up_proj.weight", shard.ffn),
        ),
        down=ops.matrix([part(f"{prefix}mlp.down_proj.weight", columns=shard.ffn)]),
    )
    if config.kind not in ("", "eagle"):
        return layer
    rows = {"self_attn.q_proj": shard.q, "self_attn.k_proj": shard.kv, "self_attn.v_proj": shard.kv}
    layer.attention_norm = vector(("input_layernorm.weight", whole))
    layer.qkv = ops.qkv_matrix([part(f"{prefix}{name}.weight", at) for name, at in rows.items()])
    if config.qkv_bias:
        layer.qkv_bias = vector(*((f"{name}.bias", at) for name, at in rows.items()))
    if config.qk_norm:
        layer.q_norm = vector(("self_attn.q_norm.weight", whole))
        layer.k_norm = vector(("self_attn.k_norm.weight", whole))
    layer.o = ops.matrix([part(f"{prefix}self_attn.o_proj.weight", columns=shard.q)])
    return layer


class Buffers:
    """Host and device buffers of a forward, for up to `rows` rows; only `tokens` if emulated."""

    logits: Any = None  # [rows, local vocabulary]

    def __init__(
        self, backend: Backend, shard: TransformerShard, ops: Ops | None, rows: int
    ) -> None:
        self.tokens: Any = backend.host_ints(rows)  # int32 [rows], on the host
        if ops is None:
            return
        self.hidden: Any = ops.hidden(rows)  # [rows, hidden], the residual stream
        self.x: Any = ops.normed(rows, shard.shape.hidden)  # [rows, hidden], normalised
        # [rows, hidden], the sum that is added to the residual stream
        self.delta: Any = ops.delta(rows)
        self.q: Any = ops.buffer(rows, shard.q_width)
        self.attended: Any = ops.buffer(rows, shard.q_width)
        self.inner: Any = ops.buffer(rows, shard.ffn_width)
        self.logits = ops.logits(rows, shard.vocab)


class TransformerStack(Stack):
    """One rank's weights, buffers and KV cache; `body(rows)` is its forward."""

    pages: PageTable

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
        super().__init__(backend, group, shard, options)
        self.weights, self.states, ops = weights, None, weights.ops
        page = _EMULATED_PAGE if ops is None else ops.page
        sizes = CacheSizes(
            shard.kv_layers,
            shard.kv_heads,
            shard.shape.head_dim,
            slots=max_sequences,
            capacity=options.capacity,
            page=page,
            lanes=options.lanes,
            steps=options.steps,
            pool=options.pool,
        )
        seats = RowPlaces(backend.host_ints(RowPlaces.size(max_rows, sizes)), max_rows, sizes)
        self.pages = PageTable(seats, sizes)
        self.cache = None if ops is None else ops.cache(sizes, seats)
        self.buffers = Buffers(backend, shard, ops, max_rows)
        if ops is not None and group.size == 1:  # shards of logits are drawn from on the host
            self.draws = ops.draws(self.buffers.logits)
        if ops is not None and options.states:
            self.states = ops.states(max_sequences, options.capacity + 1)
        self.candidates = ReadOut(backend, group, max_rows, options.top_k)
        self._placed, self._reads = 0, True
        ranks = [replace(shard, rank=rank) for rank in range(group.size)]
        # [T], the first token of each rank's logits
        self.firsts = np.array([rank.vocab_range.start for rank in ranks], np.int32)

    def place(self, places: Places | None) -> None:
        """Sets the cache positions of the next forward's rows, and takes the pages they need."""
        self._placed = self.pages.place(places)
        self._reads = places is None or places.reads

    def steer(self) -> None:
        """Makes the next forward compute its whole bucket: its rows' places are in the seats."""
        self._placed, self._reads = 0, True

    def reload(self, arrays: Arrays | None) -> Iterator[None]:
        """Replaces the weights by these tensors (None: by those of its files); the cache is void
        then.

        Yields between its parts, so that the caller may do other work: each is packed into memory
        of its own first. All of them are copied after the last yield, in one go, so that no forward
        reads two versions. The embedding table stays, and so does an LM head that the target lends.
        Captured programs stay valid: the arrays keep their addresses. Raises ProtocolError for
        arrays that are not the model's.
        """
        weights, source, ops = self.weights, self.weights.source, self.weights.ops
        assert source is not None and ops is not None, "weights that nothing computes with"
        version = source if arrays is None else new_version(source, arrays)
        fresh = list[tuple[Any, Any]]()
        for number, layer in enumerate(weights.layers):
            new = vars(_layer(ops, version, self.shard, f"model.layers.{number}."))
            fresh += [(old, new[name]) for name, old in vars(layer).items() if old is not None]
            yield
        fresh.append((weights.norm, ops.vector(version.read(LAST_NORM))))
        if HEAD in replaced(version):
            fresh.append((weights.head, ops.matrix([version.part(HEAD, self.shard.vocab_range)])))
            yield
        for old, new in fresh:
            ops.overwrite(old, new)
        if arrays is None:
            ops.clear(self.cache)

    def move(self, lane: int, slot: int, start: int, stop: int) -> None:
        """Copies the first K and V of a lane to positions start … stop − 1 of a slot."""
        self.pages.hold(np.array([slot]), np.array([stop - 1]))
        if self.weights.ops is not None:
            self.weights.ops.move(self.cache, lane, slot, start, stop)

    def release(self, slots: Sequence[int]) -> None:
        """Gives the pages of these slots back."""
        self.pages.release(slots)

    def _rows(self, bucket: int) -> int:
        """Returns the rows that a forward of this bucket computes."""
        return bucket if self.weights.ops.computes_padding else self._placed or bucket

    def body(self, rows: int, k: int | None = None) -> Callable[[], None]:
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
        memory, cache, weights = self.buffers, self.cache, self.weights
        for number, layer in enumerate(weights.layers):
            if layer.o is not None:
                ops.norm(memory.hidden, delta, layer.attention_norm, memory.x, rows)
                ops.qkv(memory.x, layer, cache, number, memory.q, rows)
                ops.attend(cache, number, memory.q, memory.attended, rows)
                ops.product(memory.attended, layer.o, memory.delta, rows)
                if self.group.size > 1:
                    ops.sum_ranks(self.group, memory.delta, rows)
                delta = memory.delta
            ops.norm(memory.hidden, delta, layer.ffn_norm, memory.x, rows)
            ops.gated(memory.x, layer.gate_up, memory.inner, rows)
            ops.product(memory.inner, layer.down, memory.delta, rows)
            if self.group.size > 1:
                ops.sum_ranks(self.group, memory.delta, rows)
            delta = memory.delta
        if is_read or self.states is not None:
            ops.norm(memory.hidden, memory.delta, weights.norm, memory.x, rows)
        if self.states is not None:
            ops.keep(memory.x, cache, self.states, rows)
        if is_read:
            ops.product(memory.x, weights.head, memory.logits, rows)

    def _enter(self, ops: Ops, rows: int) -> Array | None:
        """Writes the start of the residual stream, here the tokens' embeddings; returns the sum
        that the first layer's norm has to add (None: nothing)."""
        ops.embed(self.weights.table, self.buffers.tokens, self.buffers.hidden, rows)
        return None

    def best(self, rows: int) -> Find:
        ops, logits = self.weights.ops, self.buffers.logits
        return lambda k, ids, values: ops.top_k(logits, k, ids, values, rows)

    def read(self, rows: int, k: int | None = None) -> tuple[Ints, Floats]:
        """Returns the candidates of the last forward: (token ids, logits), [1, T, n, k].

        rows: the forward's bucket; n: the rows that it computed.
        """
        return self._read(self._rows(rows), k)

    def _read(self, rows: int, k: int | None) -> tuple[Ints, Floats]:
        ids, values = self.candidates.read(rows, k or self.options.top_k)
        ids = ids + self.firsts[:, None, None]
        if self.weights.head_ids is not None:
            ids = self.weights.head_ids[ids]
        return ids, values

    def logits(self, rows: Sequence[int]) -> Floats:
        """Returns this rank's logits of these rows, float32 [n, local vocabulary]."""
        logits: Floats = self.weights.ops.read(self.buffers.logits, rows)
        return logits


class StateStack(TransformerStack):
    """An MLP speculator's or an EAGLE layer's forward; `states` are its own."""

    source_states: Array = None  # of a target on the same device; set before forwards are compiled

    def __init__(self, *parts: Any, max_rows: int, max_sequences: int) -> None:
        super().__init__(*parts, max_rows=max_rows, max_sequences=max_sequences)
        ops = self.weights.ops
        # [max_rows, hidden], the embedding's part of the product that joins.
        self._joined = None if ops is None else ops.delta(max_rows)

    def _enter(self, ops: Ops, rows: int) -> Array:
        memory, weights = self.buffers, self.weights
        ops.embed(weights.table, memory.tokens, memory.hidden, rows)
        ops.norm(memory.hidden, None, weights.joined_norms[0], memory.x, rows)
        ops.product(memory.x, weights.joins[0], self._joined, rows)
        ops.recall(self.source_states, self.states, self.cache, memory.hidden, rows)
        ops.norm(memory.hidden, None, weights.joined_norms[1], memory.x, rows)
        ops.product(memory.x, weights.joins[1], memory.delta, rows)
        ops.norm(memory.hidden, self._joined, weights.joined_norms[1], memory.x, rows)
        return memory.delta


class MedusaStack(StateStack):
    """The forward of Medusa heads: the LM head's rows are stored head after head.

    Only `read` knows the place of a row's logits, so the host draws from them.
    """

    _stride = 0  # rows of a head in the forward that was read last

    def __init__(self, *parts: Any, max_rows: int, max_sequences: int) -> None:
        super().__init__(*parts, max_rows=max_rows, max_sequences=max_sequences)
        self._heads, ops, self.draws = self.shard.num_heads_used, self.weights.ops, None
        many = self._heads * max_rows
        self.candidates = ReadOut(self.backend, self.group, many, self.options.top_k)
        if ops is not None:
            self.buffers.logits = ops.logits(many, self.shard.vocab)
            self._drafted = ops.buffer(many, self.shard.shape.hidden)

    def _forward(self, ops: Ops, rows: int, k: int) -> None:
        memory = self.buffers
        ops.begin(self.cache, rows)
        for head in range(self._heads):
            layer = self.weights.layers[head]
            ops.recall(self.source_states, self.states, self.cache, memory.hidden, rows)
            ops.norm(memory.hidden, None, layer.ffn_norm, memory.x, rows)
            ops.gated(memory.x, layer.gate_up, memory.inner, rows)
            ops.product(memory.inner, layer.down, memory.delta, rows)
            out = self._drafted[head * rows : (head + 1) * rows]
            ops.norm(memory.hidden, memory.delta, self.weights.head_norms[head], out, rows)
        every = self._heads * rows
        ops.product(self._drafted, self.weights.head, memory.logits, every)
        self.candidates.issue(self.best(every), every, k)

    def read(self, rows: int, k: int | None = None) -> tuple[Ints, Floats]:
        """Returns the candidates of the last forward: (token ids, logits), [heads, 1, n, k]."""
        self._stride = self._rows(rows)
        ids, values = self._read(self._heads * self._stride, k)
        shape = self._heads, 1, self._stride, -1
        return ids.reshape(shape), values.reshape(shape)

    def logits(self, rows: Sequence[int]) -> Floats:
        """Returns the logits of these rows, after `read`; rows count on from head to head."""
        count = self._placed or self._stride
        return super().logits([row // count * self._stride + row % count for row in rows])


def open_stack(weights: TransformerWeights, *parts: Any, **sizes: int) -> TransformerStack:
    """Returns the stack of a model's kind; parts: backend, group, shard and options."""
    kinds: dict[str, Any] = {"": TransformerStack, "medusa": MedusaStack}
    stack: TransformerStack = kinds.get(weights.config.kind, StateStack)(*parts, weights, **sizes)
    return stack
