"""The default model of speculation-cache misses, measured on a real pair of language models.

miss(F) = min(1, floor + A·F^−r) is the probability that the bonus token is not among the F
candidates for it. A pair has one (A, r, floor) after a rejection and one after all drafted tokens
were accepted. DEFAULT is measured on the draft that mpissd contains, at K = 4
(results/recordings/smollm2.laws.json, made by `mpissd pair`). ASSUMED is the earlier default, with
which the committed results of GPUs were measured.
"""

from typing import NamedTuple

_TARGET = "SmolLM2-135M-Instruct"
DEFAULT_SOURCE = f"measured on {_TARGET} with the shipped draft"


class MissLaw(NamedTuple):
    """The parameters of miss(F) = min(1, floor + A·F^−r), the probability of a cache miss with F
    candidates for the bonus token."""

    A: float
    r: float
    floor: float = 0.0


# With F = 3 candidates ASSUMED hits with probability .75; synthetic models hit with .68 to .80.
# The paper's A = 1 would make a fan-out of 1 useless, as miss(1) = A would be 1.
ASSUMED = MissLaw(0.75, 1.0), MissLaw(0.75, 1.0)
ASSUMED_LAW = f"power:A={ASSUMED[0].A},r={ASSUMED[0].r}"
DEFAULT = MissLaw(0.5185, 0.5898, 0.092), MissLaw(0.1743, 0.9411, 0.0209)
# Acceptance rates of draft tokens 1 … 7, measured on mpissd's own draft at K = 7.
DEFAULT_RATES = (0.668, 0.702, 0.753, 0.772, 0.786, 0.817, 0.837)
NAMED = {"smollm2": DEFAULT}
