"""Counts the ranks of bonus tokens among a draft's candidates, for result rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpissd.common.rounds import Event, Ints, Outcome, Source, Speculation
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.round.branches import SpeculationCache


class _Lookup(NamedTuple):
    """An outcome that was looked up in the speculation cache. branches: by live sequence, the index
    of the branch that it hit, or None. ranks: by branch, the rank of its bonus token among the
    candidates (None: there were no branches)."""

    outcome: Outcome
    branches: Sequence[int | None]
    ranks: Ints | None
    fan_outs: FanOuts


class RankCounts:
    """Counts (number of candidates, rank) of the bonus tokens that follow the draft model's tokens.
    A rank is from 1 on, or 0 if the bonus token was none of the draft's candidates. Bonus tokens
    after a rejection are counted apart from those after all drafted tokens were accepted."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[bool, int, int]] = Counter()
        self._served: Speculation | None = None
        self._lookup: _Lookup | None = None

    def looked_up(
        self, outcome: Outcome, branches: Sequence[int | None], cache: SpeculationCache
    ) -> None:
        """Notes an outcome, and by live sequence the branch in the cache that it hit, or None."""
        ranks = None if cache.branches is None else cache.branches.ranks
        self._lookup = _Lookup(outcome, branches, ranks, cache.fan_outs)

    def count(self, speculation: Speculation) -> None:
        """Counts the outcome that was looked up last, whose answer is `speculation`."""
        served = self._served
        self._served = speculation
        if served is None or self._lookup is None:
            return
        outcome, branches, ranks, fan_outs = self._lookup
        if ranks is None:
            return
        # Committed sequences come first among the live ones.
        rows = np.flatnonzero(outcome.events[: len(served.rows)] == Event.COMMIT)
        columns = (served.source[rows], served.num_draft[rows], outcome.num_accepted[rows])
        sequences = zip(branches, *(column.tolist() for column in columns), strict=False)
        for branch, source, drafted, k in sequences:
            limit = fan_outs.behind(source)[k]
            if limit and source != Source.FAST:
                rank = 0 if branch is None else int(ranks[branch]) + 1
                self._counts[k == drafted, limit, rank] += 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the value of the key `learned` of result rows: the number of outcomes, and lists
        of [number of candidates, rank, count]."""
        counts = sorted(self._counts.items())
        return {
            "outcomes": self._counts.total(),
            "ranks_rejected": [[*at, n] for (is_end, *at), n in counts if not is_end],
            "ranks_all_accepted": [[*at, n] for (is_end, *at), n in counts if is_end],
        }
