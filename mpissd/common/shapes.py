"""The shape of a model: its widths and depth, without its weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from mpissd.common.errors import ConfigError
from mpissd.common.heads import DraftHead

SCALED = re.compile(r"@(\d{1,6})[Ll]$")  # the depth after a name, llama-3.1-70b@8L

_MOST = 2**31 - 1  # of a width, a depth or a vocabulary


@dataclass(frozen=True)
class ModelShape:
    """Widths and depth of a decoder-only transformer.

    hidden: width of the residual stream. ffn: inner width of the feed-forward block, which has
    three products if gated (gate, up, down) and two if not (up, down). head: set for a head-sized
    draft, which may have no decoder layers. Raises ConfigError naming a field that is out of range.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab_size: int
    head: DraftHead | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "num_layers" and self.head is not None else 1
            if field.type == "int" and (type(value) is not int or not least <= value <= _MOST):
                raise ConfigError(
                    f"{self.name}: {field.name}={value!r}: allowed: whole numbers from {least} "
                    f"to {_MOST}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.name}: num_kv_heads={self.num_kv_heads}: "
                f"allowed: a divisor of num_heads={self.num_heads}"
            )

    @property
    def q_width(self) -> int:
        """The columns of q (and rows of o); not always `hidden` (Qwen3)."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """The columns of k, and of v."""
        return self.num_kv_heads * self.head_dim

    @property
    def gemms_per_layer(self) -> int:
        """Seven products (q, k, v, o, gate, up, down); six without a gate."""
        return 7 if self.gated else 6

    @property
    def num_params_per_layer(self) -> int:
        """The number of weights in one layer's products."""
        attention = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        return attention + self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def fused_width(self) -> int:
        """The columns that a first product joins to `hidden`; 0 without such a product."""
        return 0 if self.head is None else self.head.fused * self.hidden

    @property
    def head_widths(self) -> tuple[int, ...]:
        """The columns of each head's product on the hidden vector."""
        return () if self.head is None else self.head.widths

    @property
    def lm_head_inputs(self) -> tuple[int, ...]:
        """The input width of each LM head."""
        if self.head is None:
            return (self.hidden,)
        return self.head.widths or (self.hidden,) * self.head.lm_heads

    @property
    def gemm_params(self) -> int:
        """The number of weights in all products but LM heads; no embedding, norms or biases."""
        head = self.hidden * (self.fused_width + sum(self.head_widths))
        return self.num_layers * self.num_params_per_layer + head

    @property
    def num_tokens(self) -> int:
        """The number of tokens that one forward drafts."""
        return 1 if self.head is None else self.head.num_tokens

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of 16-bit keys and values for one token of context, over all layers."""
        return 2 * self.num_layers * self.kv_width * 2

    def scaled(self, num_layers: int) -> ModelShape:
        """Returns the shape with `num_layers` layers; its name shows it (llama-3.1-70b@8L)."""
        if num_layers == self.num_layers:
            return self
        base = SCALED.sub("", self.name)
        return replace(self, name=f"{base}@{num_layers}L", num_layers=num_layers)
