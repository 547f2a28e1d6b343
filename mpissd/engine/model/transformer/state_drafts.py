"""Forwards of drafts that read their target's last hidden state (heads.STATE_KINDS).

With e the embedding of a position's token, h the target's normalised last hidden state in front of
that position, and n, n' RMSNorms of their own:

    mlp, eagle   u = h + S·n(h) + E·n'(e); one layer on u (mlp: its SwiGLU block alone); its final
                 norm gives s. The LM head reads s, and s is h of the position behind.
    medusa       s_i = norm_i(h + SwiGLU_i(n_i(h))) for each head i; one forward drafts all tokens.

S and E side by side are the product that fuses both in EAGLE (2401.15077, section 4.1) and in
DeepSeek-V3's module (2412.19437, equation 21). Where Wertheimer et al. (2404.19124) have a
normalised sum and GELU with weights for each place, `mlp` has SwiGLU and the same weights at each
place; a Medusa head's block (2401.10774, section 2.1.1) is SwiGLU in place of one SiLU product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Array, Backend, Cost
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import ReadOut
from mpissd.engine.model.transformer.checkpoint import Floats
from mpissd.engine.model.transformer.ops import Ops
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.model.transformer.stack import TransformerStack, TransformerStacks
from mpissd.engine.model.transformer.weights import (
    StateWeights,
    TransformerWeights,
    load_state_weights,
)


@dataclass(frozen=True)
class StateShard(TransformerShard):
    """The whole of a draft that reads hidden states, with the costs of its forwards.

    heads: Medusa heads that a forward computes (0: all of the file).
    """

    heads_used: int = 0

    @property
    def num_heads_used(self) -> int:
        """Tokens of a sequence that one forward drafts."""
        if self.config.kind != "medusa":
            return 1
        return self.heads_used or self.shape.num_layers

    def layer_params(self) -> int:
        """Returns the number of weights of one layer, or of one Medusa head; norms included."""
        if self.config.kind == "eagle":
            return super().layer_params()
        return self.shape.hidden * (3 * self.shape.ffn + 1 + (self.config.kind == "medusa"))

    def num_params(self, options: ForwardOptions) -> int:
        """Returns the number of weights that one forward reads, its LM head included once."""
        hidden = self.shape.hidden
        behind = hidden * (self.vocab + 1)
        if self.config.kind == "medusa":
            return self.num_heads_used * self.layer_params() + hidden * self.vocab
        return 2 * hidden * (hidden + 1) + self.layer_params() + behind

    def num_products(self, options: ForwardOptions) -> int:
        """Returns the number of matrix products that one forward issues."""
        return {"medusa": 2 * self.num_heads_used + 1, "mlp": 5, "eagle": 8}[self.config.kind]

    @property
    def kv_layers(self) -> int:
        """Layers that keep keys and values: that of EAGLE."""
        return int(self.config.kind == "eagle")

    def cache_bytes(self, rows: int, sequences: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of keys, values and the states of both models, by slot."""
        states = 2 * sequences * (options.capacity + 1) * self.shape.hidden * itemsize
        return super().cache_bytes(rows, sequences, options, itemsize) + states

    def cost(
        self,
        rows: int,
        sequences: int,
        itemsize: int,
        options: ForwardOptions,
        most_rows: int | None = None,
    ) -> Cost:
        """Returns the cost of a forward; each Medusa head computes its row of the LM head."""
        told = super().cost(rows, sequences, itemsize, options, most_rows)
        more = (self.num_heads_used - 1) * self.shape.hidden * self.vocab
        attends = told.flops - 2 * rows * told.params if self.config.kind == "eagle" else 0
        return replace(told, flops=2 * rows * (told.params + more) + attends)


class StateStack(TransformerStack):
    """An MLP speculator's or an EAGLE layer's forward; `states` are its own."""

    weights: StateWeights
    _source: Array = None  # the target's states

    def _allocate(self, max_rows: int) -> None:
        # [max_rows, hidden], the embedding's part of the product that joins.
        self._joined = None if self.weights.ops is None else self.weights.ops.delta(max_rows)

    def read_states(self, target: TransformerStack) -> None:
        """Takes the states of a target on the same device; before any forward is compiled."""
        self._source = target.states

    def _enter(self, ops: Ops, rows: int) -> Array:
        memory, weights = self.buffers, self.weights
        ops.embed(weights.table, memory.tokens, memory.hidden, rows)
        ops.norm(memory.hidden, None, weights.joined_norms[0], memory.x, rows)
        ops.product(memory.x, weights.joins[0], self._joined, rows)
        ops.recall(self._source, self.states, self.cache, memory.hidden, rows)
        ops.norm(memory.hidden, None, weights.joined_norms[1], memory.x, rows)
        ops.product(memory.x, weights.joins[1], memory.delta, rows)
        ops.norm(memory.hidden, self._joined, weights.joined_norms[1], memory.x, rows)
        return memory.delta

    def _attention(self, ops: Ops, number: int, rows: int, delta: Array | None) -> None:
        if self.weights.config.kind == "eagle":
            super()._attention(ops, number, rows, delta)


class MedusaStack(StateStack):
    """The forward of Medusa heads: rows of the LM head lie one head behind the other."""

    shard: StateShard
    _stride = 0  # rows of a head in the forward that was read last

    def _allocate(self, max_rows: int) -> None:
        super()._allocate(max_rows)
        self._heads, ops = self.shard.num_heads_used, self.weights.ops
        many = self._heads * max_rows
        self.candidates = ReadOut(self.backend, self.group, many, self.options.top_k)
        if ops is not None:
            self.buffers.logits = ops.logits(many, self.shard.vocab)
            self._drafted = ops.buffer(many, self.shard.shape.hidden)
        self.draws = None  # a row's logits are where `read` says

    def _forward(self, ops: Ops, rows: int, k: int) -> None:
        memory = self.buffers
        ops.begin(self.cache, rows)
        for head in range(self._heads):
            layer = self.weights.layers[head]
            ops.recall(self._source, self.states, self.cache, memory.hidden, rows)
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


@dataclass(frozen=True)
class StateStacks(TransformerStacks):
    """Factory of one draft that reads its target's states (see stacks.Stacks).

    heads: StateShard.num_heads_used, which decides the buffers.
    """

    heads: int = 1

    def weights(
        self, backend: Backend, shard: Any, options: ForwardOptions, *, max_rows: int, seed: int
    ) -> StateWeights:
        """Returns the weights; see load_weights for what it raises."""
        checkpoint = open_checkpoint(self.where, seed, self.target)
        return load_state_weights(backend, checkpoint, shard, max_rows=max_rows, page=self.page)

    def _kind(self, weights: TransformerWeights) -> type[TransformerStack]:
        return MedusaStack if weights.config.kind == "medusa" else StateStack
