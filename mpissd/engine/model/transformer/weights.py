"""One rank's share of a transformer's weights, packed by the operations that read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Array, Backend
from mpissd.engine.model.transformer.checkpoint import (
    EMBEDDING,
    HEAD,
    HEAD_NORM,
    JOINED,
    JOINS,
    LAST_NORM,
    Checkpoint,
    replaced,
)
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.ops import Layer, Ops, ops_of
from mpissd.engine.model.transformer.shard import TransformerShard


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
    ops = ops_of(backend, config, heads=heads, kv_heads=kv_heads, max_rows=max_rows, page=page)
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


def reload(
    weights: TransformerWeights, checkpoint: Checkpoint, shard: TransformerShard
) -> Iterator[None]:
    """Overwrites one rank's share in place by its share of another checkpoint of the same shapes.

    Yields between its parts, so that the caller may do other work: each is packed into memory of
    its own first. All of them are copied after the last yield, in one go, so that no forward reads
    two checkpoints. The embedding table stays, and so does an LM head that the target lends.
    Programs that were captured over the weights stay valid: the arrays keep their addresses.
    """
    ops = weights.ops
    if ops is None:
        return
    fresh = list[tuple[Any, Any]]()
    for number, layer in enumerate(weights.layers):
        new = _layer(ops, checkpoint, shard, f"model.layers.{number}.")
        fresh += [(old, vars(new)[name]) for name, old in vars(layer).items() if old is not None]
        yield
    fresh.append((weights.norm, ops.vector(checkpoint.read(LAST_NORM))))
    if HEAD in replaced(checkpoint):
        fresh.append((weights.head, ops.matrix([checkpoint.part(HEAD, shard.vocab_range)])))
        yield
    for old, new in fresh:
        ops.overwrite(old, new)
