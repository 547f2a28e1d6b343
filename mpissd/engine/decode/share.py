"""Divides branches and misses among several drafts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.rollout import Branches

Owners = Callable[[tuple[int, ...]], Ints]


class Share:
    """This draft's index among D, and the lanes and misses that are its own.

    All drafts run the same glue, so each computes without communication which draft holds an
    outcome.
    """

    def __init__(self, index: int = 0, num_drafts: int = 1, owners: Owners | None = None) -> None:
        """Takes owners, a map from F_0..F_K to the draft that grows each of the ΣF lanes.

        It is needed from D = 2 on.
        """
        assert num_drafts == 1 or owners is not None, "several drafts, and nobody owns a lane"
        self.index, self.num_drafts = index, num_drafts
        self._owners = owners
        self._tables: dict[tuple[int, ...], tuple[Ints, Ints]] = {}

    def drafts_miss(self, row: int) -> bool:
        """Returns whether this draft answers a miss in this batch row."""
        return row % self.num_drafts == self.index

    def lanes(self, branches: Branches, source: Ints, fan_outs: FanOuts) -> Ints:
        """Returns the draft that grows each lane, [lanes]; source: [b], what drafted each trunk."""
        lanes = branches.lanes
        owner = np.empty(len(lanes.k), np.int32)
        behind = source[lanes.rows]
        for kind in set(source.tolist()):
            mask = behind == kind
            starts, owners = self._table(fan_outs.behind(kind))
            owner[mask] = owners[starts[lanes.k[mask]] + lanes.place[mask]]
        return owner

    def keep_own(self, branches: Branches, source: Ints, fan_outs: FanOuts) -> NDArray[np.int64]:
        """Drops the lanes of the other drafts from the rollout; returns the indices of the rest."""
        mine = np.flatnonzero(self.lanes(branches, source, fan_outs) == self.index)
        branches.rollout.keep(mine.tolist(), ())
        return mine

    def _table(self, fan_out: tuple[int, ...]) -> tuple[Ints, Ints]:
        if fan_out not in self._tables:
            assert self._owners is not None, "one draft owns all"
            starts = (np.cumsum(fan_out) - fan_out).astype(np.int32)
            self._tables[fan_out] = starts, self._owners(fan_out)
        return self._tables[fan_out]
