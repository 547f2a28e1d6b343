"""A draft's shape where it is not layers of its target."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.errors import ConfigError


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
