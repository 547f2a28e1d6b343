"""Counts the ranks of bonus tokens among a draft's candidates, for the row and for fan-outs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpissd.common.rounds import Event, Ints, Outcome, Source, Speculation
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.round.branches import SpeculationCache


class _Lookup(NamedTuple):
    """An outcome that was looked up in the cache: the branch of each live sequence, the ranks of
    all branches (None: none were grown), and their fan-outs."""

    outcome: Outcome
    found: Sequence[int | None]
    ranks: Ints | None
    fan_outs: FanOuts


class RankCounts:
    """Counts (candidates kept, rank) of the bonus tokens that follow the draft model's tokens.

    A rank is counted from 1; 0: the token was none of the candidates. A bonus token that replaces a
    rejected one is counted separately from one after a whole accepted speculation.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[bool, int, int]] = Counter()
        self._served: Speculation | None = None
        self._lookup: _Lookup | None = None

    def looked_up(
        self, outcome: Outcome, found: Sequence[int | None], cache: SpeculationCache
    ) -> None:
        """Notes an outcome, and the branch of each live sequence that answers it (None: a miss)."""
        ranks = None if cache.branches is None else cache.branches.ranks
        self._lookup = _Lookup(outcome, found, ranks, cache.fan_outs)

    def count(self, speculation: Speculation) -> None:
        """Counts the outcome that was looked up last. Called when its answer, this speculation, has
        been sent."""
        served = self._served
        self._served = speculation
        if served is None or self._lookup is None or self._lookup.ranks is None:
            return
        outcome, found, _, fan_outs = self._lookup
        ranks = self._lookup.ranks
        # Committed sequences come first among the live ones.
        rows = np.flatnonzero(outcome.events[: len(served.rows)] == Event.COMMIT)
        columns = (served.source[rows], served.num_draft[rows], outcome.num_accepted[rows])
        sequences = zip(found, *(column.tolist() for column in columns), strict=False)
        for branch, source, drafted, k in sequences:
            limit = fan_outs.behind(source)[k]
            if limit and source != Source.FAST:
                rank = 0 if branch is None else int(ranks[branch]) + 1
                self._counts[k == drafted, limit, rank] += 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the row's key `learned`: the number of outcomes, and lists of [candidates kept,
        rank, count]."""
        counts = sorted(self._counts.items())
        return {
            "outcomes": self._counts.total(),
            "ranks_rejected": [[*at, n] for (is_end, *at), n in counts if not is_end],
            "ranks_all_accepted": [[*at, n] for (is_end, *at), n in counts if is_end],
        }
