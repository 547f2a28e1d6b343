"""The draft's speculation ahead: branches that grow, and the cache of their outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import LIVE, Batch, Ints, Outcome, Speculation
from mpissd.engine.spec.cache import Key, SpeculationCache
from mpissd.engine.workload.rollout import Branches, Rollout


class Ahead:
    """The branches of one round.

    branches: as the worker made them, None if nothing was speculated. growth: their rollout.
    """

    def __init__(self) -> None:
        self.cache = SpeculationCache()
        self.branches: Branches | None = None
        self.growth: Rollout | None = None

    def clear(self) -> None:
        """Drops all branches: every outcome misses."""
        self.cache.clear()
        self.growth = self.branches = None

    def begin(
        self, batch: Batch, speculation: Speculation, branches: Branches
    ) -> tuple[NDArray[np.int64], Ints]:
        """Caches the outcomes of all branches; returns the batch row and k of each."""
        self.cache.fill(_keys(batch, speculation.round, branches))
        self.branches, self.growth = branches, branches.rollout
        return branches.lanes.rows, branches.lanes.k

    def lookup(self, batch: Batch, outcome: Outcome) -> list[int | None]:
        """Returns the lane that answers each live sequence, or None for a miss."""
        if not len(self.cache):
            return [None] * len(batch)
        lookup, round_ = self.cache.lookup, outcome.round
        return [
            None if event else lookup((round_, seq, epoch, k, token))
            for seq, epoch, event, k, token in outcome.rows.tolist()
            if LIVE[event]
        ]

    def prune(self, lanes: Sequence[int | None]) -> Rollout | None:
        """Keeps the lanes of the growth that hit; None: nothing hit. lanes: as `lookup` returns
        them."""
        rows = [row for row, lane in enumerate(lanes) if lane is not None]
        if not rows or self.growth is None:
            return None
        self.growth.keep([lane for lane in lanes if lane is not None], rows)
        return self.growth


def _keys(batch: Batch, round_: int, branches: Branches) -> Iterator[Key]:
    """Yields the key (round, id, epoch, k, t*) of every lane, in lane order."""
    (rows, k), first = branches.lanes.lists, branches.rollout.first.tolist()
    names = batch.identity[:, :2].tolist()
    if len(names) == 1:
        return zip(repeat(round_), repeat(names[0][0]), repeat(names[0][1]), k, first)
    ids, epochs = [names[row][0] for row in rows], [names[row][1] for row in rows]
    return zip(repeat(round_), ids, epochs, k, first)
