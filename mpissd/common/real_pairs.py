"""How often a real language-model pair hits its speculation cache, to compare with imposed hits.

miss(F) = min(1, floor + A·F^−r), with one (A, r, floor) after a rejection and one after a trunk
(all served tokens) that was accepted whole. DEFAULT, the hit model without a flag, is measured on
the shipped draft (results/recordings/smollm2.laws.json at K = 4, made by `mpissd pair`). ASSUMED is
the earlier default, which committed rows of GPUs have.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        a, end_a = self.hit_a
        r, end_r = self.hit_r
        floor, end_floor = self.floor
        return (a, r, floor), (end_a, end_r, end_floor)


# With F = 3 this model hits .75: a table-model pair at temperature 1 hits .68 after a rejection and
# .80 after all were accepted. The paper's A = 1 would make a fan-out of 1 worthless.
ASSUMED = PairHits((0.75, 0.75), (1.0, 1.0))
ASSUMED_LAW = f"power:A={ASSUMED.hit_a[0]},r={ASSUMED.hit_r[0]}"
DEFAULT = PairHits((0.5068, 0.1737), (0.6233, 0.9954), floor=(0.0968, 0.0215))
# Acceptance rates of tokens 1 … 7 at K = 7, of the same outcomes.
DEFAULT_RATES = (0.689, 0.709, 0.757, 0.782, 0.789, 0.811, 0.834)
NAMED = {"smollm2": DEFAULT}
