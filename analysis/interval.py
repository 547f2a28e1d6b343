"""The 95% interval of a row's tok/s, from what the row says of itself.

Two things move it: the luck of the draws (sampling_sd, which the predictor knows from the job's
laws; without it the standard error of accept_histogram's mean) and the spread of its rounds
((p90 − p50)/1.28 or (p99 − p50)/2.33, whichever is more, over √n).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_Z = 1.959964
_SPREADS = (("p90", 1.281552), ("p99", 2.326348))


def interval(row: Mapping[str, Any]) -> tuple[float, float]:
    """Low and high tok/s; both the rate itself where the row doesn't say."""
    rate = float(row["tok_per_s"])
    luck = row.get("sampling_sd")
    draws = _length_error(row.get("accept_histogram") or []) if luck is None else float(luck)
    half = _Z * math.hypot(draws, _clock_error(row["round_us"]))
    return rate * math.exp(-half), rate * math.exp(half)


def ratio(
    value: float, low: float, high: float, base: float, base_low: float, base_high: float
) -> tuple[float, float, float]:
    """value / base with the interval of two independent rates, by their logarithms."""
    down = math.hypot(math.log(value / low), math.log(base_high / base))
    up = math.hypot(math.log(high / value), math.log(base / base_low))
    middle = value / base
    return middle, middle * math.exp(-down), middle * math.exp(up)


def _clock_error(round_us: Mapping[str, Any]) -> float:
    """Relative standard error of the mean round."""
    mean, count = round_us.get("mean"), round_us.get("n")
    if not mean or not count:
        return 0.0
    spread = max(0.0, *((round_us[name] - round_us["p50"]) / z for name, z in _SPREADS))
    return float(spread / (mean * math.sqrt(count)))


def _length_error(histogram: Sequence[int]) -> float:
    """Relative standard error of the mean acceptance length."""
    total = sum(histogram)
    if not total:
        return 0.0
    mean = sum((k + 1) * n for k, n in enumerate(histogram)) / total
    variance = sum((k + 1 - mean) ** 2 * n for k, n in enumerate(histogram)) / total
    return math.sqrt(variance / total) / mean
