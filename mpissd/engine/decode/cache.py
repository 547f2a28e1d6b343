"""The speculation cache: the branches that were grown for predicted verification outcomes.

A key is (round, request id, epoch, k, t*): the outcome v = (k, t*) of verifying round `round`
(Kumar, Dao, May 2026, §3). The cache holds the branches of one round only; a key of an older round
never matches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

from mpissd.common.rounds import LIVE, Outcome, Speculation
from mpissd.engine.workload.oracle import Branches, Rollout
from mpissd.engine.workload.sequence import Batch

Key = tuple[int, int, int, int, int]


class SpeculationCache:
    """The branches of one round; a lane is one branch. branches: None if nothing was grown."""

    def __init__(self) -> None:
        self._lanes: dict[Key, int] = {}
        self.branches: Branches | None = None

    @property
    def growth(self) -> Rollout | None:
        """The tokens of the branches so far."""
        return None if self.branches is None else self.branches.rollout

    def clear(self) -> None:
        """Drops all branches: every outcome misses."""
        self._lanes, self.branches = {}, None

    def fill(self, batch: Batch, speculation: Speculation, branches: Branches) -> None:
        """Replaces the contents: each lane answers one outcome of this speculation."""
        self.branches = branches
        keys = _keys(batch, speculation.round, branches)
        self._lanes = {key: lane for lane, key in enumerate(keys)}

    def lookup(self, batch: Batch, outcome: Outcome) -> list[int | None]:
        """Returns the lane that answers each live sequence, or None for a miss."""
        if not self._lanes:
            return [None] * len(batch)
        get, round_ = self._lanes.get, outcome.round
        return [
            None if event else get((round_, name, epoch, k, token))
            for name, epoch, event, k, token in outcome.rows.tolist()
            if LIVE[event]
        ]

    def prune(self, lanes: Sequence[int | None]) -> Rollout | None:
        """Keeps only the lanes that hit, as `lookup` returns them; None: nothing hit."""
        rows = [row for row, lane in enumerate(lanes) if lane is not None]
        if not rows or self.growth is None:
            return None
        self.growth.keep([lane for lane in lanes if lane is not None], rows)
        return self.growth


def _keys(batch: Batch, round_: int, branches: Branches) -> Iterator[Key]:
    """Yields the key of every lane, in lane order."""
    (rows, k), first = branches.lanes.lists, branches.rollout.first.tolist()
    names = batch.identity[:, :2].tolist()
    if len(names) == 1:
        return zip(repeat(round_), repeat(names[0][0]), repeat(names[0][1]), k, first)
    ids, epochs = [names[row][0] for row in rows], [names[row][1] for row in rows]
    return zip(repeat(round_), ids, epochs, k, first)
