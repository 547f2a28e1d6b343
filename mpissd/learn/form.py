"""A draft's shape where it is not layers of its target."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpissd.common.errors import ConfigError
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.quantize import BLOCK


@dataclass(frozen=True)
class Form:
    """A fresh draft's shape; its hidden size and head size are the target's.

    name: "LAYERSxHEADSxKV_HEADSxFFN".
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    ffn: int


def form_of(text: str) -> Form:
    """Parses "4x9x3x1536"; raises ConfigError for another text."""
    parts = text.split("x")
    numbers = [int(part) for part in parts if part.isdecimal()]
    is_shape = len(parts) == len(numbers) == 4 and min(numbers) > 0
    if not is_shape or numbers[1] % numbers[2] or numbers[3] % 32:
        told = "allowed: LAYERSxHEADSxKV_HEADSxFFN, heads a multiple of KV heads, FFN of 32"
        raise ConfigError(f"shapes={text}: {told}")
    return Form(text, *numbers)


def draft_config(target: TransformerConfig, form: Form | int, head_vocab: int) -> TransformerConfig:
    """Returns the architecture of a draft with a reduced head; form: or a number of layers.

    Raises ConfigError for heads whose outputs cannot be quantised in blocks.
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
    if shape.q_width % BLOCK:
        told = f"{shape.num_heads} heads of {shape.head_dim}"
        raise ConfigError(
            f"shapes: {told}: allowed: heads that are {BLOCK} wide together, or 64, …"
        )
    return replace(target, shape=shape, tied=False, head_vocab=head_vocab)
