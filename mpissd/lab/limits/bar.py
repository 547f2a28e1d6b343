"""A bar, and the line that compares measured rows with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = dict[str, Any]
OURS = "ours"  # the way of a whole model's forwards that `run` computes
RUNS = 3  # stable runs without which a bar is not judged
_WAYS = (
    ("cuBLAS", "cublas"),
    ("PyTorch", "torch"),
    ("Hugging Face", "huggingface"),
)


@dataclass(frozen=True)
class Unit:
    """The unit in which a number is printed: its name, scale and decimal places."""

    name: str = ""
    scale: float = 1.0
    places: int = 3

    def text(self, value: float) -> str:
        return f"{value * self.scale:.{self.places}f}"


FRACTION, MS, US = Unit(), Unit("ms", 1e3), Unit("us", 1e6, 2)


@dataclass(frozen=True)
class Bar:
    """One bar: which rows it reads (`where`), which value of them (`key`), and its limit.

    least: whether the limit is a lower bound. limit: None means NCCL's time in the same job.
    beside: the forward whose cuBLAS and PyTorch times are printed for comparison. worst: whether
    the worst run is judged, instead of the median.
    """

    number: int
    what: str
    key: str
    where: Row
    limit: float | None
    least: bool = False
    unit: Unit = FRACTION
    beside: Row | None = None
    worst: bool = False

    def line(self, rows: Sequence[Row]) -> str:
        """Returns one line of the table."""
        every, limit, text = matching(rows, self.where), self._limit(rows), self.unit.text
        runs = [row[self.key] for row in every if row.get("stable") is not False]
        line = f"{self.number:2d}  {self.what:46s}"
        if limit is not None:
            line += f" {'>=' if self.least else '<='} {text(limit):6s}"
        if limit is None or not runs:
            return f"{line}  not measured here{self._others(rows)}"
        spread = f"{text(min(runs))} … {text(max(runs))}, {len(runs)} of {len(every)} runs stable"
        line += f" {text(self._got(runs)):>8s} {self.unit.name:2s} {self._verdict(runs, limit):7s}"
        return f"{line} ({spread}){self._others(rows)}"

    def _verdict(self, runs: Sequence[float], limit: float) -> str:
        if len(runs) < RUNS:
            return "too few"
        got = self._got(runs)
        return "met" if (got >= limit if self.least else got <= limit) else "MISSED"

    def _got(self, runs: Sequence[float]) -> float:
        if self.worst:
            return min(runs) if self.least else max(runs)
        return median(runs)

    def _limit(self, rows: Sequence[Row]) -> float | None:
        if self.limit is not None:
            return self.limit
        theirs = matching(rows, self.where | {"group": "nccl", "own": False})
        return median(row[self.key] for row in theirs) if theirs else None

    def _others(self, rows: Sequence[Row]) -> str:
        """Returns the text on other ways to compute the same forward."""
        line, key = "", "seconds" if self.unit is MS else "floor_fraction"
        for name, way in _WAYS if self.beside else ():
            if others := matching(rows, {"what": "forward", "way": way, **(self.beside or {})}):
                line += f"  {name} {self.unit.text(median(row[key] for row in others))}"
        return line


def matching(rows: Iterable[Row], where: Row) -> list[Row]:
    """Returns the rows that have all of these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in where.items())]
