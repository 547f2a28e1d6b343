"""Head-sized drafts: small stacks of products on the target's hidden states, with its widths.

eagle:8b      EAGLE [2401.15077]: the target's feature and the token's embedding, side by side,
              fused by one product 2h → h, then one decoder layer of the target's shape
mtp:8b        a multi-token-prediction module of DeepSeek-V3 [2412.19437, 2.2]: M_k, d x 2d,
              then one block; its products equal EAGLE's if the block is the target's layer
medusa4:8b    Medusa [2401.10774]: 4 heads h → h side by side, each with its own LM head; one
              forward drafts all 4 tokens (medusa:8b has 4 heads)
mlp3072:8b    MLPSpeculator [2404.19124]: state → inner width 3072, then an LM head on that
              width; one stage a token (mlp:8b: as wide as the hidden state)

LM heads count only with --lm_head, as everywhere. docs/schedules.md lists the omissions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mpissd.common.errors import ConfigError

# Drafts that read the target's last hidden state: Medusa heads (2401.10774), an MLP speculator
# (2404.19124), one EAGLE or multi-token-prediction layer (2401.15077; 2412.19437, section 2.2).
STATE_KINDS = ("medusa", "mlp", "eagle")

MEDUSA_HEADS = 4
_FORM = re.compile(r"(eagle|mtp|medusa|mlp)(\d{1,5})?([:-])(.+)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class DraftHead:
    """The products of a head-sized draft in addition to its decoder layers.

    fused: hidden vectors that a first product joins into one (0: no such product). widths: columns
    of each head's product on the hidden state; such a head has its own LM head. lm_heads: the
    number of LM heads.
    """

    fused: int = 0
    widths: tuple[int, ...] = ()
    lm_heads: int = 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens that one forward drafts."""
        return max(1, len(self.widths))


def split_head(text: str, is_name: Callable[[str], bool]) -> tuple[str, int | None, str] | None:
    """Splits eagle:8b, medusa4:8b, … into (kind, number or None, target); None if text names no
    head.

    A shape's own name has a dash there (eagle-llama-3.1-8b), and so may a path; with a dash, text
    is a head only if is_name(target).
    """
    match = _FORM.fullmatch(text)
    if match is None or (match[3] == "-" and not is_name(match[4])):
        return None
    return match[1].lower(), None if match[2] is None else int(match[2]), match[4]


def make_head(kind: str, number: int | None, hidden: int) -> tuple[str, int, DraftHead]:
    """Returns (name prefix, number of decoder layers, DraftHead) for a target of width `hidden`.

    number: heads of Medusa, inner width of an MLPSpeculator. Raises ConfigError if it is not
    allowed.
    """
    if kind in ("eagle", "mtp"):
        if number is not None:
            raise ConfigError(f"{kind}{number}: allowed: {kind}:TARGET, without a number")
        return kind, 1, DraftHead(fused=2)
    if number == 0:
        raise ConfigError(f"{kind}0: allowed: a number from 1")
    if kind == "medusa":
        count = number or MEDUSA_HEADS
        return f"medusa{count}", 0, DraftHead(widths=(hidden,) * count, lm_heads=count)
    inner = number or hidden
    return f"mlp{inner}", 0, DraftHead(widths=(inner,))
