"""What a draft sees of its own rounds, for controls that adapt: committed outcomes and clocks.

Round after round: heard() → drafted() → looked_up() → served() → show().
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from mpissd.common.rounds import Event, Outcome, Speculation
from mpissd.engine.decode.controls import Clocks, Controls, ranks_of, smoothed
from mpissd.engine.spec.adaptive import Seen
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.base import Branches

_Lookup = tuple[Outcome, list[int | None], "Branches | None", FanOuts]


class Watch:
    """Shows `controls` each round when the next one has been served."""

    def __init__(self, controls: Controls) -> None:
        self.clocks = Clocks()
        self._controls = controls
        self._lookup: _Lookup | None = None
        self._served: Speculation | None = None
        self._ended: Speculation | None = None  # what was served before it
        self._heard_at = self._served_at = self._backup_s = 0.0

    def heard(self) -> None:
        """An OUTCOME was found: the round that it ends took as long as this."""
        now, clocks = perf_counter(), self.clocks
        if self._served_at:
            clocks.away_s = smoothed(clocks.away_s, now - self._served_at)
        clocks.round_s, clocks.backup_s = now - self._heard_at, self._backup_s
        self._heard_at = now

    def drafted(self, seconds: float, steps: int, *, has_misses: bool) -> None:
        """Hits were finished and misses drafted, in so many steps."""
        if steps:
            self.clocks.step_s = smoothed(self.clocks.step_s, seconds / steps)
        self._backup_s = seconds if has_misses else 0.0

    def looked_up(
        self,
        outcome: Outcome,
        lanes: list[int | None],
        branches: Branches | None,
        fan_outs: FanOuts,
    ) -> None:
        """The lane that answers each live sequence, of the branches that grew by `fan_outs`."""
        self._lookup = outcome, lanes, branches, fan_outs

    def served(self, speculation: Speculation) -> None:
        """A speculation is with the target."""
        self._served_at = perf_counter()
        self._ended, self._served = self._served, speculation

    def show(self) -> None:
        """What the last outcome said of its speculation; controls take their time over it."""
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
    if branches is not None:  # who was committed comes first among those that are live
        committed, place = lanes[: len(rows)], branches.lanes.place
        rank, limit = ranks_of(committed, place, accepted, source, fan_outs)
    return Seen(accepted, served.num_draft[rows], source, served.hit[rows], rank, limit)
