"""How often a real language-model pair hits its speculation cache, to compare with imposed hits.

miss(F) = min(1, floor + A·F^−r), with one (A, r, floor) after a rejection and one after a trunk
(all served tokens) that was accepted whole. DEFAULT, the hit model without a flag, is measured on
the shipped draft (results/recordings/smollm2.laws.json at K = 4, made by `mpissd pair`). ASSUMED is
the earlier default, which committed rows of GPUs have. Figures add the shipped draft's to such
rows.

under_real_pair computes the rate of an SSD row with a pair's hits, from its own waits. A round is
its duration without waiting for the draft, plus the wait: short if all b sequences hit, and K draft
steps if one misses. The row has its mean wait, its hit rate h and the duration of K steps, so P(all
hit) = h^b gives the wait after hits; another hit model changes only h. The tokens of a round do not
change, because the same model drafts after a miss (backup jit of all K tokens).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mpissd.common.row import Row
from mpissd.common.theory import accept_probabilities, power_law_miss

_TARGET = "SmolLM2-135M-Instruct"
DEFAULT_SOURCE = f"measured on {_TARGET} with the shipped draft"


@dataclass(frozen=True)
class PairHits:
    """One pair's hit models: (after a rejection, after all were accepted)."""

    hit_a: tuple[float, float]
    hit_r: tuple[float, float]
    floor: tuple[float, float] = (0.0, 0.0)

    @property
    def laws(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """(A, r, floor) after a rejection, and after all were accepted."""
        (a, end_a), (r, end_r), (floor, end_floor) = self.hit_a, self.hit_r, self.floor
        return (a, r, floor), (end_a, end_r, end_floor)


# With F = 3 this model hits .75: a table-model pair at temperature 1 hits .68 after a rejection and
# .80 after all were accepted. The paper's A = 1 would make a fan-out of 1 worthless.
ASSUMED = PairHits((0.75, 0.75), (1.0, 1.0))
ASSUMED_LAW = f"power:A={ASSUMED.hit_a[0]},r={ASSUMED.hit_r[0]}"
DEFAULT = PairHits((0.5068, 0.1737), (0.6233, 0.9954), floor=(0.0968, 0.0215))
# Acceptance rates of tokens 1 … 7 at K = 7, of the same outcomes.
DEFAULT_RATES = (0.689, 0.709, 0.757, 0.782, 0.789, 0.811, 0.834)
NAMED = {"smollm2": DEFAULT}


def under_real_pair(row: Row, pair: PairHits) -> float | None:
    """Predicts tok/s with a pair's hits; None for a row that is not SSD under ASSUMED."""
    if row.mode != "ssd" or row.hit_law != ASSUMED_LAW:
        return None
    match = re.fullmatch(r"alpha:([0-9.eE+-]+)", row.acceptance or "")
    drafted, rate, batch = row.t_draft_s, row.hit_rate, row.batch_size
    mean = row.round_us.get("mean")
    wait = ((row.phases_us or {}).get("lead") or {}).get("draft_wait")
    whole = row.backup == "jit" and row.backup_lookahead in (None, row.lookahead)
    lists = row.fan_out
    if not (match and whole and lists) or row.on_late != "finish":
        return None
    if drafted is None or rate is None or mean is None or wait is None:
        return None
    # Without these durations, the time that a miss adds is unknown.
    if not 0 < drafted * 1e6 > wait or not 0 <= rate <= 1:
        return None
    missed = 1 - rate**batch  # P(some sequence misses)
    behind_miss = drafted * 1e6
    behind_hits = max(0.0, (wait - missed * behind_miss) / max(1 - missed, 1e-9))
    alpha = float(match[1])

    def round_us(law: PairHits) -> float:
        all_hit = hit_rate([alpha] * (len(lists) - 1), lists, law) ** batch
        return float(mean - wait + (1 - all_hit) * behind_miss + all_hit * behind_hits)

    return float(row.tok_per_s * round_us(ASSUMED) / round_us(pair))


def hit_rate(hazards: Sequence[float], fan_out: Sequence[int], pair: PairHits) -> float:
    """Returns the hit rate of a trunk of K tokens with the fan-out F_0..F_K."""
    rejected, complete = pair.laws
    laws = [rejected] * len(hazards) + [complete]
    rows = zip(accept_probabilities(hazards), fan_out, laws, strict=True)
    return 1 - math.fsum(w * power_law_miss(f, *law) for w, f, law in rows)


def least_uniform(p_hit: float, hazards: Sequence[float], pair: PairHits, most: int) -> int | None:
    """Returns the smallest F ≤ `most` with which uniform:F hits as often; None if none does."""
    width = len(hazards) + 1
    if hit_rate(hazards, [most] * width, pair) < p_hit:
        return None
    low, high = 0, most  # the answer is above low, and at most high
    while high - low > 1:
        middle = (low + high) // 2
        enough = hit_rate(hazards, [middle] * width, pair) >= p_hit
        low, high = (low, middle) if enough else (middle, high)
    return high
