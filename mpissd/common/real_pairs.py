"""How often a real language-model pair hits its speculation cache, to compare with imposed hits.

miss(F) = min(1, floor + A·F^−r), with one (A, r, floor) after a rejection and one after a trunk
(all served tokens) that was accepted whole. DEFAULT, the hit model without a flag, is measured on
the shipped draft (results/recordings/smollm2.laws.json at K = 4, made by `mpissd pair`). ASSUMED is
the earlier default, which committed rows of GPUs have.
"""

from __future__ import annotations

from typing import NamedTuple

_TARGET = "SmolLM2-135M-Instruct"
DEFAULT_SOURCE = f"measured on {_TARGET} with the shipped draft"


class MissLaw(NamedTuple):
    """The parameters of miss(F) = min(1, floor + A·F^−r)."""

    A: float
    r: float
    floor: float = 0.0


# With F = 3 this model hits .75: a table-model pair at temperature 1 hits .68 after a rejection and
# .80 after all were accepted. The paper's A = 1 would make a fan-out of 1 worthless.
ASSUMED = MissLaw(0.75, 1.0), MissLaw(0.75, 1.0)
ASSUMED_LAW = f"power:A={ASSUMED[0].A},r={ASSUMED[0].r}"
DEFAULT = MissLaw(0.5068, 0.6233, 0.0968), MissLaw(0.1737, 0.9954, 0.0215)
# Acceptance rates of tokens 1 … 7 at K = 7, of the same outcomes.
DEFAULT_RATES = (0.689, 0.709, 0.757, 0.782, 0.789, 0.811, 0.834)
NAMED = {"smollm2": DEFAULT}
