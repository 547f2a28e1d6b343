"""What a draft has speculated ahead: branches that grow, and the cache of their outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import LIVE, Batch, Ints, Outcome, Speculation
from mpissd.engine.decode.share import Share
from mpissd.engine.spec.cache import Key, SpeculationCache
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.rollout import Branches, Rollout


class Ahead:
    """The branches behind one trunk. Lanes are counted over those of all drafts.

    branches: as the worker made them, None where nothing was speculated. growth: the rollout of
    this draft's own lanes, which grows.
    """

    def __init__(self, share: Share) -> None:
        """Takes which of the D drafts this is."""
        self._share = share
        self.cache = SpeculationCache()
        self.branches: Branches | None = None
        self.growth: Rollout | None = None
        self._own: NDArray[np.int64] | None = None  # [lanes], index into the growth; -1: not ours

    def clear(self) -> None:
        """Drops all branches: every outcome misses."""
        self.cache.clear()
        self.growth = self.branches = self._own = None

    def begin(
        self, batch: Batch, speculation: Speculation, branches: Branches, fan_outs: FanOuts
    ) -> tuple[NDArray[np.int64], Ints]:
        """Caches the outcomes of all branches behind the trunk and keeps this draft's own lanes.

        Returns the batch row and k of each of these.
        """
        self.cache.fill(_keys(batch, speculation.round, branches))
        self.branches, self.growth = branches, branches.rollout
        rows, k = branches.lanes.rows, branches.lanes.k
        if self._share.num_drafts > 1:
            mine = self._share.keep_own(branches, speculation.source, fan_outs)
            self._own = np.full(len(rows), -1, np.int64)
            self._own[mine] = np.arange(len(mine))
            rows, k = rows[mine], k[mine]
        return rows, k

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
        """Keeps of the growth the lanes that hit and are this draft's own; None: nothing hit.

        lanes: as `lookup` returns them. The other drafts answer the hits on their own lanes.
        """
        rows = [row for row, lane in enumerate(lanes) if lane is not None]
        if not rows or self.growth is None:
            return None
        won = [lane for lane in lanes if lane is not None]
        if self._own is not None:
            places = self._own[won]
            rows = [row for row, place in zip(rows, places, strict=True) if place >= 0]
            won = places[places >= 0].tolist()
        self.growth.keep(won, rows)
        return self.growth


def _keys(batch: Batch, round_: int, branches: Branches) -> Iterator[Key]:
    """Yields the key (round, id, epoch, k, t*) of every lane, in lane order."""
    (rows, k), first = branches.lanes.lists, branches.rollout.first.tolist()
    names = batch.identity[:, :2].tolist()
    if len(names) == 1:
        return zip(repeat(round_), repeat(names[0][0]), repeat(names[0][1]), k, first)
    ids, epochs = [names[row][0] for row in rows], [names[row][1] for row in rows]
    return zip(repeat(round_), ids, epochs, k, first)
