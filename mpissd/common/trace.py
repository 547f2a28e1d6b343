"""Measures how long each phase of each round takes on a rank's host.

All timestamps are from one clock and phases do not overlap, so a round's phases add up to its
duration. `mark(phase)` ends `phase`, which began at the previous mark. A mark only stores the time
(0.1 µs); sums by phase and round, and the intervals for --trace, are computed after the run.
"""

from array import array
from enum import IntEnum
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.stage import DOING, OWN, Doing

Int64s = NDArray[np.int64]
UNKNOWN = float("nan")


class LeadPhase(IntEnum):
    """The phases of a round on the host of the target's rank 0 (the lead), in order."""

    SEND = 0  # pack the previous round's acceptance results and start sending them to the draft
    COMMIT = 1  # add accepted tokens to the batch; send the round to a rank that trains the draft
    DRAFT_WAIT = 2  # wait for the draft tokens
    BROADCAST = 3  # send acceptance results and draft tokens to the other target ranks
    UPLOAD = 4  # hand the tokens to the device
    LAUNCH = 5  # launch the verification's forward; with NumPy, compute it
    DEVICE_WAIT = 6  # wait until the forward is finished
    SAMPLE = 7  # decide which draft tokens are accepted
    RECORD = 8  # store the round's results
    PREFILL = 9  # compute the prompts of new sequences, after COMMIT (T = 1) or BROADCAST


class DraftPhase(IntEnum):
    """The phases of a round on the host of a draft rank."""

    WAIT = 0  # wait for the target's acceptance results, with all drafts ahead complete
    COMMIT = 1  # apply the outcome to the batch
    LOOKUP = 2  # look each sequence's acceptance result up in the speculation cache
    SPECULATE = 3  # finish cached drafts that were hit; draft anew after cache misses
    SEND = 4  # pack the draft tokens and start sending them
    GLUE = 5  # score each sequence's last token and the draft tokens just sent, in one forward
    KEYS = 6  # choose bonus-token candidates, which are the keys of the speculation cache
    GROW = 7  # draft ahead after each candidate; poll for acceptance results between two steps
    RECORD = 8  # store the round's results
    PREFILL = 9  # compute tokens that the KV cache lacks, such as prompts, before a forward


class FollowPhase(IntEnum):
    """The phases of a round on the host of a target rank other than rank 0, in order."""

    PLAN_WAIT = 0  # wait for rank 0's message with acceptance results and draft tokens
    COMMIT = 1  # apply the outcome to the batch
    UPLOAD = 2  # hand the tokens to the device
    LAUNCH = 3  # launch the verification's forward
    DEVICE_WAIT = 4  # wait until the forward is finished
    PREFILL = 5  # compute the prompts of new sequences, between COMMIT and UPLOAD


# _NEXT[p] is the activity (a Doing) that a draft rank begins when its phase p ends.
# A draft rank shows its activity to the host's watchdog process, which prints it after a fault.
_ANSWERING = [Doing.ANSWER] * DraftPhase.SEND
_GROWING = [Doing.GROWTH] * (DraftPhase.RECORD - DraftPhase.SEND)
_NEXT = bytes([*_ANSWERING, *_GROWING, Doing.OUTCOME_WAIT, Doing.GROWTH])


class Ledger:
    """Stores when the phases of each round ended on one rank, in 9 bytes for each phase."""

    def __init__(self, phases: type[IntEnum]) -> None:
        self.names = [phase.name.lower() for phase in phases]
        # A mark stores its phase, and the end of this phase in ns.
        # A round stores its number, its start in ns, and the number of all marks up to its end.
        self._ends, self._phases, self._rounds = array("q"), array("b"), array("q")
        self._start = perf_counter_ns()

    def restart(self) -> None:
        """Starts a round now; drops the phases of a round that was not closed."""
        closed = self._rounds[-1] if self._rounds else 0
        del self._ends[closed:], self._phases[closed:]
        self._start = perf_counter_ns()

    def mark(self, phase: int) -> None:
        """Stores that `phase` ends now."""
        self._ends.append(perf_counter_ns())
        self._phases.append(phase)

    def close_round(self, round_: int, phase: int) -> float:
        """Ends `phase` and the round; returns the next round's start in s of time.perf_counter."""
        self.mark(phase)
        self._rounds.append(round_)
        self._rounds.append(self._start)
        self._rounds.append(len(self._ends))
        self._start = self._ends[-1]
        return self._start * 1e-9

    def table(self, first_round: int, last_round: int) -> Int64s:
        """Returns a row for each of the rounds first_round … last_round-1, int64 [n, 2 + phases]:
        the round's number, its wall time in ns, and the ns of each phase."""
        slices = self.slices(first_round, last_round)
        rounds, row = np.unique(slices[:, 0], return_inverse=True)
        table = np.zeros((len(rounds), 2 + len(self.names)), np.int64)
        # A phase that occurs twice in a round is added up.
        np.add.at(table, (row.reshape(-1), 2 + slices[:, 1]), slices[:, 3] - slices[:, 2])
        table[:, 0], table[:, 1] = rounds, table[:, 2:].sum(axis=1)
        return table

    def slices(self, first_round: int, last_round: int) -> Int64s:
        """Returns a row for each mark of rounds first_round … last_round-1, in order of time, int64
        [n, 4]: the round, the phase, and the phase's start and end in ns of time.perf_counter."""
        rounds, starts, stops = np.array(self._rounds).reshape(-1, 3).T
        counts = np.diff(stops, prepend=0)
        closed = int(counts.sum())
        ends, phases = np.array(self._ends)[:closed], np.array(self._phases)[:closed]
        begins = np.roll(ends, 1)
        begins[stops - counts] = starts
        table = np.column_stack([np.repeat(rounds, counts), phases, begins, ends])
        return table[(table[:, 0] >= first_round) & (table[:, 0] < last_round)]


class DraftLedger(Ledger):
    """The phase times of a draft rank. Each mark also stores the rank's next activity in memory
    that the host's watchdog process reads (50 ns). Target ranks store there only when they wait for
    other ranks: to store all nine marks of a 14 µs round would slow a lone AR rank by 3%."""

    def __init__(self) -> None:
        super().__init__(DraftPhase)
        self._page = OWN.bytes

    def mark(self, phase: int) -> None:
        self._ends.append(perf_counter_ns())
        self._phases.append(phase)
        self._page[DOING] = _NEXT[phase]


class NullLedger(Ledger):
    """A ledger that stores nothing and reads no clock."""

    def restart(self) -> None:
        return None

    def mark(self, phase: int) -> None:
        return None

    def close_round(self, round_: int, phase: int) -> float:
        return 0.0


class DraftLog:
    """Records each round of a draft rank: the times of its phases, and these numbers.

    draft_s: seconds to draft after the acceptance results, UNKNOWN if a sequence hit the cache.
    growth_s: seconds to draft all branches ahead, UNKNOWN if the next results came earlier.
    num_jit: the number of sequences that missed the cache and got a draft of the draft model.
    steps_ready: tokens that a cached draft had when the target's acceptance results hit it.
    stored_s: seconds in which the draft computed tokens that its KV cache lacked. ranks: an object
    that counts whether the bonus token was the draft's first, second, … candidate
    (features.ranks.RankCounts), or None.
    """

    COLUMNS = ("round", "t_draft_s", "t_growth_s", "num_jit", "steps_ready")

    def __init__(self, *, kept: bool = True, ranks: Any = None) -> None:
        """Starts an empty log. kept: whether rounds are recorded; a server, which decodes for days,
        records none, so that its memory stays bounded. ranks: counts how high the draft ranked the
        bonus tokens (RankCounts), or None."""
        self.ledger: Ledger = DraftLedger() if kept else NullLedger(DraftPhase)
        self.mark = self.ledger.mark
        self.ranks = ranks
        self.draft_s = UNKNOWN
        self.growth_s = UNKNOWN
        self.num_jit = 0
        self.steps_ready = 0
        self.stored_s = 0.0
        self._rounds: array[float] | None = array("d") if kept else None  # rows of COLUMNS

    def close_round(self, round_: int) -> None:
        if self._rounds is not None:
            add = self._rounds.append  # five calls take less time than one extend()
            add(round_)
            add(self.draft_s)
            add(self.growth_s)
            add(self.num_jit)
            add(self.steps_ready)
        self.growth_s = UNKNOWN
        self.steps_ready = 0
        self.ledger.close_round(round_, DraftPhase.RECORD)

    def table(self, first_round: int, last_round: int) -> NDArray[Any]:
        """Returns a row of COLUMNS for each of the rounds first_round … last_round-1."""
        table: NDArray[Any] = np.array(self._rounds or ()).reshape(-1, len(self.COLUMNS))
        return table[(table[:, 0] >= first_round) & (table[:, 0] < last_round)]
