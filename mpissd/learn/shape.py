"""The draft's architecture, and its starting point: layers of the target, fresh ones, or an earlier
draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Ints
from mpissd.engine.model.transformer.checkpoint import BLOCK
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.learn.config import Form
from mpissd.learn.llama import Layer, Llama, Tensor, mapped

INITIAL = 0.02  # standard deviation of fresh weights
PLAIN: dict[str, Any] = {"family": "llama", "qkv_bias": False, "qk_norm": False}


def draft_config(target: TransformerConfig, form: Form | int, head_vocab: int) -> TransformerConfig:
    """Returns the architecture of a draft with a reduced head; form: or a number of layers.

    Fresh layers are Llama's, whatever the target's are: no bias, no norm of q and k. Raises
    ConfigError for heads whose outputs cannot be quantised in blocks.
    """
    shape = replace(target.shape, name=f"{target.shape.name}-draft")
    if isinstance(form, int):
        shape = replace(shape, num_layers=form)
    else:
        shape = replace(
            shape,
            num_layers=form.layers,
            num_heads=form.heads,
            num_kv_heads=form.kv_heads,
            ffn=form.ffn,
        )
        target = replace(target, **PLAIN)
    if shape.q_width % BLOCK:
        told = f"{shape.num_heads} heads of {shape.head_dim}"
        raise ConfigError(
            f"shapes: {told}: allowed: heads that are {BLOCK} wide together, or 64, …"
        )
    return replace(target, shape=shape, tied=False, head_vocab=head_vocab)


def state_config(
    target: TransformerConfig, kind: str, heads: int, head_vocab: int
) -> TransformerConfig:
    """Returns the architecture of a draft of one of shapes.STATE_KINDS, with the target's widths.

    Medusa's heads have the FFN of one layer together, in whole groups of BLOCK columns; eagle's
    attention is Llama's. Raises ConfigError for widths that cannot be quantised.
    """
    if target.shape.hidden % BLOCK or target.shape.ffn % BLOCK:
        told = f"a hidden state of {target.shape.hidden} and an FFN of {target.shape.ffn}"
        raise ConfigError(f"kinds={kind}: {told}: allowed: multiples of {BLOCK}")
    shape, name = target.shape, f"{target.shape.name}-{kind}"
    ffn, layers = shape.ffn, 1
    if kind == "medusa":
        ffn, layers = max(BLOCK, ffn // heads // BLOCK * BLOCK), heads
    shape = replace(shape, name=name, num_layers=layers, ffn=ffn)
    own = {**PLAIN, "tied": False, "head_vocab": head_vocab, "kind": kind}
    return replace(target, shape=shape, **own)


def frequent_tokens(counts: Ints, num_tokens: int, always: Sequence[int]) -> Ints:
    """Returns the most frequent token ids, rising: int32 [num_tokens].

    counts: [vocab]. always: ids that are kept whatever their count (stop tokens). Equal counts are
    decided for the lower id: byte-pair merges are numbered from the most frequent on.
    """
    weights = np.asarray(counts, np.int64).copy()
    weights[list(always)] = np.iinfo(np.int64).max
    order = np.argsort(-weights, kind="stable")
    return np.sort(order[:num_tokens]).astype(np.int32)


def cut(target: Llama, layers: Sequence[int], head_ids: Ints) -> Llama:
    """Returns a draft of the target's layers that can be trained, in float32.

    Its embedding is the target's own, whole and frozen.
    """
    return started(target, tuple(target.layers[number] for number in layers), head_ids)


def fresh(target: Llama, config: TransformerConfig, head_ids: Ints, seed: int) -> Llama:
    """Returns a draft of random layers; its norm and its head's rows start as the target's."""
    generator = torch.Generator().manual_seed(seed)
    shape, hidden, device = config.shape, config.shape.hidden, target.head.device
    residual = INITIAL / (2 * shape.num_layers) ** 0.5  # of a layer's addition to the residual

    def drawn(outputs: int, inputs: int, scale: float) -> Tensor:
        return (torch.randn(outputs, inputs, generator=generator) * scale).to(device)

    def layer() -> Layer:
        return Layer(
            drawn(shape.q_width + 2 * shape.kv_width, hidden, INITIAL),
            drawn(hidden, shape.q_width, residual),
            drawn(2 * shape.ffn, hidden, INITIAL),
            drawn(hidden, shape.ffn, residual),
            torch.ones(hidden, device=device),
            torch.ones(hidden, device=device),
        )

    return started(target, tuple(layer() for _ in range(shape.num_layers)), head_ids)


def started(target: Llama, layers: tuple[Layer, ...], head_ids: Ints) -> Llama:
    """Returns a draft of these layers that can be trained."""
    rows = torch.from_numpy(head_ids).long().to(target.head.device)
    return mapped(target._replace(layers=layers, head=target.head[rows]), trained)


def trained(tensor: Tensor) -> Tensor:
    """Returns a float32 copy of a tensor that can be trained."""
    made = tensor.detach().float().clone(memory_format=torch.contiguous_format)
    return made.requires_grad_(True)
