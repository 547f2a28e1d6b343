"""Forwards that compute nothing and last as long as they are told: the host's work, alone.

Calibration runs the decoding loops over these. What a round takes beyond the pauses is the host's
and the link's, measured on the very code and under the idle times of the real rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Places, Results


class PausedForwards:
    """A forward of `rows` rows is over `pause_s(rows)` after its launch.

    tokens: the host buffer that the real forwards read, so that an upload is the real one. sleep:
    whether a wait sleeps (as on the emulated backend) or polls (as for a GPU's event).
    """

    def __init__(self, pause_s: Callable[[int], float], tokens: Ints, *, sleep: bool) -> None:
        self._pause_s, self._tokens, self._sleep = pause_s, tokens, sleep
        self._end = self._elapsed_s = 0.0

    def upload(self, rows: int, tokens: Ints, places: Places | None = None) -> None:
        """Copies the tokens [<= rows] and says how long the next pause is."""
        self._tokens[: len(tokens)] = tokens
        self._elapsed_s = self._pause_s(rows)

    def launch(self) -> None:
        """Starts the pause."""
        self._end = time.perf_counter() + self._elapsed_s

    def done(self) -> bool:
        """Whether the pause is over."""
        return time.perf_counter() >= self._end

    def wait(self, waiter: Waiter) -> None:
        """Returns when the pause is over."""
        if self._sleep:
            waiter.sleep_until(self._end)
        else:
            waiter.until(self.done, "pause")

    def elapsed_s(self) -> float:
        """The pause."""
        return self._elapsed_s

    def results(self) -> Results:
        """Raises NotImplementedError: a pause computes nothing."""
        raise NotImplementedError("a paused forward computes nothing")

    def close(self) -> None:
        """Holds nothing."""
