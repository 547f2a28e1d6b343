"""Is one run faster than another? A speedup with its 95% interval, from the rounds of both.

Rounds that follow each other have much in common (a neighbour, a clock, a hot device), so a run is
cut into blocks, and blocks are compared: the delta method over block sums. No draws: the same
samples give the same text. Where the rounds of a run were not kept, its row's own statistics stand
in for them (Rate.of_row).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.errors import ConfigError

_BLOCKS = 20  # a run is cut into, if there are …
_PER_BLOCK = 5  # … so many rounds for each
FEWEST_ROUNDS = 4 * _PER_BLOCK
NORMAL_Z = 1.959964  # 97.5% of a standard normal
_SPREADS = (("p90", 1.281552), ("p99", 2.326348))  # and where a standard normal has them

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

    def __str__(self) -> str:
        """The speedup, or "no difference", and the interval."""
        digits = 2 if self.high - self.low > 0.02 else 3
        interval = f"95% interval {self.low:.{digits}f} to {self.high:.{digits}f}"
        if not self.is_real:
            return f"no difference ({interval})"
        return f"{self.speedup:.{digits}f}× ({interval})"


@dataclass(frozen=True)
class Rate:
    """Tokens a second, the variance of its logarithm, and the degrees of freedom of that."""

    value: float
    variance: float
    freedom: int
    from_rounds: bool = True

    @classmethod
    def of_rounds(cls, seconds: Samples, tokens: Samples | None = None) -> Rate:
        """Of seconds a round, and tokens a round (None: all rounds alike).

        ConfigError with fewer than 20 rounds, or with a round that takes no time.
        """
        took = np.asarray(seconds, np.float64)
        made = np.ones_like(took) if tokens is None else np.asarray(tokens, np.float64)
        blocks = min(_BLOCKS, len(took) // _PER_BLOCK)
        if len(took) < FEWEST_ROUNDS or len(made) != len(took):
            counts = f"{len(took)} rounds ({len(made)} with tokens)"
            raise ConfigError(f"{counts}: allowed: {FEWEST_ROUNDS} or more")
        if not (took > 0).all() or not made.sum() > 0:
            told = f"a round of {took.min():g} s, {made.sum():g} tokens"
            raise ConfigError(f"{told}: allowed: above 0")
        time = np.array([part.sum() for part in np.array_split(took, blocks)])
        done = np.array([part.sum() for part in np.array_split(made, blocks)])
        rate = float(done.sum() / time.sum())
        left = (done - rate * time) / done.mean()  # of a ratio of sums, relative
        return cls(rate, float(left @ left) / (blocks * (blocks - 1)), blocks - 1)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Rate:
        """Of a result row alone: the luck of its draws and the spread of its rounds, added up.

        Draws: sampling_sd, which the predictor has from the job's laws; without it the standard
        error of accept_histogram's mean. Rounds: (p90 − p50)/1.28 or (p99 − p50)/2.33, whichever is
        more, over √n: what neighbouring rounds have in common is not seen. ConfigError where a row
        lacks them, or has fewer than 20 rounds.
        """
        try:
            count, rate = int(row["num_rounds"]), float(row["tok_per_s"])
            clock = clock_error(row["round_us"], count)
            luck = row.get("sampling_sd")
            draws = length_error(row["accept_histogram"]) if luck is None else float(luck)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"row {row.get('run_id')!r}: no interval: {error!r}") from error
        if count < FEWEST_ROUNDS or not 0 < rate < math.inf:
            told = f"row {row.get('run_id')!r}: {count} rounds, {rate:g} tok/s"
            raise ConfigError(f"{told}: allowed: {FEWEST_ROUNDS} or more, above 0")
        return cls(rate, draws**2 + clock**2, count - 1, from_rounds=False)


def compare_rates(a: Rate, b: Rate) -> Comparison:
    """b against a: the logarithms of both, by Student's t."""
    half = _t(min(a.freedom, b.freedom)) * math.sqrt(a.variance + b.variance)
    middle = math.log(b.value / a.value)
    return Comparison(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def compare(
    a_seconds: Samples,
    b_seconds: Samples,
    a_tokens: Samples | None = None,
    b_tokens: Samples | None = None,
) -> Comparison:
    """b against a, by rounds: see Rate.of_rounds."""
    return compare_rates(Rate.of_rounds(a_seconds, a_tokens), Rate.of_rounds(b_seconds, b_tokens))


def clock_error(round_us: Mapping[str, float], count: int) -> float:
    """Relative standard error of the mean round, from its percentiles."""
    spread = max(0.0, *((round_us[name] - round_us["p50"]) / z for name, z in _SPREADS))
    mean = float(round_us["mean"])
    return spread / (mean * math.sqrt(count)) if mean > 0 else 0.0


def length_error(histogram: Sequence[int]) -> float:
    """Of the mean acceptance length of n rounds: standard deviation / (mean·√n)."""
    counts = np.asarray(histogram, np.float64)
    lengths = np.arange(len(counts)) + 1.0
    total = float(counts.sum())
    if not total > 0:
        raise ValueError("accept_histogram is empty")
    mean = float(lengths @ counts) / total
    variance = float((lengths - mean) ** 2 @ counts) / total
    return math.sqrt(variance / total) / mean


def _t(freedom: int) -> float:
    """97.5% of Student's t (Cornish and Fisher's expansion: 0.7% low at 3, 0.01% at 10)."""
    z, v = NORMAL_Z, float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3
