"""The round ledger: how long each phase of a round took on one rank's host.

Phases don't overlap and are stamped from one clock, so that their times add up to the round's.
`mark(phase)` ends a phase, which began at the previous mark. A mark only stores the time (0.1 µs).
The sum of each phase in each round, and the slices for --trace, are computed after the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.stage import DOING, OWN, Doing
from mpissd.common.tape import LAST, SPILL_ROUNDS, Tape

Int64s = NDArray[np.int64]
_PART = 1 << 15  # rounds whose stamps are read into memory at a time


class LeadPhase(IntEnum):
    """The phases of a round on the lead's host, in order."""

    SEND = 0  # pack the OUTCOME message and start sending it
    COMMIT = 1  # send a learner the previous round, apply the outcome to the batch
    DRAFT_WAIT = 2  # wait for the speculation
    BROADCAST = 3  # send the plan to the followers
    UPLOAD = 4  # hand the tokens to the device
    LAUNCH = 5  # launch the verification; with NumPy, compute it
    DEVICE_WAIT = 6  # wait until the verification is over
    SAMPLE = 7  # apply the acceptance rule
    RECORD = 8  # store the round's rows
    PREFILL = 9  # compute the prompts of new sequences, after COMMIT (T = 1) or BROADCAST


class DraftPhase(IntEnum):
    """The phases of a round on a draft's host."""

    WAIT = 0  # wait for OUTCOME with nothing left to grow
    COMMIT = 1  # apply the outcome to the batch
    LOOKUP = 2  # look the outcome up in the speculation cache
    SPECULATE = 3  # finish the branches that were hit, draft for the sequences that missed
    SEND = 4  # pack the SPECULATION message and start sending it
    GLUE = 5  # forward over the trunk
    KEYS = 6  # choose candidates and make them keys of the cache
    GROW = 7  # draft steps over the branches, with a poll for OUTCOME between two steps
    RECORD = 8  # store the round's rows
    PREFILL = 9  # compute prompts, or tokens that this draft did not draft, before a forward


class FollowPhase(IntEnum):
    """The phases of a round on a follower's host, in order."""

    PLAN_WAIT = 0  # wait for the lead's plan
    COMMIT = 1  # apply the outcome to the batch
    UPLOAD = 2  # hand the tokens to the device
    LAUNCH = 3  # launch the verification
    DEVICE_WAIT = 4  # wait until the verification is over
    PREFILL = 5  # compute the prompts of new sequences, between COMMIT and UPLOAD


# {DraftPhase that ends: the Doing that begins then}, which the warden reports.
_NEXT = bytes(
    (
        *(Doing.ANSWER,) * DraftPhase.SEND,
        *(Doing.GROWTH,) * (DraftPhase.RECORD - DraftPhase.SEND),
        Doing.OUTCOME_WAIT,
        Doing.GROWTH,
    )
)


class Ledger:
    """The stamps of one rank's phases.

    A mark takes two appends to flat tapes, 9 bytes together. Nothing is added up while a round
    runs.
    """

    def __init__(self, phases: type[IntEnum]) -> None:
        self.names = [phase.name.lower() for phase in phases]
        # Each mark stores two numbers: the end of its phase in ns, and the phase. Each round stores
        # three: its number, its beginning in ns, and the number of marks up to its end.
        self._tapes = Tape("q"), Tape("b"), Tape("q")
        self._ends, self._phases, self._rounds = (tape.tail for tape in self._tapes)
        self._spilled = self._closed = 0  # how many marks are in the file, and in closed rounds
        self._start = perf_counter_ns()

    def restart(self) -> None:
        """Begins a round now; drops the marks since the last closed round."""
        for tape in self._tapes[:2]:
            del tape.tail[self._closed - tape.saved :]
        self._start = perf_counter_ns()

    def mark(self, phase: int) -> None:
        """Ends `phase`, and begins the next one."""
        self._ends.append(perf_counter_ns())
        self._phases.append(phase)

    def close_round(self, round_: int, phase: int) -> None:
        """Ends `phase` and round `round_`; the next round begins at the same instant."""
        self.mark(phase)
        self._rounds.append(round_)
        self._rounds.append(self._start)
        self._closed = self._spilled + len(self._ends)
        self._rounds.append(self._closed)
        self._start = self._ends[-1]
        if round_ % SPILL_ROUNDS == LAST:
            for tape in self._tapes:
                tape.spill()
            self._spilled = self._tapes[0].saved

    def table(self, first_round: int, last_round: int) -> Int64s:
        """Returns a row for each of the rounds first_round … last_round-1.

        int64 [n, 2 + phases]: the round, its wall time in ns, the ns of each phase.
        """
        tables = [np.zeros((0, 2 + len(self.names)), np.int64)]
        for rounds, counts, slices in self._parts(first_round, last_round):
            table = np.zeros((len(rounds), 2 + len(self.names)), np.int64)
            row = np.repeat(np.arange(len(rounds)), counts)
            # Adds up a phase that occurs twice.
            np.add.at(table, (row, 2 + slices[:, 1]), slices[:, 3] - slices[:, 2])
            table[:, 0], table[:, 1] = rounds, table[:, 2:].sum(axis=1)
            tables.append(table)
        return np.concatenate(tables)

    def slices(self, first_round: int, last_round: int) -> Int64s:
        """Returns a row for each mark of the rounds first_round … last_round-1, in order of time.

        int64 [n, 4]: the round, the phase, its start and its end in ns of this process's
        perf_counter.
        """
        parts = self._parts(first_round, last_round)
        return np.concatenate([np.zeros((0, 4), np.int64), *(slices for _, _, slices in parts)])

    def _parts(self, first_round: int, last_round: int) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
        """Yields the rounds first_round … last_round-1, up to 32768 at a time.

        (rounds [r], marks in each [r], slices [n, 4] as in `slices`).
        """
        index: Int64s = self._tapes[2].read().reshape(-1, 3)
        wanted = np.flatnonzero((index[:, 0] >= first_round) & (index[:, 0] < last_round))
        for at in range(0, len(wanted), _PART):
            chosen = wanted[at : at + _PART]
            low, high = int(chosen[0]), int(chosen[-1]) + 1
            before = int(index[low - 1, 2]) if low else 0
            rounds, starts, stops = index[low:high].T
            counts = np.diff(stops, prepend=before)
            ends, phases = (tape.read(before, int(stops[-1])) for tape in self._tapes[:2])
            begins = np.concatenate([ends[-1:], ends[:-1]])  # where the last phase ended
            begins[stops - counts - before] = starts
            table = np.column_stack([np.repeat(rounds, counts), phases, begins, ends])
            is_chosen = np.zeros(high - low, np.bool_)
            is_chosen[chosen - low] = True
            slices = table[np.repeat(is_chosen, counts)].astype(np.int64)
            yield rounds[is_chosen], counts[is_chosen], slices


class DraftLedger(Ledger):
    """A draft's ledger, whose marks also store the draft's next activity for the warden (50 ns).

    Target ranks store only their waits for other ranks: nine marks in a 14 µs round would make a
    lone AR rank 3% slower.
    """

    def __init__(self) -> None:
        super().__init__(DraftPhase)
        self._page = OWN.bytes

    def mark(self, phase: int) -> None:
        self._ends.append(perf_counter_ns())
        self._phases.append(phase)
        self._page[DOING] = _NEXT[phase]


class NullLedger(Ledger):
    """A ledger that is switched off: it stores nothing and reads no clock."""

    def restart(self) -> None:
        return None

    def mark(self, phase: int) -> None:
        return None

    def close_round(self, round_: int, phase: int) -> None:
        return None


def select(
    rows: Sequence[Sequence[Any]] | NDArray[Any], width: int, first_round: int, last_round: int
) -> NDArray[Any]:
    """Returns the rows whose first column, a round, is in first_round … last_round-1.

    width: columns of a row. Returns an array [n, width].
    """
    table = np.array(rows).reshape(-1, width)
    return table[(table[:, 0] >= first_round) & (table[:, 0] < last_round)]
