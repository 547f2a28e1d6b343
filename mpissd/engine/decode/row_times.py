"""Seconds of the target's forwards by their rows, as they are measured while it decodes."""

from __future__ import annotations

from bisect import bisect_left, insort

_WEIGHT = 1 / 8  # of a new sample
_GROWTH = 1.3  # how much longer a round may take for the prompts that are stored beside it


class RowTimes:
    """The seconds of a forward of n rows: running means where it was measured, lines between."""

    def __init__(self, growth: float = _GROWTH) -> None:
        self._growth = growth
        self._rows: list[int] = []  # measured, in rising order
        self._seconds: dict[int, float] = {}

    def add(self, rows: int, seconds: float) -> None:
        """Takes a measured forward."""
        if rows not in self._seconds:
            insort(self._rows, rows)
            self._seconds[rows] = seconds
        self._seconds[rows] += _WEIGHT * (seconds - self._seconds[rows])

    def seconds(self, rows: int) -> float:
        """Returns the seconds of a forward; beyond what was measured, those of the nearest one, or
        in proportion to its rows above."""
        known, at = self._rows, bisect_left(self._rows, rows)
        if not known:
            return 0.0
        if at == len(known):
            return self._seconds[known[-1]] * rows / known[-1]
        above = self._seconds[known[at]]
        if at == 0 or known[at] == rows:
            return above
        low, high = known[at - 1], known[at]
        below = self._seconds[low]
        return below + (above - below) * (rows - low) / (high - low)

    def beside(self, rows: int, most: int) -> int:
        """Returns how many rows of prompts may be stored beside a verification of `rows` rows, so
        that its forward takes at most 1.3 times as long; at least one, and all where rows is 0."""
        if not rows:
            return most
        limit, low, high = self._growth * self.seconds(rows), 1, max(1, most - rows)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.seconds(rows + middle) <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        return low
