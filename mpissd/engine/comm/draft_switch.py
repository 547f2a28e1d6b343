"""Whether a client asks for drafts: the measured seconds a token with and without them decide.

A step lasts from one question to the next. By number of rows, in steps of powers of two, the way
with the lower mean cost is used. The other way is tried as long as what all trials have cost is at
most EXPLORE of the time. A pure object: its caller has the clock.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import inf

EXPLORE = 0.005  # largest share of time for trials
_TRIAL = 32  # steps of a trial, and at least so many between two
_SETTLE = 2  # its first steps, in which the draft reads what it lacks, are no sample
_MEMORY = 1 / 128  # share of the samples forgotten at each step
_FEW, _FAR = 8.0, 4.0  # samples after which one counts as at most so many mean ones
_MARGIN = 1.01  # a change must promise so much more


@dataclass
class _Way:
    """Sums over steps, the last ones weighing most."""

    steps: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        if self.steps > _FEW:  # a pause of the engine, or a compiler
            seconds = min(seconds, _FAR * self.seconds / self.steps)
        self.steps += 1 - _MEMORY * self.steps
        self.seconds += seconds - _MEMORY * self.seconds
        self.tokens += tokens - _MEMORY * self.tokens

    @property
    def cost_s(self) -> float:
        return self.seconds / self.tokens if self.tokens else inf


class _Load:
    """The two ways of a number of rows: without drafts at first, for the price to beat."""

    def __init__(self) -> None:
        self._ways = {False: _Way(), True: _Way()}
        self._best = self.way = False
        self._left = _TRIAL
        # Of all steps; of all trials, and of this one, beyond the best way's cost.
        self._elapsed_s = self._lost_s = self._loss_s = 0.0

    def add(self, way: bool, seconds: float, tokens: int) -> None:
        """Takes a step that was decoded in this way."""
        best, trying = self._ways[self._best], self.way != self._best
        self._elapsed_s += seconds
        self._left -= way == self.way
        settling = trying and way == self.way and self._left >= _TRIAL - _SETTLE
        if not settling:
            self._ways[way].add(seconds, tokens)
        if trying:
            self._loss_s += seconds - tokens * best.cost_s
            if not settling and self._loss_s > _TRIAL * best.seconds / best.steps:
                self._left = 0
        if self._left:
            return
        self._left, other = _TRIAL, not self._best
        if self._ways[other].cost_s * _MARGIN < self._ways[self._best].cost_s:
            self._best = other
        self.way = self._best
        if trying:
            self._lost_s = max(0.0, self._lost_s + self._loss_s)
        elif self._lost_s <= EXPLORE * self._elapsed_s:
            self.way, self._loss_s = not self._best, 0.0


class DraftSwitch:
    """The choice of one client, by number of rows."""

    def __init__(self) -> None:
        self._loads = defaultdict[int, _Load](_Load)
        self._start_s, self._rows, self._length = 0.0, 0, 0
        self._way = False  # of the step since the last call

    def choose(self, now_s: float, rows: int, length: int, added: int, possible: bool) -> bool:
        """Returns whether to ask for drafts now.

        length: tokens of all rows, of which `added` are new. A step counts only if it decoded the
        rows of the step before and no others, so pauses and prompts do not count. possible: there
        is a draft to ask.
        """
        load = rows.bit_length()
        if rows == self._rows and length - added == self._length:
            self._loads[load].add(self._way, now_s - self._start_s, added)
        self._start_s, self._rows, self._length = now_s, rows, length
        self._way = possible and self._loads[load].way
        return self._way
