"""Seconds of the target's forwards by their rows, as they are measured while it decodes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from statistics import median

_WEIGHT = 1 / 32  # of a new sample, once there were as many
_KNOWN, _SHIFT = 4, 0.5  # samples after which a new one is clipped, and to what share of the mean
_GROWTH = 0.3  # how much longer a round may take for the prompts stored with it
_STORES = [0, *(n << shift for shift in range(10) for n in (4, 5, 6, 7))]  # rows, by size
_DEARER = 1.5  # a token in a small forward may take this many times as long as in a large one
_UNKNOWN = 16  # tokens to catch up with while their duration is unknown
_APART = 10  # rounds within the limit after one beyond it, so that the 90th percentile is within


class Times:
    """The seconds of a forward of n rows: running means where it was measured, lines between.

    Of the first four forwards of a size the middle ones count: one that was delayed changes little.
    """

    def __init__(self, buckets: Sequence[int] = ()) -> None:
        """Takes the sizes of forwards, rising; if empty, a forward computes exactly its rows."""
        self._buckets = list(buckets)
        self._rows: list[int] = []  # measured, in rising order
        self._seconds: dict[int, float] = {}
        self._samples: dict[int, int] = {}
        self._first: dict[int, list[float]] = {}  # samples of sizes measured fewer than four times
        self._asked: dict[int, float] = {}  # answers since the last sample, by rows

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
            self._take_first(size, seconds)
        for few, samples in self._first.items():
            self._seconds[few] = self._between(few) or self._usual(samples)

    def _take_first(self, size: int, seconds: float) -> None:
        """Takes one of the first four forwards of a size."""
        if size not in self._first:
            insort(self._rows, size)
        samples = self._first.setdefault(size, [])
        samples.append(seconds)
        if len(samples) == _KNOWN:
            self._seconds[size] = self._usual(samples)
            del self._first[size]

    def _usual(self, samples: Sequence[float]) -> float:
        """Returns the usual seconds of a forward, given a few samples of its size."""
        return median(samples)

    def _between(self, size: int) -> float | None:
        """Returns the seconds that better known sizes predict, if they replace the size's own."""
        return None

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

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return not self._rows

    def within(self, limit_s: float) -> int:
        """Returns the largest size of a forward that takes at most limit_s; 0: none does."""
        return self._buckets[max(0, bisect_right(self._buckets, limit_s, key=self.seconds) - 1)]

    def _line(self, low: int, high: int, rows: int) -> float:
        below, above = self._seconds[low], self._seconds[high]
        if rows > high:
            above = max(above, below)  # no forward gets faster by more rows
        return below + (above - below) * (rows - low) / (high - low)


class _Least(Times):
    """Seconds of forwards whose first run may compile a kernel or capture a graph."""

    def _usual(self, samples: Sequence[float]) -> float:
        return min(samples)


class ForwardTimes(Times):
    """The seconds of the target's forwards, and the rows of prompts to store with a verification.

    That is the largest forward with which the round takes at most 30% longer. If it stores few
    rows, since the device computes whole buckets, every eleventh round may be longer: each round
    earns 30% of its own seconds, and unused seconds pay for a larger forward.

    A size that looks slow is avoided, so a chance delay must not count: a size measured fewer than
    four times gets the prediction of two better known ones.
    """

    def __init__(self, buckets: Sequence[int] = ()) -> None:
        """Takes the sizes of the target's forwards, as Times does."""
        super().__init__(buckets)
        self._earned_s, self._within = 0.0, 0
        # Of a draft on the same device: forwards over prompts, over tokens that it lacked when it
        # began to draft, and a step; of the second, how many tokens at once on average.
        self._stores, self._behind, self._step_s = Times(_STORES), _Least(_STORES), 0.0
        self._mean_rows = 0.0

    def _between(self, size: int) -> float | None:
        """Returns the seconds on the line between the nearest better known sizes."""
        sure = [n for n in self._rows if n not in self._first]
        at = bisect_left(sure, size)
        return self._line(sure[at - 1], sure[at], size) if 0 < at < len(sure) else None

    def stored(self, rows: int, seconds: float, lookahead: int, drafted_s: float) -> None:
        """Takes how long a draft on the same device stored rows of prompts, and drafted K tokens.

        The first lengthens the round, too; the second is a part of it without prompts.
        """
        self._stores.add(0, 0.0)  # fewer rows than were measured take less in proportion
        self._stores.add(rows, seconds)
        self._drafted(lookahead, drafted_s)

    def caught_up(self, rows: int, seconds: float, lookahead: int, drafted_s: float) -> None:
        """Takes how long a draft on the same device stored tokens that it lacked, and drafted."""
        if self._within > _APART:
            self._within = 0
        self._behind.add(0, 0.0)
        self._behind.add(rows, seconds)
        self._mean_rows = _mean(self._mean_rows or rows, rows)
        self._drafted(lookahead, drafted_s)

    @property
    def caught_up_s(self) -> float:
        """Seconds in which a draft on the same device stores a token that it lacks; 0: unknown."""
        rows = round(self._mean_rows)
        return self._behind.seconds(rows) / rows if rows else 0.0

    def _drafted(self, lookahead: int, seconds: float) -> None:
        if lookahead:
            step_s = seconds / lookahead
            self._step_s = _mean(self._step_s or step_s, step_s)

    def catch_up(self, rows: int, lookahead: int, prompts: int, lacking: int) -> int:
        """Returns how many of the `lacking` tokens of a draft on the same device a round stores.

        rows: verified rows; lookahead: K; prompts: rows of prompts in the round. Every eleventh
        round may take twice as long. Others may become 30% longer, prompts included, if that stores
        all lacking tokens or makes none of them much slower.
        """
        if self._behind.is_empty:
            return _UNKNOWN
        own_s = self.seconds(rows)
        round_s = own_s + lookahead * self._step_s
        spent_s = self.grown_s(rows, rows + prompts) - own_s
        self._within += not prompts
        large = self._large(round_s)
        if self._within > _APART:
            return large
        return self._small(_GROWTH * round_s - spent_s, large, lacking)

    def caught_up_a_round(self, rows: int) -> float:
        """Returns how many tokens a draft that lacks many catches up with a round of `rows`, on
        average."""
        round_s = self.seconds(rows) + self._step_s
        large = self._large(round_s)
        small = 0 if self._behind.is_empty else self._small(_GROWTH * round_s, large)
        return (large + _APART * small) / (_APART + 1)

    def _small(self, limit_s: float, large: int, lacking: int | None = None) -> int:
        """Returns how many tokens a draft stores within limit_s: 0 if each then takes much
        longer than `large` at once do, unless `lacking` are no more."""
        small = self._behind.within(limit_s)
        dearest_s = _DEARER * small / large * self._behind.seconds(large)
        is_all = lacking is not None and small >= lacking
        return small if is_all or self._behind.seconds(small) <= dearest_s else 0

    def _large(self, round_s: float) -> int:
        """Returns how many tokens a draft stores in as many seconds, at least one."""
        return _UNKNOWN if self._behind.is_empty else max(1, self._behind.within(round_s))

    def prefill_rows(self, rows: int, most: int, lookahead: int = 0) -> int:
        """Returns how many rows of prompts the next forward stores in addition to `rows` others.

        most: the rows of the largest forward, which an empty round fills. lookahead: K of the
        round.
        """
        if not rows:
            return most
        own_s = self.seconds(rows)
        round_s = own_s + lookahead * self._step_s
        next_s = self.grown_s(rows, min(most, self._size(rows) + 1)) - own_s
        self._earned_s = min(self._earned_s + _GROWTH * round_s, max(round_s, next_s))
        total = rows + self.room(rows, most, lookahead)
        self._within += 1
        if self._within > _APART:
            larger = self._largest(rows, most, own_s + self._earned_s)
            if larger - rows > _APART * (total - rows):
                total, self._within = larger, 0
        self._earned_s -= max(0.0, self.grown_s(rows, total) - own_s)
        return total - rows

    def room(self, rows: int, most: int, lookahead: int = 0) -> int:
        """Returns the rows of prompts with which a round of `rows` others takes 30% longer."""
        own_s = self.seconds(rows)
        grown_s = own_s + _GROWTH * (own_s + lookahead * self._step_s)
        return self._largest(rows, most, grown_s) - rows

    def grown_s(self, rows: int, total: int) -> float:
        """Returns the seconds of a forward of `total` rows, and of storing its rows of prompts."""
        stored_s = self._stores.seconds(total - rows) if total > rows else 0.0
        return self.seconds(total) + stored_s

    def _largest(self, rows: int, most: int, limit_s: float) -> int:
        """Returns the rows of the largest forward that takes at most limit_s, at least `rows`."""
        sizes = self._buckets or range(rows, most + 1)
        low, high = bisect_left(sizes, rows) - 1, bisect_left(sizes, most + 1) - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.grown_s(rows, sizes[middle]) <= limit_s
            low, high = (middle, high) if fits else (low, middle - 1)
        return max(rows, sizes[low]) if 0 <= low < len(sizes) else rows


def _mean(before: float, new: float, count: int = _KNOWN + 1) -> float:
    """Returns a running mean after sample number `count`, from 1 on.

    A sample far off is clipped: other work on the machine delays a forward now and then.
    """
    shift, most = new - before, _SHIFT * before if count > _KNOWN else float("inf")
    return before + max(_WEIGHT, 1 / count) * min(max(shift, -most), most)
