"""Forwards that compute nothing and last a given time, to measure the host's work alone.

Calibration runs the decoding loops over these. The time of a round beyond the pauses is that of the
host and the link, measured with the real code and with the idle times of real rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Places, Results


class PausedForwards:
    """Forwards that are over `pause_s(rows, lists)` seconds after their launch.

    tokens: the host buffer of the real forwards, so that an upload takes its real time. sleep:
    whether a wait sleeps (as on the emulated backend) or polls (as for a GPU's event).
    """

    def __init__(self, pause_s: Callable[[int, bool], float], tokens: Ints, *, sleep: bool) -> None:
        self._pause_s, self._tokens, self._sleep = pause_s, tokens, sleep
        self._end = self._elapsed_s = 0.0

    @property
    def most_rows(self) -> int:
        """The rows of the largest forward."""
        return len(self._tokens)

    def upload(
        self, rows: int, tokens: Ints, places: Places | None = None, *, lists: bool = False
    ) -> None:
        """Copies the tokens [<= rows], and sets the next pause to pause_s(rows, lists)."""
        self._tokens[: len(tokens)] = tokens
        self._elapsed_s = self._pause_s(rows, lists)

    def launch(self) -> None:
        """Starts the pause."""
        self._end = time.perf_counter() + self._elapsed_s

    def done(self) -> bool:
        """Returns whether the pause is over; never blocks."""
        return time.perf_counter() >= self._end

    def wait(self, waiter: Waiter) -> None:
        """Waits until the pause is over."""
        if self._sleep:
            waiter.sleep_until(self._end)
        else:
            waiter.until(self.done, "pause")

    def elapsed_s(self) -> float:
        """Returns the length of the last pause, in seconds."""
        return self._elapsed_s

    def results(self) -> Results:
        """Raises NotImplementedError: a pause computes nothing."""
        raise NotImplementedError("a paused forward computes nothing")

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Raises NotImplementedError: a pause computes nothing."""
        raise NotImplementedError("a paused forward computes nothing")

    def release(self, slots: Sequence[int]) -> None:
        """Does nothing: a pause keeps no cache."""

    def close(self) -> None:
        """Does nothing: there is nothing to free."""
