"""Head-sized drafts: small stacks of products on the target's hidden states, of its widths.

    eagle:8b      EAGLE [2401.15077]: the target's feature and the token's embedding, side by side,
                  fused by one product 2h → h, then one decoder layer of the target's shape
    mtp:8b        a multi-token-prediction module of DeepSeek-V3 [2412.19437, 2.2]: M_k, d x 2d,
                  then one block; product for product EAGLE's, where the block is the target's layer
    medusa4:8b    Medusa [2401.10774]: 4 heads h → h side by side, each with an LM head of its own;
                  one forward drafts all 4 tokens (medusa:8b has 4)
    mlp3072:8b    MLPSpeculator [2404.19124]: state → inner width 3072, then an LM head on that
                  width; a stage a token (mlp:8b: as wide as the hidden state)

LM heads are counted with --lm_head alone, as everywhere. docs/schedules.md lists what is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpissd.errors import ConfigError
from mpissd.schedules import is_tail

if TYPE_CHECKING:
    from mpissd.config import RunConfig
    from mpissd.presets import ModelShape

MEDUSA_HEADS = 4
_FORM = re.compile(r"(eagle|mtp|medusa|mlp)(\d{1,5})?([:-])(.+)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class DraftHead:
    """The products of a head-sized draft that no decoder layer has.

    fused: hidden vectors that a first product joins into one (0: there is no such product).
    widths: columns of each head's product on the hidden state; a head has an LM head of its own.
    lm_heads: LM heads in all.
    """

    fused: int = 0
    widths: tuple[int, ...] = ()
    lm_heads: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens that one forward drafts."""
        return max(1, len(self.widths))


def split_head(text: str, is_name: Callable[[str], bool]) -> tuple[str, int | None, str] | None:
    """(kind, its number, the target) of eagle:8b, medusa4:8b, …; None where text names no head.

    A shape's name has a dash there, eagle-llama-3.1-8b, as a path may have: then is_name(target)
    decides.
    """
    found = _FORM.fullmatch(text)
    if found is None or (found[3] == "-" and not is_name(found[4])):
        return None
    return found[1].lower(), None if found[2] is None else int(found[2]), found[4]


def make_head(kind: str, number: int | None, hidden: int) -> tuple[str, int, DraftHead]:
    """(what the name begins with, decoder layers, products) of a head on `hidden`-wide states.

    number: heads of Medusa, inner width of an MLPSpeculator. ConfigError where it can't be.
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


def check_draft(config: RunConfig, target: ModelShape, draft: ModelShape | None) -> None:
    """ConfigError where a draft's shape, or branches behind the tail alone, make no sense."""
    if target.head is not None:
        raise ConfigError(f"target={target.name}: a draft's shape: allowed: a whole model")
    if config.mode == "ssd" and is_tail(config.fan_out):
        _check_tail(config)
    if draft is None or draft.head is None or config.mode == "ar":
        return
    if draft.head.lm_heads == 0 and not config.is_lookup:
        told = f"draft={draft.name} with mode={config.mode}, backup={config.backup}"
        raise ConfigError(f"{told}: allowed: mode=sd, backup=fast")
    if draft.num_tokens > 1:
        _check_parallel(config, draft)


def _check_tail(config: RunConfig) -> None:
    """One draft grows the branch; controls learn from lists, and σ_{F,C} damps for what they keep,
    and a tail is none."""
    for name, value, allowed in (
        ("num_drafts", config.drafts, (1,)),
        ("saguaro_c", config.saguaro_c, (1, None)),
        ("on_late", config.on_late, ("finish", "serve")),
        ("backup", config.backup, ("jit", "fast")),
    ):
        if value not in allowed:
            told = ", ".join(str(one) for one in allowed if one is not None)
            raise ConfigError(f"{name}={value} with fan_out={config.fan_out}: allowed: {told}")


def _check_parallel(config: RunConfig, draft: ModelShape) -> None:
    """Heads that draft K tokens in one forward can neither stop earlier nor see what they drew."""
    if config.workload != "gemm":
        raise ConfigError(f"draft={draft.name} with workload={config.workload}: allowed: gemm")
    if config.lookahead != draft.num_tokens:
        what = f"{draft.num_tokens}, one head a token (medusaN:MODEL has N)"
        raise ConfigError(f"lookahead={config.lookahead} with {draft.name}: allowed: {what}")
    if config.backup_lookahead not in (None, 0, config.lookahead):
        told = f"backup_lookahead={config.backup_lookahead} with {draft.name}"
        raise ConfigError(f"{told}: allowed: {config.lookahead}, which one forward drafts")
