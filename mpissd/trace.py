"""The round ledger: exclusive host phases, stamped from one clock, that close to the round's wall.

`mark(phase)` ends a phase: the time since the last mark is its own. A mark only stamps (0.1 µs);
sums a round and slices in time (for --trace) are read off the stamps when the run is over.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


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


class Ledger:
    """Phase times of one rank.

    Stamps lie in flat arrays, 9 bytes a mark: a mark is two appends, and nothing is added up while
    a round runs.
    """

    def __init__(self, phases: type[IntEnum]) -> None:
        self.names = [phase.name.lower() for phase in phases]
        self._ends = array("q")  # of every phase, in the clock's nanoseconds
        self._phases = array("b")
        self._rounds = array("q")  # three a round: its number, its begin, marks up to its end
        self._start = perf_counter_ns()

    def restart(self) -> None:
        """Begins a round now: what came before belongs to no round."""
        closed = self._rounds[-1] if self._rounds else 0
        del self._ends[closed:], self._phases[closed:]
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
        self._rounds.append(len(self._ends))
        self._start = self._ends[-1]

    def table(self, first_round: int, last_round: int) -> Int64s:
        """Rows [n, 2 + phases] = round, wall_ns, phase_ns… of rounds first … last-1."""
        rounds, counts, slices = self._select(first_round, last_round)
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
        return self._select(first_round, last_round)[2]

    def _select(self, first_round: int, last_round: int) -> tuple[Int64s, Int64s, Int64s]:
        """(round [r], marks of it [r], slices [n, 4]) of rounds first … last-1."""
        # Copies: an array that is being read can't grow.
        rounds, starts, stops = np.array(self._rounds).reshape(-1, 3).T
        counts = np.diff(stops, prepend=0)
        ends = np.array(self._ends[: stops[-1] if len(stops) else 0], np.int64)
        begins = np.concatenate([ends[-1:], ends[:-1]])  # the phase before ended there
        begins[stops - counts] = starts
        table = np.column_stack(
            [np.repeat(rounds, counts), self._phases[: len(ends)], begins, ends]
        ).astype(np.int64)
        wanted = (rounds >= first_round) & (rounds < last_round)
        return rounds[wanted], counts[wanted], table[np.repeat(wanted, counts)]


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
