"""The round ledger: exclusive host phases, stamped from one clock, that close to the round's wall.

`mark(phase)` ends a phase: the time since the last mark is its own. A mark only stamps (0.1 µs);
sums a round and slices in time (for --trace) are read off the stamps when the run is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.tape import LAST, SPILL_ROUNDS, Tape
from mpissd.watch.page import DOING, OWN, Doing

Int64s = NDArray[np.int64]
_PART = 1 << 15  # rounds that are added up at a time


class LeadPhase(IntEnum):
    """What the lead's host did with a round."""

    SEND = 0  # pack and start OUTCOME
    COMMIT = 1  # apply the outcome to the batch
    DRAFT_WAIT = 2  # request → speculation on the host
    BROADCAST = 3  # plan to the followers
    UPLOAD = 4  # hand the tokens to the device
    LAUNCH = 5  # launch the verification (numpy: all of it)
    DEVICE_WAIT = 6  # until the verification is over
    SAMPLE = 7  # acceptance rule
    RECORD = 8  # bookkeeping of the round


class DraftPhase(IntEnum):
    """What the draft's host did with a round."""

    WAIT = 0  # for OUTCOME, growth over
    COMMIT = 1  # apply the outcome to the batch
    LOOKUP = 2  # cache
    SPECULATE = 3  # finish the hits, draft the misses
    SEND = 4  # pack and start SPECULATION
    GLUE = 5  # forward over the trunk
    KEYS = 6  # candidates, cache
    GROW = 7  # steps over the branches, polls between them
    RECORD = 8
    TRUNK = 9  # wait for what the other drafts answered (D > 1)


class FollowPhase(IntEnum):
    """What a follower's host did with a round."""

    PLAN_WAIT = 0  # for the lead's plan
    COMMIT = 1  # apply the outcome to the batch
    UPLOAD = 2  # hand the tokens to the device
    LAUNCH = 3  # launch the verification
    DEVICE_WAIT = 4  # until the verification is over


# What a draft begins where a phase ends: the warden's view of it (mpissd.watch).
_NEXT = bytes(
    (
        *(Doing.ANSWER,) * DraftPhase.SEND,
        *(Doing.GROWTH,) * (DraftPhase.RECORD - DraftPhase.SEND),
        Doing.OUTCOME_WAIT,
        Doing.GROWTH,
    )
)


class Ledger:
    """Phase times of one rank.

    Stamps lie on flat tapes, 9 bytes a mark: a mark is two appends and the store by which the
    warden knows what this rank does. Nothing is added up while a round runs.
    """

    def __init__(self, phases: type[IntEnum]) -> None:
        self.names = [phase.name.lower() for phase in phases]
        # Ends of every phase in the clock's nanoseconds; phases; three numbers a round: which one,
        # its begin, marks up to its end.
        self._tapes = Tape("q"), Tape("b"), Tape("q")
        self._ends, self._phases, self._rounds = (tape.tail for tape in self._tapes)
        self._spilled = self._closed = 0  # marks on disk, marks of closed rounds
        self._start = perf_counter_ns()

    def restart(self) -> None:
        """Begins a round now: what came before belongs to no round."""
        for tape in self._tapes[:2]:
            del tape.tail[self._closed - tape.saved :]
        self._start = perf_counter_ns()

    def mark(self, phase: int) -> None:
        """Ends `phase`."""
        self._ends.append(perf_counter_ns())
        self._phases.append(phase)

    def close_round(self, round_: int, phase: int) -> None:
        """Ends `phase` and the round; the next round begins at the same instant."""
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
        """Rows [n, 2 + phases] = round, wall_ns, phase_ns… of rounds first … last-1."""
        parts = self._parts(first_round, last_round)
        none = np.zeros((0, 2 + len(self.names)), np.int64)
        return np.concatenate([none, *(self._sums(*part) for part in parts)])

    def _sums(self, rounds: Int64s, counts: Int64s, slices: Int64s) -> Int64s:
        found = np.zeros((len(rounds), 2 + len(self.names)), np.int64)
        row = np.repeat(np.arange(len(rounds)), counts)
        taken = slices[:, 3] - slices[:, 2]
        np.add.at(found, (row, 2 + slices[:, 1]), taken)  # a phase may occur twice
        found[:, 0] = rounds
        found[:, 1] = found[:, 2:].sum(axis=1)
        return found

    def slices(self, first_round: int, last_round: int) -> Int64s:
        """Rows [n, 4] = round, phase, start_ns, end_ns of rounds first … last-1, in time.

        Nanoseconds of this process's perf_counter.
        """
        parts = self._parts(first_round, last_round)
        return np.concatenate([np.zeros((0, 4), np.int64), *(slices for _, _, slices in parts)])

    def _parts(self, first_round: int, last_round: int) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
        """(round [r], marks of it [r], slices [n, 4]) of rounds first … last-1, some at a time."""
        index: Int64s = self._tapes[2].read().reshape(-1, 3)
        wanted = np.flatnonzero((index[:, 0] >= first_round) & (index[:, 0] < last_round))
        for start in range(0, len(wanted), _PART):
            yield self._part(index, wanted[start : start + _PART])

    def _part(self, index: Int64s, chosen: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        low, high = int(chosen[0]), int(chosen[-1]) + 1
        before = int(index[low - 1, 2]) if low else 0
        rounds, starts, stops = index[low:high].T
        counts = np.diff(stops, prepend=before)
        ends, phases = (tape.read(before, int(stops[-1])) for tape in self._tapes[:2])
        begins = np.concatenate([ends[-1:], ends[:-1]])  # the phase before ended there
        begins[stops - counts - before] = starts
        table = np.column_stack([np.repeat(rounds, counts), phases, begins, ends])
        wanted = np.zeros(high - low, np.bool_)
        wanted[chosen - low] = True
        return rounds[wanted], counts[wanted], table[np.repeat(wanted, counts)].astype(np.int64)


class DraftLedger(Ledger):
    """A draft's: each mark also tells the warden what begins (50 ns). On the target's side only
    waits for other ranks tell: at nine marks in 14 µs, this would cost a lone AR rank 3%."""

    def __init__(self) -> None:
        super().__init__(DraftPhase)
        self._page = OWN.bytes

    def mark(self, phase: int) -> None:
        self._ends.append(perf_counter_ns())
        self._phases.append(phase)
        self._page[DOING] = _NEXT[phase]


class NullLedger(Ledger):
    """A ledger that is off: keeps nothing and reads no clock."""

    def restart(self) -> None:
        return None

    def mark(self, phase: int) -> None:
        return None

    def close_round(self, round_: int, phase: int) -> None:
        return None


def select(
    rows: Sequence[Sequence[Any]] | NDArray[Any], width: int, first_round: int, last_round: int
) -> NDArray[Any]:
    """The rows whose first column is a round in first … last-1, as one array."""
    table = np.array(rows).reshape(-1, width)
    return table[(table[:, 0] >= first_round) & (table[:, 0] < last_round)]
