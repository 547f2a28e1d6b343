"""The acceptance and hit models of an advisor's search, the same for every configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.config import RunConfig
from mpissd.engine.spec.acceptance import resolve_acceptance
from mpissd.engine.spec.fanout import MAX_BRANCHES
from mpissd.engine.spec.hits import HitLaw, hit_law_of
from mpissd.engine.spec.lawfile import load_laws

MOST_LOOKAHEAD = 16


@dataclass(frozen=True)
class Laws:
    """Acceptance rates ("hazards") and the hit model at every K, and the most candidates.

    hazards, hazards_fast, hits: by K, from 1. most_candidates limits what a row may keep (an LM
    head returns only its top 64).
    """

    hazards: tuple[tuple[float, ...], ...]
    hazards_fast: tuple[tuple[float, ...], ...]
    hits: tuple[HitLaw, ...]
    most_candidates: int = MAX_BRANCHES

    @classmethod
    def of(cls, config: RunConfig) -> Laws:
        """Returns the models of a configuration; a list of rates, or a --laws file, limits K to its
        length."""
        texts = config.acceptance_text, config.acceptance_fast_text
        each = range(1, min(_length(text) for text in texts) + 1)
        hazards, fast = (
            tuple(resolve_acceptance(cut_law(text, most), most).hazards for most in each)
            for text in texts
        )
        hits = tuple(hit_law_of(config, most) for most in each)
        has_head = config.lm_head or config.is_transformer
        return cls(hazards, fast, hits, 63 if has_head else MAX_BRANCHES)

    @property
    def longest(self) -> int:
        """The longest K that the models cover."""
        return len(self.hits)

    @property
    def p_hit(self) -> float | None:
        """The imposed hit rate; None if hits follow a rank distribution."""
        return self.hits[0].p_hit


def _length(text: str) -> int:
    """Returns the longest K that an acceptance model covers, up to MOST_LOOKAHEAD."""
    kind, _, values = text.strip().partition(":")
    if kind in ("laws", "prompt", "suffix"):
        return min(load_laws(values).longest_fitted, MOST_LOOKAHEAD)
    listed = values.count(",") + 1 if kind in ("rates", "marginal") else MOST_LOOKAHEAD
    return min(listed, MOST_LOOKAHEAD)


def cut_law(text: str, most: int) -> str:
    """Shortens a list of rates to `most` values; returns any other text unchanged."""
    kind, _, values = text.strip().partition(":")
    if kind not in ("rates", "marginal"):
        return text
    return f"{kind}:{','.join(values.split(',')[:most])}"
