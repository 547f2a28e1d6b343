"""What a draft decides while it runs: fan-outs, the backup, how far a late hit is grown.

Decisions read committed outcomes and clocks, never what is proposed: that keeps SSD lossless
[THEORY, losslessness 1, 2 and 4]. On several draft ranks fan-outs follow from outcomes alone, so
that all ranks allot the same lanes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpissd.common.rounds import Ints, Source
from mpissd.engine.spec.adaptive import AdaptiveFanOut, OutcomeEstimator, Seen
from mpissd.engine.spec.control import BackupController, steps_to_serve
from mpissd.engine.spec.fanout import FanOuts

_REFRESH_ROUNDS = 32


@dataclass
class Clocks:
    """Seconds at the draft. Smoothed over rounds: step_s, one step of a late hit or a backup;
    away_s, from SPECULATION until the next OUTCOME is found. Of the last round: round_s, from one
    OUTCOME to the next, of which backup_s went into steps for misses."""

    step_s: float = 0.0
    away_s: float = 0.0
    round_s: float = 0.0
    backup_s: float = 0.0


class Controls:
    """Fixed choices, and the interface of those that adapt."""

    watches = False  # whether it wants to observe

    def __init__(
        self, fan_outs: FanOuts, backup: Source, lookahead: int, *, on_late: str = "finish"
    ) -> None:
        self.fan_outs = fan_outs
        self.speculates_ahead = fan_outs.branches > 0  # grows while the target verifies (SSD)
        self._backup, self._lookahead, self._serves = backup, lookahead, on_late == "serve"

    def backup(self, num_misses: int, num_live: int) -> Source:
        """What drafts this round's misses."""
        return self._backup

    def late_steps(self, ready: int, clocks: Clocks) -> int:
        """Tokens that a hit is served with of which `ready` are grown."""
        return ready if self._serves else self._lookahead

    def plan(self) -> FanOuts:
        """The fan-outs of the growth that begins now, while the target verifies."""
        return self.fan_outs

    def observe(self, seen: Seen, clocks: Clocks) -> None:
        """The outcomes of the last round."""

    def learned(self) -> dict[str, Any]:
        """What a row tells of it: the last lists, hazards, and fitted hit laws; {} if fixed."""
        return {}


class AdaptiveControls(Controls):
    """Choices that follow what was committed; those that are not given stay fixed."""

    watches = True

    def __init__(
        self,
        fixed: Controls,
        estimator: OutcomeEstimator,
        *,
        lookahead: int,
        fan_out: AdaptiveFanOut | None = None,
        backup: BackupController | None = None,
        late: bool = False,
    ) -> None:
        """estimator: of `fan_out`, if that is given. late: choose how far a late hit is grown."""
        self.estimator = estimator
        self._fixed, self._lookahead = fixed, lookahead
        self._fan_out, self._controller, self._late = fan_out, backup, late
        self.fan_outs = fixed.fan_outs if fan_out is None else fan_out.plan()
        self.speculates_ahead = fixed.speculates_ahead
        self._rounds = 0
        self._hazards = estimator.hazards()
        self._tokens = self._round_s = 0.0  # a sequence and round, smoothed
        self._next = 0, Source.NONE  # a batch, and what its misses will be answered by

    def backup(self, num_misses: int, num_live: int) -> Source:
        if self._controller is None:
            return self._fixed.backup(num_misses, num_live)
        batch, chosen = self._next
        return chosen if batch == num_live else self._controller.choose(num_live)

    def late_steps(self, ready: int, clocks: Clocks) -> int:
        if not self._late or ready >= self._lookahead or not self._round_s:
            return self._fixed.late_steps(ready, clocks)
        away, rate = clocks.away_s, self._tokens / self._round_s
        more = steps_to_serve(
            ready, self._lookahead, clocks.step_s, lambda served: away, self._hazards, rate=rate
        )
        return ready + more

    def plan(self) -> FanOuts:
        self._rounds += 1
        if self._late and self._rounds % _REFRESH_ROUNDS == 0:
            self._hazards = self.estimator.hazards()
        if self._fan_out is not None:
            self.fan_outs = self._fan_out.plan()
        return self.fan_outs

    def learned(self) -> dict[str, Any]:
        within, end = self.estimator.fits()
        fast = self.fan_outs.after_fast
        return {
            "outcomes": self.estimator.count,
            "fan_out": list(self.fan_outs.after_hit) or None,
            "fan_out_miss": list(self.fan_outs.after_miss) or None,
            "fan_out_fast": None if fast is None else list(fast),
            "hazards": [round(rate, 4) for rate in self.estimator.hazards()],
            "hit_law_rejected": None if within is None else asdict(within),
            "hit_law_all_accepted": None if end is None else asdict(end),
        }

    def observe(self, seen: Seen, clocks: Clocks) -> None:
        (self._fan_out or self.estimator).observe(seen)
        if not len(seen.accepted):
            return
        self._tokens = smoothed(self._tokens, float(seen.accepted.mean()) + 1)
        self._round_s = smoothed(self._round_s, clocks.round_s)
        if self._controller is not None:
            self._controller.observe(
                seen.accepted,
                seen.source,
                seen.rank > 0,
                round_s=clocks.round_s,
                backup_s=clocks.backup_s,
                verify_s=0.0,
            )
            batch = len(seen.accepted)  # chosen now: a miss waits for it later
            self._next = batch, self._controller.choose(batch)


def smoothed(value: float, sample: float) -> float:
    """An exponential mean over about 16 samples; the first stands for itself."""
    return sample if value <= 0 else value + (sample - value) / 16


def ranks_of(
    lanes: list[int | None], place: Ints, accepted: Ints, source: Ints, fans: FanOuts
) -> tuple[Ints, Ints]:
    """(rank, limit) of each outcome: its lane's place among k's candidates, and F_k."""
    rank = [0 if lane is None else int(place[lane]) + 1 for lane in lanes]
    limit = [
        fans.behind(kind)[k] for kind, k in zip(source.tolist(), accepted.tolist(), strict=True)
    ]
    return np.array(rank, np.int32), np.array(limit, np.int32)
