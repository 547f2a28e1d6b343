"""Seconds of the target's forwards by their rows, as they are measured while it decodes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from statistics import median

_WEIGHT = 1 / 32  # of a new sample, once there were as many
_KNOWN, _SHIFT = 4, 0.5  # samples after which a new one is clipped, and to what share of the mean
_GROWTH = 0.3  # how much longer a round may take for the prompts stored with it
_APART = 10  # rounds within the limit after one beyond it, so that the 90th percentile is within


class ForwardTimes:
    """The seconds of the target's forwards, and the rows of prompts to store with a verification.

    Seconds are running means of the measured sizes, and lines between them. A size that looks slow
    is avoided, so a chance delay must not count: a size measured fewer than four times gets the
    prediction of two better known ones, or the median of its samples.

    The rows of prompts are those of the largest forward with which the round takes at most 30%
    longer. If it stores few rows, since the device computes whole buckets, every eleventh round may
    be longer: each round earns 30% of its own seconds, and unused seconds pay for a larger forward.
    """

    def __init__(self, buckets: Sequence[int] = ()) -> None:
        """Takes the sizes of forwards, rising; if empty, a forward computes exactly its rows."""
        self._buckets = list(buckets)
        self._rows: list[int] = []  # measured, in rising order
        self._seconds: dict[int, float] = {}
        self._samples: dict[int, int] = {}
        self._first: dict[int, list[float]] = {}  # samples of sizes measured fewer than four times
        self._asked: dict[int, float] = {}  # answers since the last sample, by rows
        self._earned_s, self._within, self._step_s = 0.0, 0, 0.0

    def _size(self, rows: int) -> int:
        """Returns the rows that a forward of so many rows computes."""
        at = bisect_left(self._buckets, rows)
        return self._buckets[at] if at < len(self._buckets) else rows

    def add(self, rows: int, seconds: float) -> None:
        """Takes a measured forward."""
        self._asked.clear()
        size = self._size(rows)
        self._samples[size] = count = self._samples.get(size, 0) + 1
        if count > _KNOWN:
            self._seconds[size] = _mean(self._seconds[size], seconds, count)
        else:
            if size not in self._first:
                insort(self._rows, size)
            samples = self._first.setdefault(size, [])
            samples.append(seconds)
            if len(samples) == _KNOWN:
                self._seconds[size] = median(self._first.pop(size))
        sure = [n for n in self._rows if n not in self._first]
        for few, samples in self._first.items():
            at = bisect_left(sure, few)
            between = 0 < at < len(sure)
            self._seconds[few] = (
                self._line(sure[at - 1], sure[at], few) if between else median(samples)
            )

    def seconds(self, rows: int) -> float:
        """Returns the seconds of a forward.

        Fewer rows than measured count as the smallest measured size. More rows lie on the line
        through the two largest sizes, or are in proportion if only one was measured.
        """
        if (answer := self._asked.get(rows)) is None:
            answer = self._asked[rows] = self._seconds_of(self._size(rows))
        return answer

    def _seconds_of(self, rows: int) -> float:
        known = self._rows
        at = bisect_left(known, rows)
        if at < len(known) and (at == 0 or known[at] == rows):
            return self._seconds[known[at]]
        if len(known) < 2:
            return self._seconds[known[0]] * rows / known[0] if known else 0.0
        high = min(at, len(known) - 1)
        return self._line(known[high - 1], known[high], rows)

    def _line(self, low: int, high: int, rows: int) -> float:
        below, above = self._seconds[low], self._seconds[high]
        if rows > high:
            above = max(above, below)  # no forward gets faster by more rows
        return below + (above - below) * (rows - low) / (high - low)

    def drafted(self, lookahead: int, seconds: float) -> None:
        """Takes the seconds in which a draft on the same device drafted K tokens for the round."""
        step_s = seconds / lookahead
        self._step_s = _mean(self._step_s or step_s, step_s)

    def prefill_rows(self, rows: int, most: int, lookahead: int = 0) -> int:
        """Returns how many rows of prompts the next forward stores in addition to `rows` others.

        most: the rows of the largest forward, which an empty round fills. lookahead: K of the
        round.
        """
        if not rows:
            return most
        own_s = self.seconds(rows)
        round_s = own_s + lookahead * self._step_s
        next_s = self.seconds(min(most, self._size(rows) + 1)) - own_s
        self._earned_s = min(self._earned_s + _GROWTH * round_s, max(round_s, next_s))
        total = rows + self.room(rows, most, lookahead)
        self._within += 1
        if self._within > _APART:
            larger = self._largest(rows, most, own_s + self._earned_s)
            if larger - rows > _APART * (total - rows):
                total, self._within = larger, 0
        self._earned_s -= max(0.0, self.seconds(total) - own_s)
        return total - rows

    def room(self, rows: int, most: int, lookahead: int = 0) -> int:
        """Returns the rows of prompts with which a round of `rows` others takes 30% longer."""
        own_s = self.seconds(rows)
        grown_s = own_s + _GROWTH * (own_s + lookahead * self._step_s)
        return self._largest(rows, most, grown_s) - rows

    def _largest(self, rows: int, most: int, limit_s: float) -> int:
        """Returns the rows of the largest forward that takes at most limit_s, at least `rows`."""
        sizes = self._buckets or range(rows, most + 1)
        low, high = bisect_left(sizes, rows) - 1, bisect_left(sizes, most + 1) - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.seconds(sizes[middle]) <= limit_s
            low, high = (middle, high) if fits else (low, middle - 1)
        return max(rows, sizes[low]) if 0 <= low < len(sizes) else rows


def _mean(before: float, new: float, count: int = _KNOWN + 1) -> float:
    """Returns a running mean after sample number `count`, from 1 on.

    A sample far off is clipped: other work on the machine delays a forward now and then.
    """
    shift, most = new - before, _SHIFT * before if count > _KNOWN else float("inf")
    return before + max(_WEIGHT, 1 / count) * min(max(shift, -most), most)
