"""Decisions of a draft while it runs: fan-outs, the backup, and how far a late hit is grown.

Decisions read committed outcomes and clocks, never the proposed tokens; that keeps SSD lossless
[THEORY, losslessness 1, 2 and 4]. With several draft ranks the fan-outs follow from outcomes alone,
so that all ranks allot the same lanes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpissd.common.rounds import Ints, Source
from mpissd.engine.spec.adaptive import AdaptiveFanOut, OutcomeEstimator, Seen, Whole
from mpissd.engine.spec.control import BackupController, steps_to_serve
from mpissd.engine.spec.fanout import FanOuts

_REFRESH_ROUNDS = 32


@dataclass
class Clocks:
    """Durations at the draft, in seconds.

    Smoothed over rounds: step_s, one step of a late hit or a backup; away_s, from sending
    SPECULATION until the next OUTCOME arrives. Of the last round: round_s, from one OUTCOME to the
    next; backup_s, the part of round_s spent drafting for misses.
    """

    step_s: float = 0.0
    away_s: float = 0.0
    round_s: float = 0.0
    backup_s: float = 0.0


class Controls:
    """The choices of a fixed policy, and the interface of controls that adapt."""

    is_observing = False  # Whether observe() must be called.

    def __init__(
        self, fan_outs: FanOuts, backup: Source, lookahead: int, *, on_late: str = "finish"
    ) -> None:
        self.fan_outs = fan_outs
        # True for SSD, which grows while the target verifies.
        self.speculates_ahead = fan_outs.branches > 0
        self._backup, self._lookahead, self._serves = backup, lookahead, on_late == "serve"

    def backup(self, num_misses: int, num_live: int) -> Source:
        """Returns the source that drafts this round's misses."""
        return self._backup

    def late_steps(self, ready: int, clocks: Clocks) -> int:
        """Returns the number of tokens to serve for a hit that has `ready` of them grown."""
        return ready if self._serves else self._lookahead

    def plan(self) -> FanOuts:
        """Returns the fan-outs of the growth that begins now, while the target verifies."""
        return self.fan_outs

    def observe(self, seen: Seen, clocks: Clocks) -> None:
        """Updates the controls with the outcomes and the times of the last round."""

    def learned(self) -> dict[str, Any]:
        """Returns what a result row records of the last lists, hazards and hit laws; {} if
        fixed."""
        return {}


class AdaptiveControls(Controls):
    """Choices that follow the committed outcomes; any control that is not given stays fixed."""

    is_observing = True

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
        """Takes the estimator (that of `fan_out`, if given); `late` makes a late hit's length
        adaptive."""
        self.estimator = estimator
        self._fixed, self._lookahead = fixed, lookahead
        self._fan_out, self._controller, self._late = fan_out, backup, late
        self.fan_outs = fixed.fan_outs if fan_out is None else fan_out.plan()
        self.speculates_ahead = fixed.speculates_ahead
        self._rounds = 0
        self._hazards = estimator.hazards()
        self._tokens = self._round_s = (
            0.0  # Smoothed means: tokens by sequence and round, and seconds by round.
        )
        self._next = 0, Source.NONE  # A batch size, and the backup chosen for its misses.

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
        groups = self.estimator.groups()
        fast = self.fan_outs.after_fast
        return {
            "outcomes": self.estimator.count,
            "fan_out": list(self.fan_outs.after_hit) or None,
            "fan_out_miss": list(self.fan_outs.after_miss) or None,
            "fan_out_fast": None if fast is None else list(fast),
            "hazards": [round(rate, 4) for rate in self.estimator.hazards()],
            "hit_law_rejected": None if within is None else asdict(within),
            "hit_law_all_accepted": None if end is None else asdict(end),
            "ranks_rejected": counts_of(*groups[0]),
            "ranks_all_accepted": counts_of(*groups[1]),
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
            # Choose now: at the next miss the target would wait for the choice.
            batch = len(seen.accepted)
            self._next = batch, self._controller.choose(batch)


def smoothed(value: float, sample: float) -> float:
    """Returns the exponential mean over about 16 samples; the first sample is taken as it is."""
    return sample if value <= 0 else value + (sample - value) / 16


def counts_of(rank: Whole, limit: Whole) -> list[list[int]]:
    """Returns (candidates kept, rank, how often) of each pair that occurs; rank 0: none of them."""
    pairs, counts = np.unique(np.stack([limit, rank])[:, limit > 0], axis=1, return_counts=True)
    return np.vstack([pairs, counts]).T.tolist()  # type: ignore[no-any-return]


def ranks_of(
    lanes: list[int | None], place: Ints, accepted: Ints, source: Ints, fans: FanOuts
) -> tuple[Ints, Ints]:
    """Returns (rank, limit) of each outcome: its lane's place among k's candidates from 1, and
    F_k."""
    rank = [0 if lane is None else int(place[lane]) + 1 for lane in lanes]
    limit = [
        fans.behind(kind)[k] for kind, k in zip(source.tolist(), accepted.tolist(), strict=True)
    ]
    return np.array(rank, np.int32), np.array(limit, np.int32)
