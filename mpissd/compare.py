"""Is one run faster than another? A speedup with its 95% interval, from the rounds of both.

Rounds that follow each other have much in common (a neighbour, a clock, a hot device), so a run is
cut into blocks, and blocks are compared: the delta method over block sums. No draws: the same
samples give the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpissd.errors import ConfigError

_BLOCKS = 20  # a run is cut into, if there are …
_PER_BLOCK = 5  # … so many rounds for each
_Z = 1.959964  # 97.5% of a standard normal

Samples = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """b's rate over a's, and the 95% interval of that."""

    speedup: float
    low: float
    high: float

    @property
    def is_real(self) -> bool:
        """Whether the interval leaves 1 out."""
        return not self.low <= 1.0 <= self.high


@dataclass(frozen=True)
class _Rate:
    """Tokens a second, the variance of its logarithm, and the degrees of freedom of that."""

    value: float
    variance: float
    freedom: int


def compare(
    a_seconds: Samples,
    b_seconds: Samples,
    a_tokens: Samples | None = None,
    b_tokens: Samples | None = None,
) -> Comparison:
    """b against a. Seconds a round; tokens a round where they differ (None: all rounds alike).

    ConfigError with fewer than 20 rounds, or with a round that takes no time.
    """
    a, b = _rate(a_seconds, a_tokens), _rate(b_seconds, b_tokens)
    spread = math.sqrt(a.variance + b.variance)
    half = _t(min(a.freedom, b.freedom)) * spread
    middle = math.log(b.value / a.value)
    return Comparison(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def compare_text(
    a_seconds: Samples,
    b_seconds: Samples,
    a_tokens: Samples | None = None,
    b_tokens: Samples | None = None,
) -> str:
    """compare() as text: a speedup of b over a, or "no difference"."""
    found = compare(a_seconds, b_seconds, a_tokens, b_tokens)
    counts = f"{len(a_seconds)} and {len(b_seconds)} rounds"
    digits = 2 if found.high - found.low > 0.02 else 3
    interval = f"95% interval {found.low:.{digits}f} to {found.high:.{digits}f}, {counts}"
    if not found.is_real:
        return f"no difference ({interval})"
    return f"{found.speedup:.{digits}f}× ({interval})"


def _rate(seconds: Samples, tokens: Samples | None) -> _Rate:
    took = np.asarray(seconds, np.float64)
    made = np.ones_like(took) if tokens is None else np.asarray(tokens, np.float64)
    blocks = min(_BLOCKS, len(took) // _PER_BLOCK)
    if blocks < 4 or len(made) != len(took):
        least = 4 * _PER_BLOCK
        raise ConfigError(f"{len(took)} rounds ({len(made)} with tokens): allowed: {least} or more")
    if not (took > 0).all() or not made.sum() > 0:
        raise ConfigError(f"a round of {took.min():g} s, {made.sum():g} tokens: allowed: above 0")
    time = np.array([part.sum() for part in np.array_split(took, blocks)])
    done = np.array([part.sum() for part in np.array_split(made, blocks)])
    rate = float(done.sum() / time.sum())
    left = (done - rate * time) / done.mean()  # of a ratio of sums, relative
    return _Rate(rate, float(left @ left) / (blocks * (blocks - 1)), blocks - 1)


def _t(freedom: int) -> float:
    """97.5% of Student's t (Cornish and Fisher's expansion: 0.7% low at 3, 0.01% at 10)."""
    z, v = _Z, float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3
