"""Counts the ranks of bonus tokens among a draft's candidates, for result rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpissd.common.rounds import Event, Outcome, Source, Speculation
from mpissd.engine.round.branches import SpeculationCache


class RankCounts:
    """Counts (number of candidates, rank) of the bonus tokens that follow the draft model's tokens.
    A rank is from 1 on, or 0 if the bonus token was none of the draft's candidates. Bonus tokens
    after a rejection are counted apart from those after all drafted tokens were accepted."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[bool, int, int]] = Counter()
        self._served: Speculation | None = None

    def served(self, speculation: Speculation) -> None:
        """Notes the drafted tokens that the target verifies now."""
        self._served = speculation

    def looked_up(
        self, outcome: Outcome, found: Sequence[int | None], cache: SpeculationCache
    ) -> None:
        """Counts the outcome of verifying the served tokens. found: by live sequence, the index of
        the branch in the cache that was grown for the outcome, or None."""
        served = self._served
        if served is None or cache.branches is None:
            return
        ranks = cache.branches.ranks
        # Committed sequences come first among the live ones.
        rows = np.flatnonzero(outcome.events[: len(served.rows)] == Event.COMMIT)
        columns = (served.source[rows], served.num_draft[rows], outcome.num_accepted[rows])
        sequences = zip(found, *(column.tolist() for column in columns), strict=False)
        for branch, source, drafted, k in sequences:
            limit = cache.fan_outs.behind(source)[k]
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
