"""The laws of an advisor's search: acceptance and hits, the same for every configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.config import RunConfig
from mpissd.engine.spec.acceptance import HitLaw, resolve_acceptance, resolve_hit_law
from mpissd.engine.spec.fanout import MAX_BRANCHES

MOST_LOOKAHEAD = 16


@dataclass(frozen=True)
class Laws:
    """Acceptance hazards up to the longest K that is tried, the hit law, and the most candidates.

    most_candidates limits what a row may keep (an LM head returns only its top 64).
    """

    hazards: tuple[float, ...]
    hazards_fast: tuple[float, ...]
    hit: HitLaw
    most_candidates: int = MAX_BRANCHES

    @classmethod
    def of(cls, config: RunConfig) -> Laws:
        """Returns the laws of a configuration; a list of rates limits K to its length."""
        texts = config.acceptance_text, config.acceptance_fast
        most = min(_length(text) for text in texts)
        hazards, fast = (resolve_acceptance(cut_law(t, most), most).hazards for t in texts)
        hit = resolve_hit_law(config.p_hit, config.hit_a, config.hit_r, config.hit_law)
        has_head = config.lm_head or config.is_transformer
        return cls(hazards, fast, hit, 63 if has_head else MAX_BRANCHES)


def _length(text: str) -> int:
    """Returns the longest K that a law covers, up to MOST_LOOKAHEAD."""
    kind, _, values = text.strip().partition(":")
    listed = values.count(",") + 1 if kind in ("rates", "marginal") else MOST_LOOKAHEAD
    return min(listed, MOST_LOOKAHEAD)


def cut_law(text: str, most: int) -> str:
    """Shortens a list of rates to `most` values; returns any other law unchanged."""
    kind, _, values = text.strip().partition(":")
    if kind not in ("rates", "marginal"):
        return text
    return f"{kind}:{','.join(values.split(',')[:most])}"
