"""Counts how far down the draft's candidates the bonus tokens were, for `mpissd laws`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpissd.common.rounds import Event, Outcome, Source, Speculation
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.oracle import Branches


class RankCounts:
    """Counts (candidates kept, rank) of the bonus tokens that follow the draft model's tokens.

    A rank is counted from 1; 0: the token was none of the candidates. A bonus token that replaces a
    rejected one is counted apart from one after a whole accepted speculation.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[bool, int, int]] = Counter()
        self._served: Speculation | None = None
        self._lookup: tuple[Outcome, Sequence[int | None], Branches | None, FanOuts] | None = None

    def note_lookup(
        self,
        outcome: Outcome,
        lanes: Sequence[int | None],
        branches: Branches | None,
        fan_outs: FanOuts,
    ) -> None:
        """Notes the lane, among the branches of `fan_outs`, that answers each live sequence."""
        self._lookup = outcome, lanes, branches, fan_outs

    def count(self, speculation: Speculation) -> None:
        """Counts the outcomes of the last lookup; called when its answer has been sent."""
        served, self._served = self._served, speculation
        if served is None or self._lookup is None:
            return
        outcome, lanes, branches, fan_outs = self._lookup
        if branches is None:
            return
        # Committed sequences come first among the live ones.
        rows = np.flatnonzero(outcome.events[: len(served.rows)] == Event.COMMIT)
        columns = served.source[rows], served.num_draft[rows], outcome.num_accepted[rows]
        for lane, source, drafted, k in zip(lanes, *(c.tolist() for c in columns), strict=False):
            limit = fan_outs.behind(source)[k]
            if limit and source != Source.FAST:
                rank = 0 if lane is None else int(branches.lanes.place[lane]) + 1
                self._counts[k == drafted, limit, rank] += 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the row's key `learned`: the number of outcomes, and lists of [candidates kept,
        rank, count]."""
        counts = sorted(self._counts.items())
        return {
            "outcomes": self._counts.total(),
            "ranks_rejected": [[*at, n] for (end, *at), n in counts if not end],
            "ranks_all_accepted": [[*at, n] for (end, *at), n in counts if end],
        }
