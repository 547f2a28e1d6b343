"""The shapes (widths and depth, no weights) of models and of head-sized drafts of a target.

A head-sized draft is a small stack of matrix products on the target's hidden states:

eagle:8b      EAGLE [2401.15077]: the target's feature and the token's embedding, side by side,
              fused by one product 2h → h, then one decoder layer of the target's shape
mtp:8b        a multi-token-prediction module of DeepSeek-V3 [2412.19437, 2.2]: M_k, d x 2d,
              then one block; its products equal EAGLE's if the block is the target's layer
medusa4:8b    Medusa [2401.10774]: 4 heads h → h side by side, each with its own LM head; one
              forward drafts all 4 tokens (medusa:8b has 4 heads)
mlp3072:8b    MLPSpeculator [2404.19124]: state → inner width 3072, then an LM head on that
              width; one stage a token (mlp:8b: as wide as the hidden state)

LM heads are modelled only with --lm_head. docs/schedules.md lists what is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from mpissd.common.errors import ConfigError

SCALED = re.compile(r"@(\d{1,6})[Ll]$")  # number of layers after a name: llama-3.1-70b@8L
# Kinds of drafts that read the target's last hidden state.
# The kind "eagle" includes multi-token-prediction layers (arXiv 2412.19437, section 2.2).
STATE_KINDS = ("medusa", "mlp", "eagle")
MOST_MASKS = 63  # the most mask tokens, by which one draft forward drafts several tokens
_MEDUSA_HEADS = 4
_MOST = 2**31 - 1  # the largest width, depth or vocabulary size


@dataclass(frozen=True)
class DraftHead:
    """The matrix products that a head-sized draft (a small draft on the target's hidden states) has
    besides its decoder layers. fused: the number of hidden vectors that a first product joins into
    one (0: no such product). widths: for each head, the columns of its product on the hidden state.
    lm_heads: the number of LM heads."""

    fused: int = 0
    widths: tuple[int, ...] = ()
    lm_heads: int = 1


@dataclass(frozen=True)
class ModelShape:
    """The widths and depth of a decoder-only transformer. ffn: the inner width of the feed-forward
    block, which has three products if gated (gate, up, down) and otherwise two. head: the further
    products of a head-sized draft, which may have no layers; None for a whole model. Raises
    ConfigError for a field out of range."""

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
        """The number of columns of the product q and of rows of o; in Qwen3 it is not `hidden`."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """The number of columns of the product k, and also of v."""
        return self.num_kv_heads * self.head_dim

    @property
    def fused_width(self) -> int:
        """The input width of a head-sized draft's first product (to `hidden`); 0 without one."""
        return 0 if self.head is None else self.head.fused * self.hidden

    @property
    def head_widths(self) -> tuple[int, ...]:
        """The number of columns of each draft head's product on the hidden vector."""
        return () if self.head is None else self.head.widths

    @property
    def lm_head_inputs(self) -> tuple[int, ...]:
        return self.head_widths or (self.hidden,) * (1 if self.head is None else self.head.lm_heads)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that one forward of a draft of this shape drafts."""
        return max(1, len(self.head_widths))

    def scaled(self, num_layers: int) -> ModelShape:
        """Returns the shape with `num_layers` layers and a name that says so (llama-3.1-70b@8L)."""
        if num_layers == self.num_layers:
            return self
        base = SCALED.sub("", self.name)
        return replace(self, name=f"{base}@{num_layers}L", num_layers=num_layers)

    def headed(self, kind: str, number: int | None) -> ModelShape:
        """Returns the shape of a head-sized draft for this target. kind: eagle, mtp, medusa or mlp.
        number: how many heads Medusa has, or the inner width of an MLPSpeculator (None: default).
        Raises ConfigError if the number is not allowed, or this shape is head-sized too."""
        if self.head is not None:
            raise ConfigError(
                f"{kind}:{self.name}: allowed: {kind} on a whole model, not on {self.name}"
            )
        if kind in ("eagle", "mtp"):
            if number is not None:
                raise ConfigError(f"{kind}{number}: allowed: {kind}:TARGET, without a number")
            prefix = kind
            layers = 1
            head = DraftHead(fused=2)
        elif number == 0:
            raise ConfigError(f"{kind}0: allowed: a number from 1")
        else:
            count = (number or _MEDUSA_HEADS) if kind == "medusa" else 1
            width = self.hidden if kind == "medusa" else number or self.hidden
            prefix = f"{kind}{count if kind == 'medusa' else width}"
            layers = 0
            head = DraftHead(widths=(width,) * count, lm_heads=count)
        name = f"{prefix}-{SCALED.sub('', self.name)}"
        return replace(self, name=name, num_layers=layers, head=head)
