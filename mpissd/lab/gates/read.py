"""What gates have in common: numbers of a row by path, and the line for two that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from mpissd.common.row import Row

Rounds = Mapping[str, NDArray[Any]]
Gate = Callable[[Row, Rounds], Iterator[str]]

ROUNDING = 2e-3  # relative: a row's numbers are rounded, those of a short run coarsely


def number(row: Row, path: str) -> float | None:
    """The number at a dotted path; None where there is none."""
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def differs(
    row: Row, path: str, other: float | None, source: str, quantum: float = 0.0
) -> Iterator[str]:
    """A line where the row's number is not what `source` gives.

    quantum: an absolute difference that counts as rounding. No line where either is unknown.
    """
    said = number(row, path)
    if said is None or other is None:
        return
    if not abs(said - other) <= ROUNDING * abs(other) + quantum:  # so that NaN differs
        yield f"{path} is {said:.7g}, {source}: {other:.7g}"


def draft_column(rounds: Rounds, name: str) -> NDArray[Any] | None:
    """A column of draft_rounds; None where there was no draft."""
    if "draft_rounds" not in rounds:
        return None
    column: NDArray[Any] = rounds["draft_rounds"][:, rounds["draft_columns"].tolist().index(name)]
    return column
