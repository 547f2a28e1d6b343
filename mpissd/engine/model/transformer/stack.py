"""A transformer on one rank: its share of the weights (see shard.py), and its forward.

Drafts that read their target's last hidden state (shapes.STATE_KINDS) have another input and
output. Let e be the embedding of a position's token, h the target's normalised last hidden state
before that position, n, n', n_i, norm_i RMSNorms and S, E matrices of the draft:

    mlp, eagle   u = h + S·n(h) + E·n'(e); one layer on u (mlp: its SwiGLU block only); its final
                 norm gives s. The LM head reads s, and s is h of the next position.
    medusa       s_i = norm_i(h + SwiGLU_i(n_i(h))) for each head i; one forward drafts all tokens.

S and E side by side are the matrix that fuses h and e in EAGLE (2401.15077, section 4.1) and in
DeepSeek-V3's module (2412.19437, equation 21). Wertheimer et al. (2404.19124) have a normalised sum
and GELU with other weights at each drafted position; `mlp` has SwiGLU with the same weights at all.
A Medusa head's block is SwiGLU, and not one SiLU product (2401.10774, section 2.1.1).
"""

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
    ALL,
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
from mpissd.engine.model.transformer.ops import LayerWeights, Ops, ops_of


@dataclass(frozen=True)
class TransformerWeights:
    """One rank's packed weights of a transformer; without arrays on a backend that computes
    nothing. table: the embedding, the vocabulary's rows and then those of the config's mask tokens.
    head_ids: the token of each row of the LM head, for a draft whose vocabulary is smaller than its
    target's; None: row n is token n. source: the checkpoint that the weights were read from. Of
    drafts that read hidden states: joined_norms and joins, the norms and matrices that join a
    hidden state and an embedding; head_norms, the norm of each Medusa head."""

    config: TransformerConfig
    max_rows: int
    ops: Ops | None
    layers: tuple[LayerWeights, ...] = ()
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
        return "modelled" if self.ops is None else self.ops.kernel


def load_weights(
    backend: Backend,
    checkpoint: Checkpoint,
    shard: TransformerShard,
    *,
    max_rows: int,
    page: int | None = None,
) -> TransformerWeights:
    """Reads and packs one rank's share of a model's weights. shard: says which share, and how many
    layers. max_rows: rows of the largest forward. page: positions of a KV page (None: the backend's
    default). Raises ConfigError for a checkpoint that lacks a part, and MemoryError."""
    config = checkpoint.config
    ops = ops_of(backend, config, heads=shard.heads, kv_heads=shard.kv_heads, page=page)
    if ops is None:
        return TransformerWeights(config, max_rows, None)
    part = checkpoint.part
    is_medusa = config.kind == "medusa"
    joined, joins = (JOINED, JOINS) if config.kind in ("mlp", "eagle") else ((), ())
    prefixes = [f"model.layers.{n}." for n in range(shard.shape.num_layers)]
    norms = [prefix + HEAD_NORM for prefix in prefixes] if is_medusa else []
    return TransformerWeights(
        config,
        max_rows,
        ops,
        tuple(_layer(ops, checkpoint, shard, prefix) for prefix in prefixes),
        None if is_medusa else ops.table(checkpoint.table()),
        None if is_medusa else ops.vector(checkpoint.read(LAST_NORM)),
        ops.matrix([part(HEAD, shard.vocab_range)]),
        checkpoint.head_ids,
        checkpoint,
        tuple(ops.vector(checkpoint.read(name)) for name in joined),
        tuple(ops.matrix([part(name)]) for name in joins),
        tuple(ops.vector(checkpoint.read(name)) for name in norms),
    )


def _layer(ops: Ops, checkpoint: Checkpoint, shard: TransformerShard, prefix: str) -> LayerWeights:
    """Packs one layer, with its attention if it has one; its tensors' names begin with `prefix`."""
    config = checkpoint.config
    part = checkpoint.part

    def vector(*names: str, rows: Sequence[slice] = (ALL,)) -> Array:
        parts = zip(names, rows, strict=True)
        return ops.vector(
            np.concatenate([checkpoint.read(prefix + name, part) for name, part in parts])
        )

    layer = LayerWeights(
        ffn_norm=vector("post_attention_layernorm.weight"),
        gate_up=ops.gate_up(
            part(f"{prefix}mlp.gate_proj.weight", shard.ffn),
            part(f"{prefix}mlp.up_proj.weight", shard.ffn),
        ),
        down=ops.matrix([part(f"{prefix}mlp.down_proj.weight", columns=shard.ffn)]),
    )
    if config.kind not in ("", "eagle"):
        return layer
    rows = {"self_attn.q_proj": shard.q, "self_attn.k_proj": shard.kv, "self_attn.v_proj": shard.kv}
    layer.attention_norm = vector("input_layernorm.weight")
    layer.qkv = ops.qkv_matrix([part(f"{prefix}{name}.weight", at) for name, at in rows.items()])
    if config.qkv_bias:
        layer.qkv_bias = vector(*(f"{name}.bias" for name in rows), rows=[*rows.values()])
    if config.qk_norm:
        layer.q_norm = vector("self_attn.q_norm.weight")
        layer.k_norm = vector("self_attn.k_norm.weight")
    layer.o = ops.matrix([part(f"{prefix}self_attn.o_proj.weight", columns=shard.q)])
    return layer


class Buffers:
    """Host and device buffers of a transformer's forward of up to `rows` rows. tokens: the input,
    int32 [rows] on the host. The others are on the device, and absent on a backend that computes
    nothing. hidden: the residual stream; x: a norm's output; delta: the sum that is added to the
    residual stream; all [rows, hidden]. q, attended (attention's output), inner (the FFN's inner
    vector), logits: [rows, this rank's share of columns]."""

    logits: Any = None

    def __init__(
        self, backend: Backend, shard: TransformerShard, ops: Ops | None, rows: int
    ) -> None:
        self.tokens: Any = backend.host_ints(rows)
        if ops is None:
            return
        self.hidden: Any = ops.hidden(rows)
        self.x: Any = ops.normed(rows, shard.shape.hidden)
        self.delta: Any = ops.delta(rows)
        self.q: Any = ops.buffer(rows, shard.q_width)
        self.attended: Any = ops.buffer(rows, shard.q_width)
        self.inner: Any = ops.buffer(rows, shard.ffn_width)
        self.logits = ops.logits(rows, shard.vocab)


class TransformerStack(Stack):
    """A transformer on one rank: weights, buffers, KV cache, and the forward `body(rows)`. states:
    the last layer's hidden state at each position, kept only for a draft that reads it
    (ForwardOptions.states). firsts: int32 [T], for each of T ranks the token of its first logit."""

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
        """Allocates the buffers, and a KV cache for max_sequences sequences."""
        super().__init__(backend, group, shard, options)
        self.weights = weights
        self.states = None
        ops = weights.ops
        sizes = CacheSizes(
            shard.kv_layers,
            shard.kv_heads,
            shard.shape.head_dim,
            slots=max_sequences,
            capacity=options.capacity,
            page=64 if ops is None else ops.page,
            lanes=options.lanes,
            steps=options.steps,
            pool=options.pool,
        )
        row_places = RowPlaces(backend.host_ints, max_rows, sizes)
        self.pages = PageTable(row_places, sizes)
        self.cache = None if ops is None else ops.cache(sizes, row_places)
        self.buffers = Buffers(backend, shard, ops, max_rows)
        if ops is not None and group.size == 1:  # If ranks share the logits, the host samples.
            self.draws = ops.draws(self.buffers.logits)
        if ops is not None and options.states:
            self.states = ops.states(max_sequences, options.capacity + 1)
        self.candidates = ReadOut(backend, group, max_rows, options.top_k)
        self._placed = 0
        self._reads = True
        ranks = [replace(shard, rank=rank) for rank in range(group.size)]
        self.firsts = np.array([rank.vocab_range.start for rank in ranks], np.int32)

    def place(self, places: Places | None) -> None:
        self._placed = self.pages.place(places)
        self._reads = places is None or places.reads

    def steer(self) -> None:
        """Makes the next forward compute all rows of its compiled size, at the places that the
        device writes into pages.row_places."""
        self._placed = 0
        self._reads = True

    def reload(self, arrays: Arrays | None) -> Iterator[None]:
        """Replaces the weights by new ones; the contents of the KV cache are void afterwards.

        arrays: the new tensors by name; None: those of the model's files. Yields between layers, so
        that the caller may do other work. All weights are packed into other memory first and copied
        after the last yield, so that no forward reads a mixture. The embedding stays, and so does
        an LM head that is the target's. Captured programs stay valid, because the arrays keep their
        addresses. Raises ProtocolError for arrays whose names or shapes are not the model's.
        """
        weights = self.weights
        source = weights.source
        ops = weights.ops
        assert source is not None and ops is not None, "weights that nothing computes with"
        version = source if arrays is None else new_version(source, arrays)
        pairs = list[tuple[Any, Any]]()
        for number, layer in enumerate(weights.layers):
            new = vars(_layer(ops, version, self.shard, f"model.layers.{number}."))
            pairs += [(old, new[name]) for name, old in vars(layer).items() if old is not None]
            yield
        pairs.append((weights.norm, ops.vector(version.read(LAST_NORM))))
        if HEAD in replaced(version):
            pairs.append((weights.head, ops.matrix([version.part(HEAD, self.shard.vocab_range)])))
            yield
        for old, new in pairs:
            ops.overwrite(old, new)
        if arrays is None:
            ops.clear(self.cache)

    def move(self, lane: int, slot: int, start: int, stop: int) -> None:
        self.pages.hold(np.array([slot]), np.array([stop - 1]))
        if self.weights.ops is not None:
            self.weights.ops.move(self.cache, lane, slot, start, stop)

    def release(self, slots: Sequence[int]) -> None:
        self.pages.release(slots)

    def _rows(self, bucket: int) -> int:
        return bucket if self.weights.ops.computes_padding else self._placed or bucket

    def body(self, rows: int, k: int | None = None) -> Callable[[], None]:
        ops = self.weights.ops
        wanted = k or self.options.top_k
        return lambda: None if ops is None else self._forward(ops, self._rows(rows), wanted)

    def _forward(self, ops: Ops, rows: int, k: int) -> None:
        """Enqueues a forward of exactly `rows` rows, which reads out k candidates per row."""
        memory = self.buffers
        cache = self.cache
        weights = self.weights
        ops.begin(cache, rows)
        delta = self._enter(ops, rows)
        is_read = self._reads or ops.computes_padding

        def summed(x: Array, weight: Array) -> Array:
            """Sets memory.delta to the sum of x · weightᵀ over the ranks, and returns it."""
            ops.product(x, weight, memory.delta, rows)
            if self.group.size > 1:
                ops.sum_ranks(self.group, memory.delta, rows)
            return memory.delta

        is_done = self.states is None and ops.at_once(self.group, weights, memory, cache, rows)
        for number, layer in enumerate(() if is_done else weights.layers):
            if layer.o is not None:
                ops.norm(memory.hidden, delta, layer.attention_norm, memory.x, rows)
                ops.qkv(memory.x, layer, cache, number, memory.q, rows)
                ops.attend(cache, number, memory.q, memory.attended, rows)
                delta = summed(memory.attended, layer.o)
            ops.norm(memory.hidden, delta, layer.ffn_norm, memory.x, rows)
            ops.gated(memory.x, layer.gate_up, memory.inner, rows)
            delta = summed(memory.inner, layer.down)
        if not is_done and (is_read or self.states is not None):
            ops.norm(memory.hidden, memory.delta, weights.norm, memory.x, rows)
        if self.states is not None:
            ops.keep(memory.x, cache, self.states, rows)
        if is_read and not is_done:
            ops.product(memory.x, weights.head, memory.logits, rows)
        if is_read:
            self.candidates.issue(self.best(rows), rows, k)

    def _enter(self, ops: Ops, rows: int) -> Array | None:
        """Sets the residual stream to the tokens' embeddings. Returns a sum that the first norm has
        to add to the stream, or None."""
        ops.embed(self.weights.table, self.buffers.tokens, self.buffers.hidden, rows)
        return None

    def best(self, rows: int) -> Find:
        ops = self.weights.ops
        logits = self.buffers.logits
        return lambda k, ids, values: ops.top_k(logits, k, ids, values, rows)

    def read(self, rows: int, k: int | None = None) -> tuple[Ints, Floats]:
        return self._read(self._rows(rows), k)

    def _read(self, rows: int, k: int | None) -> tuple[Ints, Floats]:
        ids, values = self.candidates.read(rows, k or self.options.top_k)
        ids = ids + self.firsts[:, None, None]
        if self.weights.head_ids is not None:
            ids = self.weights.head_ids[ids]
        return ids, values

    def logits(self, rows: Sequence[int]) -> Floats:
        logits: Floats = self.weights.ops.read(self.buffers.logits, rows)
        return logits


class StateStack(TransformerStack):
    """An MLP speculator or an EAGLE layer on one rank, a draft that reads its target's hidden
    states. source_states: the target's hidden states, set before forwards are compiled. states: the
    draft's own hidden states."""

    source_states: Array = None

    def __init__(self, *parts: Any, max_rows: int, max_sequences: int) -> None:
        super().__init__(*parts, max_rows=max_rows, max_sequences=max_sequences)
        ops = self.weights.ops
        self._joined = None if ops is None else ops.delta(max_rows)  # E·n'(e)

    def _enter(self, ops: Ops, rows: int) -> Array:
        memory = self.buffers
        weights = self.weights
        ops.embed(weights.table, memory.tokens, memory.hidden, rows)
        ops.norm(memory.hidden, None, weights.joined_norms[0], memory.x, rows)
        ops.product(memory.x, weights.joins[0], self._joined, rows)
        ops.recall(self.source_states, self.states, self.cache, memory.hidden, rows)
        ops.norm(memory.hidden, None, weights.joined_norms[1], memory.x, rows)
        ops.product(memory.x, weights.joins[1], memory.delta, rows)
        ops.norm(memory.hidden, self._joined, weights.joined_norms[1], memory.x, rows)
        return memory.delta


class MedusaStack(StateStack):
    """Medusa heads on one rank: one forward drafts a token with each head. A head's logits of all
    rows lie together. The host samples, as only `read` knows where a row's logits lie."""

    _stride = 0  # number of rows per head in the forward that was read last

    def __init__(self, *parts: Any, max_rows: int, max_sequences: int) -> None:
        super().__init__(*parts, max_rows=max_rows, max_sequences=max_sequences)
        self._heads = self.shard.num_heads_used
        ops = self.weights.ops
        self.draws = None
        total = self._heads * max_rows
        self.candidates = ReadOut(self.backend, self.group, total, self.options.top_k)
        if ops is not None:
            self.buffers.logits = ops.logits(total, self.shard.vocab)
            self._drafted = ops.buffer(total, self.shard.shape.hidden)

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
        total = self._heads * rows
        ops.product(self._drafted, self.weights.head, memory.logits, total)
        self.candidates.issue(self.best(total), total, k)

    def read(self, rows: int, k: int | None = None) -> tuple[Ints, Floats]:
        self._stride = self._rows(rows)
        ids, values = self._read(self._heads * self._stride, k)
        shape = self._heads, 1, self._stride, -1
        return ids.reshape(shape), values.reshape(shape)

    def logits(self, rows: Sequence[int]) -> Floats:
        """Returns the logits of some rows of the last forward; must be called after `read`. Row m
        of head h has number h · n + m, where n is the forward's number of rows."""
        count = self._placed or self._stride
        return super().logits([row // count * self._stride + row % count for row in rows])


def open_stack(weights: TransformerWeights, *parts: Any, **sizes: int) -> TransformerStack:
    """Makes the model on this rank that suits the weights: a transformer, Medusa heads, or another
    draft that reads hidden states. parts, sizes: the other arguments of TransformerStack."""
    kinds: dict[str, Any] = {"": TransformerStack, "medusa": MedusaStack}
    stack: TransformerStack = kinds.get(weights.config.kind, StateStack)(*parts, weights, **sizes)
    return stack
