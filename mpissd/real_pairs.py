"""How often a real language-model pair hits its speculation cache, beside laws that are imposed.

miss(F) = min(1, A·F^−r), apart behind a rejection and behind a trunk that was accepted whole. A is
the miss rate measured at F = 1; r is the least-squares slope of log miss through it, F = 2 … 16.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = (
    "measured on one real pair, SmolLM2-135M-Instruct with a 4-layer draft distilled from it, "
    "temperature 0"
)


@dataclass(frozen=True)
class PairHits:
    """One pair's hits on one kind of prompt: (behind a rejection, behind all accepted)."""

    prompts: str
    hit_a: tuple[float, float]
    hit_r: tuple[float, float]


# F = 3 then hits .75: between the .68 (k < K) and .80 (k = K) of a table-model pair at T = 1. The
# paper's A = 1 would make a fan-out of 1 worthless.
ASSUMED = PairHits("assumed", (0.75, 0.75), (1.0, 1.0))
REAL_PAIRS = {
    "smollm2-own": PairHits("its own greedy answers", (0.644, 0.232), (0.37, 0.54)),
    "smollm2-chat": PairHits("12 chat prompts", (0.777, 0.316), (0.21, 0.32)),
}
