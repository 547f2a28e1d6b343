"""Observes a draft's own rounds for adaptive controls: committed outcomes and durations.

Each round calls note_outcome(), note_drafting(), note_lookup(), note_speculation() and
inform_controls().
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from mpissd.common.rounds import Event, Outcome, Speculation
from mpissd.engine.decode.controls import Clocks, Controls, ranks_of, smoothed
from mpissd.engine.spec.adaptive import Seen
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.rollout import Branches

_Lookup = tuple[Outcome, list[int | None], "Branches | None", FanOuts]


class Observer:
    """Shows `controls` each round's outcomes, once the next round has been served."""

    def __init__(self, controls: Controls) -> None:
        self.clocks = Clocks()
        self._controls = controls
        self._lookup: _Lookup | None = None
        self._served: Speculation | None = None
        self._ended: Speculation | None = None  # The speculation served before the newest one.
        self._heard_at = self._served_at = self._backup_s = 0.0

    def note_outcome(self) -> None:
        """Notes the arrival of an OUTCOME, which ends the last round."""
        now, clocks = perf_counter(), self.clocks
        if self._served_at:
            clocks.away_s = smoothed(clocks.away_s, now - self._served_at)
        clocks.round_s, clocks.backup_s = now - self._heard_at, self._backup_s
        self._heard_at = now

    def note_drafting(self, seconds: float, steps: int, *, has_misses: bool) -> None:
        """Notes the seconds and steps that finishing hits and drafting for misses took."""
        if steps:
            self.clocks.step_s = smoothed(self.clocks.step_s, seconds / steps)
        self._backup_s = seconds if has_misses else 0.0

    def note_lookup(
        self,
        outcome: Outcome,
        lanes: list[int | None],
        branches: Branches | None,
        fan_outs: FanOuts,
    ) -> None:
        """Notes the lane, among the branches of `fan_outs`, that answers each live sequence."""
        self._lookup = outcome, lanes, branches, fan_outs

    def note_speculation(self, speculation: Speculation) -> None:
        """Notes that a speculation was sent to the target."""
        self._served_at = perf_counter()
        self._ended, self._served = self._served, speculation

    def inform_controls(self) -> None:
        """Shows the controls the last outcome of the speculation it judged.

        It is called when no outcome waits, because controls may take their time.
        """
        if self._ended is not None and self._lookup is not None:
            self._controls.observe(_seen(self._ended, *self._lookup), self.clocks)


def _seen(
    served: Speculation,
    outcome: Outcome,
    lanes: list[int | None],
    branches: Branches | None,
    fan_outs: FanOuts,
) -> Seen:
    rows = np.flatnonzero(outcome.events[: len(served.rows)] == Event.COMMIT)
    accepted, source = outcome.num_accepted[rows], served.source[rows]
    rank = limit = np.zeros(len(rows), np.int32)
    if branches is not None:  # Committed sequences come first among the live ones.
        committed, place = lanes[: len(rows)], branches.lanes.place
        rank, limit = ranks_of(committed, place, accepted, source, fan_outs)
    return Seen(accepted, served.num_draft[rows], source, served.hit[rows], rank, limit)
