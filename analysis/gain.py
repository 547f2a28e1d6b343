"""Speedups of rows over rows (mpissd.common.compare), and the 95% interval of one row's tok/s."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from mpissd.common.compare import Comparison, compare_rates, compare_rows
from mpissd.common.errors import ConfigError
from mpissd.common.rates import (
    NORMAL_Z,
    Rate,
    Rounds,
    clock_error,
    length_error,
    student_t,
)
from mpissd.common.row import Row

_GAIN = ("value", "low", "high", "headline")


def gain(rows: pd.DataFrame, base: pd.DataFrame) -> Comparison:
    """Returns the speedup of one configuration's rows over another's.

    If the rows lack what compare_rows needs, their own intervals are used (interval.py).
    """
    sides = [records(side) for side in (base, rows)]
    try:
        return compare_rows(sides[0], sides[1], _rounds([*sides[0], *sides[1]]))
    except ConfigError:
        rates = [Rate.of_repeats([_rate(row) for row in side]) for side in sides]
        return compare_rates(rates[0], rates[1])


def gains(rows: pd.DataFrame, base: pd.DataFrame, by: str, share: float = 1.0) -> pd.DataFrame:
    """Returns the gain at every value of `by` that both have: by, value, low, high, headline.

    share: an exact factor, such as a ratio of GPUs.
    """
    return _frame(by, {x: (part, base[base[by] == x]) for x, part in rows.groupby(by)}, share)


def gains_over(rows: pd.DataFrame, base: pd.DataFrame, by: str, share: float = 1.0) -> pd.DataFrame:
    """Returns the same columns with one common base for every value."""
    return _frame(by, {x: (part, base) for x, part in rows.groupby(by)}, share)


def _frame(
    by: str, parts: Mapping[Any, tuple[pd.DataFrame, pd.DataFrame]], share: float
) -> pd.DataFrame:
    lines = []
    for x, (part, base) in parts.items():
        if len(part) and len(base):
            comparison = gain(part, base).scaled(share)
            lines.append(
                (x, comparison.speedup, comparison.low, comparison.high, comparison.is_headline)
            )
    return pd.DataFrame(lines, columns=[by, *_GAIN])


def records(rows: pd.DataFrame) -> list[Row]:
    """Returns the rows of a frame, with its other columns as `extra`; missing values become
    None."""
    names, is_said = [str(name) for name in rows], rows.notna().to_numpy().tolist()
    values = zip(*(rows[name].tolist() for name in rows), strict=True)
    return [
        Row.from_dict({n: v if is_ else None for n, v, is_ in zip(names, row, said, strict=True)})
        for row, said in zip(values, is_said, strict=True)
    ]


def _rounds(rows: Sequence[Row]) -> dict[str, Rounds]:
    """Reads the rounds of rows that kept them, FOLDER/rounds/RUN_ID.npz, by run_id."""
    paths = {row.run_id: Path(row["folder"], "rounds", f"{row.run_id}.npz") for row in rows}
    by_id = {row.run_id: row for row in rows}
    return {name: Rounds.read(p, by_id[name]) for name, p in paths.items() if p.is_file()}


def _rate(row: Row) -> Rate:
    half = math.log(row["high"] / row["low"]) / (2 * NORMAL_Z)
    return Rate(row.tok_per_s, half**2, 1000, from_rounds=False)


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
