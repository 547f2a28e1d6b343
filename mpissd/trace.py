"""The round ledger: exclusive host phases, stamped from one clock, that close to the round's wall.

`mark(phase)` ends a phase: the time since the last mark is its own. A round's phases are summed
where a phase occurs twice. Costs about 0.2 µs a mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LeadPhase(IntEnum):
    """What the lead's host did with a round."""

    SEND = 0  # pack and start OUTCOME
    COMMIT = 1  # apply the outcome to the batch
    DRAFT_WAIT = 2  # request → speculation on the host
    BROADCAST = 3  # plan to the followers
    LAUNCH = 4  # upload and launch the verification
    DEVICE_WAIT = 5  # until the verification is over
    SAMPLE = 6  # acceptance rule
    RECORD = 7  # bookkeeping of the round


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


class Ledger:
    """Phase times of one rank, a row a round."""

    def __init__(self, phases: type[IntEnum]) -> None:
        self.names = [phase.name.lower() for phase in phases]
        self._now = [0] * len(self.names)
        self._rows: list[list[int]] = []
        self._last = self._start = perf_counter_ns()

    def restart(self) -> None:
        """Begins a round now: what came before belongs to no round."""
        self._last = self._start = perf_counter_ns()
        self._now = [0] * len(self.names)

    def mark(self, phase: int) -> None:
        """Ends `phase`."""
        now = perf_counter_ns()
        self._now[phase] += now - self._last
        self._last = now

    def close_round(self, round_: int, phase: int) -> None:
        """Ends `phase` and the round; the next round begins at the same instant."""
        self.mark(phase)
        self._rows.append([round_, self._last - self._start, *self._now])
        self._start = self._last
        self._now = [0] * len(self.names)

    def table(self, first_round: int, last_round: int) -> NDArray[np.int64]:
        """Rows [n, 2 + phases] = round, wall_ns, phase_ns… of rounds first … last-1."""
        return select(self._rows, 2 + len(self.names), first_round, last_round)


def select(
    rows: Sequence[Sequence[Any]], width: int, first_round: int, last_round: int
) -> NDArray[Any]:
    """The rows whose first column is a round in first … last-1, as one array."""
    table = np.array(rows).reshape(-1, width)
    return table[(table[:, 0] >= first_round) & (table[:, 0] < last_round)]
