"""The ledger of a rank: how long each phase of each round took on its host.

Phases don't overlap and are stamped from one clock, so that their times add up to the round's.
`mark(phase)` ends a phase, which began at the previous mark. A mark only stores the time (0.1 µs);
sums by phase and round, and the slices for --trace, are computed after the run.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.stage import DOING, OWN, Doing

Int64s = NDArray[np.int64]
_UNKNOWN = float("nan")


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
    GLUE = 5  # forward over each sequence's last token and its drafted tokens
    KEYS = 6  # choose bonus candidates and make them keys of the cache
    GROW = 7  # draft steps for these keys, with a poll for OUTCOME between two steps
    RECORD = 8  # store the round's rows
    PREFILL = 9  # compute prompts, or tokens that this draft did not draft, before a forward


class FollowPhase(IntEnum):
    """The phases of a round on the host of a target rank other than the lead, in order."""

    PLAN_WAIT = 0  # wait for the lead's plan
    COMMIT = 1  # apply the outcome to the batch
    UPLOAD = 2  # hand the tokens to the device
    LAUNCH = 3  # launch the verification
    DEVICE_WAIT = 4  # wait until the verification is over
    PREFILL = 5  # compute the prompts of new sequences, between COMMIT and UPLOAD


# {DraftPhase that ends: the activity that begins then}, which the host's watchdog process reports.
_ANSWERING = [Doing.ANSWER] * DraftPhase.SEND
_GROWING = [Doing.GROWTH] * (DraftPhase.RECORD - DraftPhase.SEND)
_NEXT = bytes([*_ANSWERING, *_GROWING, Doing.OUTCOME_WAIT, Doing.GROWTH])


class Ledger:
    """The stamps of one rank's phases; a mark is two appends, of 9 bytes together."""

    def __init__(self, phases: type[IntEnum]) -> None:
        self.names = [phase.name.lower() for phase in phases]
        # Each mark stores two numbers: the end of its phase in ns, and the phase. Each round stores
        # three: its number, its beginning in ns, and the number of marks up to its end.
        self._ends, self._phases, self._rounds = array("q"), array("b"), array("q")
        self._start = perf_counter_ns()

    def restart(self) -> None:
        """Begins a round now, and drops the marks since the last closed round."""
        closed = self._rounds[-1] if self._rounds else 0
        del self._ends[closed:], self._phases[closed:]
        self._start = perf_counter_ns()

    def mark(self, phase: int) -> None:
        """Ends `phase`, and begins the next one."""
        self._ends.append(perf_counter_ns())
        self._phases.append(phase)

    def close_round(self, round_: int, phase: int) -> float:
        """Ends `phase` and a round; returns when the next one begins, in s of perf_counter."""
        self.mark(phase)
        self._rounds.append(round_)
        self._rounds.append(self._start)
        self._rounds.append(len(self._ends))
        self._start = self._ends[-1]
        return self._start * 1e-9

    def table(self, first_round: int, last_round: int) -> Int64s:
        """Returns a row for each of the rounds first_round … last_round-1, int64 [n, 2 + phases]:
        the round, its wall time in ns, and the ns of each phase."""
        slices = self.slices(first_round, last_round)
        rounds, row = np.unique(slices[:, 0], return_inverse=True)
        table = np.zeros((len(rounds), 2 + len(self.names)), np.int64)
        # Adds up a phase that occurs twice.
        np.add.at(table, (row.reshape(-1), 2 + slices[:, 1]), slices[:, 3] - slices[:, 2])
        table[:, 0], table[:, 1] = rounds, table[:, 2:].sum(axis=1)
        return table

    def slices(self, first_round: int, last_round: int) -> Int64s:
        """Returns a row for each mark of the rounds first_round … last_round-1, in order of time.
        int64 [n, 4]: the round, the phase, its start and its end in ns of perf_counter."""
        rounds, starts, stops = np.array(self._rounds).reshape(-1, 3).T
        counts = np.diff(stops, prepend=0)
        closed = int(counts.sum())
        ends, phases = np.array(self._ends)[:closed], np.array(self._phases)[:closed]
        begins = np.roll(ends, 1)
        begins[stops - counts] = starts
        table = np.column_stack([np.repeat(rounds, counts), phases, begins, ends])
        return table[(table[:, 0] >= first_round) & (table[:, 0] < last_round)]


class DraftLedger(Ledger):
    """A draft's ledger, whose marks also show the draft's next activity to the host's watchdog (50
    ns). Target ranks store only their waits for other ranks: nine marks in a 14 µs round would make
    a lone AR rank 3% slower."""

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
    """A draft's ledger, and its times and counts by round. ranks: counts the ranks of bonus tokens
    (a features.ranks.RankCounts, or None). stored_s: the seconds of the last answer in which the
    draft stored tokens that its KV cache lacked."""

    # By round. t_draft_s: seconds of drafting after the outcome, NaN if a sequence was a hit.
    # t_growth_s: seconds of drafting ahead, NaN if the next outcome came before its end. num_jit:
    # misses for which the model drafted. steps_ready: levels that the branches had when they hit.
    COLUMNS = ("round", "t_draft_s", "t_growth_s", "num_jit", "steps_ready")

    def __init__(self, *, kept: bool = True, ranks: Any = None) -> None:
        """kept: whether rounds are recorded; not by a server, which decodes for days."""
        self.ledger: Ledger = DraftLedger() if kept else NullLedger(DraftPhase)
        self.mark = self.ledger.mark
        self.ranks = ranks
        self.stored_s = 0.0
        self._rounds: array[float] | None = array("d") if kept else None  # rows of COLUMNS
        self._growth_start = 0.0
        self._draft_s = _UNKNOWN
        self._growth_s = _UNKNOWN
        self._num_jit = 0
        self._steps_ready = 0

    def hit(self, steps: int) -> None:
        """Notes that the branches that hit have `steps` levels."""
        self._steps_ready = steps

    def missed(self, num_jit: int, stored_s: float) -> None:
        """Notes the misses for which the model drafts, and the seconds of storing tokens."""
        self._num_jit = num_jit
        self.stored_s = stored_s

    def drafted(self, seconds: float | None) -> None:
        """Notes the seconds in which all tokens of a round were drafted; None: hits had some."""
        self._draft_s = _UNKNOWN if seconds is None else seconds

    def growth_begins(self) -> None:
        self._growth_start = perf_counter()

    def growth_ends(self) -> None:
        self._growth_s = perf_counter() - self._growth_start

    def close_round(self, round_: int) -> None:
        if self._rounds is not None:
            add = self._rounds.append  # five calls take less time than one extend()
            add(round_)
            add(self._draft_s)
            add(self._growth_s)
            add(self._num_jit)
            add(self._steps_ready)
        self._growth_s = _UNKNOWN
        self._steps_ready = 0
        self.ledger.close_round(round_, DraftPhase.RECORD)

    def table(self, first_round: int, last_round: int) -> NDArray[Any]:
        """Returns the rows of COLUMNS for rounds first … last-1, [rounds, columns]."""
        table: NDArray[Any] = np.array(self._rounds or ()).reshape(-1, len(self.COLUMNS))
        return table[(table[:, 0] >= first_round) & (table[:, 0] < last_round)]
