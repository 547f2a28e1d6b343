"""One rank's share of a transformer's weights, packed by the operations that read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Array, Backend
from mpissd.engine.model.transformer.checkpoint import (
    HEAD,
    HEAD_NORM,
    JOINED,
    JOINS,
    LAST_NORM,
    Checkpoint,
    Floats,
)
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.ops import Layer, Ops, Part, ops_of
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.versions import replaced


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
    loader, is_medusa = _Loader(ops, checkpoint, shard), config.kind == "medusa"
    joined, joins = (JOINED, JOINS) if config.kind in ("mlp", "eagle") else ((), ())
    prefixes = [f"model.layers.{n}." for n in range(shard.shape.num_layers)]
    return TransformerWeights(
        config,
        max_rows,
        ops,
        tuple(map(loader.layer, prefixes)),
        None if is_medusa else ops.table(checkpoint),
        None if is_medusa else loader.vector(LAST_NORM),
        ops.matrix(checkpoint, [Part(HEAD, rows=shard.vocab_range)]),
        checkpoint.head_ids(),
        checkpoint,
        tuple(loader.vector(name) for name in joined),
        tuple(ops.matrix(checkpoint, [Part(name)]) for name in joins),
        tuple(loader.vector(prefix + HEAD_NORM) for prefix in prefixes) if is_medusa else (),
    )


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
    loader, fresh = _Loader(ops, checkpoint, shard), list[tuple[Any, Any]]()
    for number, layer in enumerate(weights.layers):
        fresh.append((layer, loader.layer(f"model.layers.{number}.")))
        yield
    fresh.append((weights.norm, loader.vector(LAST_NORM)))
    if HEAD in replaced(checkpoint):
        head = ops.matrix(checkpoint, [Part(HEAD, rows=shard.vocab_range)])
        fresh.append((weights.head, head))
        yield
    for old, new in fresh:
        _overwrite(ops, old, new)


def _overwrite(ops: Ops, old: Any, new: Any) -> None:
    """Copies a layer's weights, or one weight, over those that are read."""
    if not isinstance(old, Layer):
        ops.overwrite(old, new)
        return
    for part in fields(Layer):
        if getattr(old, part.name) is not None:
            ops.overwrite(getattr(old, part.name), getattr(new, part.name))


class _Loader:
    """Packs the layers of a checkpoint."""

    def __init__(self, ops: Ops, checkpoint: Checkpoint, shard: TransformerShard) -> None:
        self.ops, self.checkpoint, self.shard = ops, checkpoint, shard

    def layer(self, prefix: str) -> Layer:
        """Returns the layer whose names begin with `prefix`; its attention, if it has one."""
        ops, checkpoint, shard, mlp = self.ops, self.checkpoint, self.shard, f"{prefix}mlp."
        gate, up = (Part(f"{mlp}{name}_proj.weight", shard.ffn) for name in ("gate", "up"))
        layer = Layer(
            ffn_norm=self.vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=ops.gate_up(checkpoint, gate, up),
            down=ops.matrix(checkpoint, [Part(f"{mlp}down_proj.weight", columns=shard.ffn)]),
        )
        config, attention = checkpoint.config, f"{prefix}self_attn."
        if config.kind not in ("", "eagle"):
            return layer
        inputs = {"q_proj": shard.q, "k_proj": shard.kv, "v_proj": shard.kv}
        parts = [Part(f"{attention}{name}.weight", rows) for name, rows in inputs.items()]
        biases = {f"{attention}{name}.bias": part for name, part in inputs.items()}
        return replace(
            layer,
            attention_norm=self.vector(f"{prefix}input_layernorm.weight"),
            qkv=ops.qkv_matrix(checkpoint, parts),
            qkv_bias=self.joined(biases) if config.qkv_bias else None,
            q_norm=self.vector(f"{attention}q_norm.weight") if config.qk_norm else None,
            k_norm=self.vector(f"{attention}k_norm.weight") if config.qk_norm else None,
            o=ops.matrix(checkpoint, [Part(f"{attention}o_proj.weight", columns=shard.q)]),
        )

    def vector(self, name: str) -> Array:
        return self.ops.vector(self.checkpoint.vector(name))

    def joined(self, parts: dict[str, slice]) -> Array:
        values: list[Floats] = [self.checkpoint.vector(name, part) for name, part in parts.items()]
        return self.ops.vector(np.concatenate(values))
