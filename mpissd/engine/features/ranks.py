"""Counts at which rank among a draft's candidates the target's bonus token was found. Result rows
hold these counts, from which the probability of cache hits can be estimated."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpissd.common.rounds import Event, Outcome, Source, Speculation
from mpissd.engine.round.branches import SpeculationCache


class RankCounts:
    """Counts how often each pair (number of the draft's candidates for the bonus token, rank of the
    bonus token among them) occurs. A rank is from 1 on, or 0 if the bonus token was no candidate.
    Rounds with a rejection are counted apart from rounds that accepted all drafted tokens."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[bool, int, int]] = Counter()
        self._served: Speculation | None = None

    def served(self, speculation: Speculation) -> None:
        """Stores the drafted tokens that the target verifies now, for the next `looked_up`."""
        self._served = speculation

    def looked_up(
        self, outcome: Outcome, found: Sequence[int | None], cache: SpeculationCache
    ) -> None:
        """Counts the outcome of verifying the drafted tokens that `served` stored. found: for each
        live sequence, the index of the branch in the cache that was hit, or None (a miss)."""
        served = self._served
        if served is None or cache.branches is None:
            return
        ranks = cache.branches.ranks
        # Sequences that go on come first, before those that have just joined.
        rows = np.flatnonzero(outcome.events[: len(served.rows)] == Event.COMMIT)
        columns = (served.source[rows], served.num_draft[rows], outcome.num_accepted[rows])
        sequences = zip(found, *(column.tolist() for column in columns), strict=False)
        for branch, source, drafted, k in sequences:
            limit = cache.fan_outs.behind(source)[k]
            if limit and source != Source.FAST:
                rank = 0 if branch is None else int(ranks[branch]) + 1
                self._counts[k == drafted, limit, rank] += 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts for a result row: the number of outcomes, and two lists of [number of
        candidates, rank, count], after a rejection and after all drafted tokens were accepted."""
        counts = sorted(self._counts.items())
        return {
            "outcomes": self._counts.total(),
            "ranks_rejected": [[*at, n] for (is_end, *at), n in counts if not is_end],
            "ranks_all_accepted": [[*at, n] for (is_end, *at), n in counts if is_end],
        }
