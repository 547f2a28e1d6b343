"""Helpers of the gates: read a number of a row by its path, and report differing numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from mpissd.common.row import Row

Rounds = Mapping[str, NDArray[Any]]
Gate = Callable[[Row, Rounds], Iterator[str]]

ROUNDING = 2e-3  # allowed relative error: rows hold rounded numbers


def number(row: Row, path: str) -> float | None:
    """Returns the number at a dotted path such as "round_us.p50"; None if there is none."""
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def differs(
    row: Row, path: str, other: float | None, source: str, quantum: float = 0.0
) -> Iterator[str]:
    """Yields a line if the row's number at a path differs from `other`, which `source` gave.

    quantum: an absolute difference that counts as rounding. Yields nothing if either is unknown.
    """
    said = number(row, path)
    if said is None or other is None:
        return
    if not abs(said - other) <= ROUNDING * abs(other) + quantum:  # NaN counts as different
        yield f"{path} is {said:.7g}, {source}: {other:.7g}"


def draft_column(rounds: Rounds, name: str) -> NDArray[Any] | None:
    """Returns a column of draft_rounds; None if there was no draft."""
    if "draft_rounds" not in rounds:
        return None
    column: NDArray[Any] = rounds["draft_rounds"][:, rounds["draft_columns"].tolist().index(name)]
    return column
