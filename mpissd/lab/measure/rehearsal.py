"""Rehearsed passes: the decoding loops over the real forwards, for devices that run on host cores.

On a CPU a forward reads tens of megabytes through the caches of the host's code: code after a
forward takes two to four times as long as after a pause. In turn, a forward takes longer than in a
series of forwards if it follows host code or another model's forward, runs together with another
rank's, or waits for a late rank. A rehearsal measures both: phases without the forwards inside
them, and the forwards. Each forward is repeated at once: the clock of a shared processor drifts by
some percent within a second, but hardly between two neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.common.trace import Ledger
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Places, Results
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.workload.placement import timed_places

LONGEST_S = 50e-3  # of a forward; after longer ones the host's work does not count
Table = NDArray[np.int64]
# Forwards: (begin in ns of perf_counter, ns, rows, ns of the repetition among them, or 0).
Taken = Sequence[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Took:
    """Total seconds of the forwards of a round.

    beyond: the part that exceeds their repetitions; None if they were not repeated.
    """

    seconds: float
    beyond: float | None = None


class RehearsedForwards:
    """The forwards of a stepper after the mean context, as they are timed in series.

    taken: every forward so far.
    """

    def __init__(self, stepper: Stepper, sequences: int, *, again: bool) -> None:
        """Takes the stepper and the job's number of sequences; again: whether to repeat each."""
        self._stepper, self._sequences, self._again = stepper, sequences, again
        counts = range(1, stepper.most_rows + 1)
        self._places = {n: timed_places(n, sequences, stepper.options) for n in counts}
        self._rows = 0
        self.taken: list[tuple[int, int, int, int]] = []

    @property
    def most_rows(self) -> int:
        """The rows of the largest forward."""
        return self._stepper.most_rows

    def upload(
        self, rows: int, tokens: Ints, places: Places | None = None, *, lists: bool = False
    ) -> None:
        """Hands the tokens to the stepper."""
        self._rows = len(tokens)
        self._stepper.upload(rows, tokens, self._places[self._rows], lists=lists)

    def launch(self) -> None:
        """Runs the forward, once or twice, and notes its duration."""
        begin = time.perf_counter_ns()
        self._stepper.launch()
        end = between = time.perf_counter_ns()
        if self._again:
            self._stepper.launch()
            end = time.perf_counter_ns()
        self.taken.append((begin, end - begin, self._rows, end - between))

    def done(self) -> bool:
        """Returns whether the forward is over; never blocks."""
        return self._stepper.done()

    def wait(self, waiter: Waiter) -> None:
        """Waits until the forward is over."""
        self._stepper.wait(waiter)

    def elapsed_s(self) -> float:
        """Returns the time of the last forward, in seconds."""
        return self._stepper.elapsed_s()

    def results(self) -> Results:
        """Raises NotImplementedError: a rehearsal's results are not read."""
        raise NotImplementedError("a rehearsed forward is not read")

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Raises NotImplementedError, as `results` does."""
        raise NotImplementedError("a rehearsed forward is not read")

    def release(self, slots: Sequence[int]) -> None:
        """Gives the pages of these slots back."""
        self._stepper.release(slots)

    def close(self) -> None:
        """Gives the pages of all slots back."""
        self._stepper.release(range(self._sequences))


def host_slices(ledger: Ledger, taken: Taken, first: int, last: int) -> Table:
    """Returns the ledger's slices of rounds first … last-1, cut by the forwards inside them."""
    slices = ledger.slices(first, last)
    begins, lengths, *_ = np.array(taken, np.int64).reshape(-1, 4).T
    inside = np.searchsorted(slices[:, 3], begins, side="right")  # the first slice to end later
    kept = inside < len(slices)
    kept[kept] = begins[kept] >= slices[inside[kept], 2]
    np.subtract.at(slices[:, 3], inside[kept], lengths[kept])
    return slices


def host_table(ledger: Ledger, taken: Taken, first: int, last: int) -> Table:
    """Returns the ledger's table of rounds first … last-1 without the time of forwards."""
    table, slices = ledger.table(first, last), host_slices(ledger, taken, first, last)
    table[:, 2:] = 0
    row = np.searchsorted(table[:, 0], slices[:, 0])
    np.add.at(table, (row, 2 + slices[:, 1]), slices[:, 3] - slices[:, 2])
    table[:, 1] = table[:, 2:].sum(axis=1)
    return table


def of_a_round(taken: Taken, per_round: int, skip: int, rows: int | None = None) -> Took | None:
    """Returns the medians over rounds of their forwards' time; None without any.

    per_round: forwards of a round. rows: count only forwards of so many rows (None: all). The first
    `skip` rounds are left out.
    """
    chosen = [each for each in taken if rows is None or each[2] == rows]
    rounds = len(chosen) // per_round if per_round else 0
    if rounds <= skip:
        return None
    _, both, _, again = np.array(chosen[: rounds * per_round]).T.reshape(4, rounds, per_round)
    first = (both - again).sum(axis=1)[skip:] * 1e-9
    if not again.any():
        return Took(float(np.median(first)))
    beyond = first - again.sum(axis=1)[skip:] * 1e-9
    return Took(float(np.median(first)), float(np.median(beyond)))
