"""The draft's record of its rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.tape import LAST, SPILL_ROUNDS, Tape
from mpissd.common.trace import select

_UNKNOWN = float("nan")


class DraftRows:
    """The values of COLUMNS by round; attributes hold the values of the current round.

    draft_s: seconds in which a whole speculation was drafted, NaN if hits gave a part of it.
    growth_s: seconds of a growth that ended, or NaN. num_jit: misses that the model drafted.
    steps_ready: steps grown of the branches that hit.
    """

    COLUMNS = ("round", "t_draft_s", "t_growth_s", "num_jit", "steps_ready")

    def __init__(self) -> None:
        self._tape = Tape("d")
        self.draft_s = self.growth_s = _UNKNOWN
        self.num_jit = self.steps_ready = 0

    def close(self, round_: int) -> None:
        """Records the round, and begins the next one."""
        # Five calls of append take less time than one extend().
        add = self._tape.tail.append
        add(round_)
        add(self.draft_s)
        add(self.growth_s)
        add(self.num_jit)
        add(self.steps_ready)
        self.growth_s = _UNKNOWN
        self.steps_ready = 0
        if round_ % SPILL_ROUNDS == LAST:
            self._tape.spill()

    def table(self, first_round: int, last_round: int) -> NDArray[np.float64]:
        """Returns the rows of rounds first … last-1, [rounds, columns]."""
        found: NDArray[Any] = select(self._tape.read(), len(self.COLUMNS), first_round, last_round)
        return found
