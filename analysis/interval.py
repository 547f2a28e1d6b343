"""The 95% interval of a row's tok/s, from the row alone.

Its variance is that of the draws plus that of the rounds, as in Rate.of_row of mpissd.common.rates;
here a row that lacks one of them still has an interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, stdev
from typing import Any

from mpissd.common.rates import NORMAL_Z, clock_error, length_error, student_t
from mpissd.common.row import Row


def interval(row: Row) -> tuple[float, float]:
    """Returns the low and high tok/s; both equal the rate if the row has no data on its
    variance."""
    rate, round_us = float(row.tok_per_s), row.round_us
    luck, histogram = row.sampling_sd, row.accept_histogram or []
    if luck is None:
        luck = length_error(histogram) if sum(histogram) else 0.0
    count = round_us.get("n")
    clock = clock_error(round_us, count) if count and round_us.get("mean") else 0.0
    half = NORMAL_Z * math.hypot(float(luck), clock)
    return rate * math.exp(-half), rate * math.exp(half)


def of_seeds(rows: Iterable[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return the geometric mean of tok/s over two seeds or more, and its 95% interval.

    Rows of one seed count as their mean; Student's t over seeds, as mpissd.common.compare has it.
    """
    logs: dict[Any, list[float]] = {}
    for row in rows:
        logs.setdefault(row["seed"], []).append(math.log(row["tok_per_s"]))
    means = [fmean(of) for of in logs.values()]
    middle = fmean(means)
    half = student_t(len(means) - 1) * stdev(means) / math.sqrt(len(means))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)
