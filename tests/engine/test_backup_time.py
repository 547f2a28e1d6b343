"""What --backup=auto costs: the real loops in virtual time, in which a controller's work lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mpissd.common.records import RoundRecords
from mpissd.engine.decode import draft, observer
from mpissd.engine.decode.controls import AdaptiveControls, Controls
from mpissd.engine.decode.draft import DraftPolicy
from mpissd.engine.spec.adaptive import OutcomeEstimator
from mpissd.engine.spec.control import BackupController
from tests.lab.test_predict_loops import Clock, VirtualRun, make_job

SMALL = {"pair": "8b/1b", "lookahead": 4, "fan_out": "geometric:12"}
LARGE = {"pair": "70b/1b", "lookahead": 7, "fan_out": "geometric:24"}
SEEN_S, CHOSEN_S = 45e-6, 20e-6  # what the controller took of a round's time on an H200's host


class Slow(BackupController):
    """A controller whose work moves the draft's clock."""

    def __init__(self, lookahead: int, clock: Clock, scale: float) -> None:
        super().__init__(lookahead)
        self._clock, self._scale = clock, scale

    def observe(self, *seen: Any, **times: float) -> None:
        self._clock.spend(self._scale * SEEN_S)
        super().observe(*seen, **times)

    def choose(self, batch: int) -> Any:
        self._clock.spend(self._scale * CHOSEN_S)
        return super().choose(batch)


class AutoRun(VirtualRun):
    """A job of --backup=auto; `scale`: how long the controller thinks."""

    scale = 1.0

    def _controls(self, policy: DraftPolicy) -> Controls:
        lookahead = policy.lookahead
        return AdaptiveControls(
            Controls(policy.fan_outs, policy.backup, lookahead),
            OutcomeEstimator(lookahead, (0.8,) * lookahead),
            lookahead=lookahead,
            backup=Slow(lookahead, self.draft, self.scale),
        )


Run = Callable[..., tuple[RoundRecords, np.ndarray]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a pair on a virtual machine whose draft reads its own clock."""

    def found(
        backup: str, flags: dict[str, Any], rounds: int = 400, scale: float = 1.0
    ) -> tuple[RoundRecords, np.ndarray]:
        job = make_job(mode="ssd", backup=backup, alpha=0.8, **flags)
        made = (AutoRun if backup == "auto" else VirtualRun)(job, rounds)
        made.scale = scale  # type: ignore[union-attr]
        for module in (observer, draft):
            monkeypatch.setattr(module, "perf_counter", lambda: made.draft.now)
        records, round_s = made()
        return records, np.asarray(round_s)

    yield found


def rate(found: tuple[RoundRecords, np.ndarray]) -> float:
    """Tokens a second."""
    sequences, round_s = found[0].sequences(), found[1]
    return float((sequences[:, 3] + 1).sum() / round_s.sum())


@pytest.mark.parametrize("batch", [1, 4])
def test_no_outcome_waits_for_the_controller(batch: int, run: Run) -> None:
    """It works while the glue runs: the rounds are those of a controller that takes no time."""
    flags = {**SMALL, "batch_size": batch}
    (slow, slow_s), (quick, quick_s) = (run("auto", flags, 80, scale) for scale in (1.0, 0.0))
    np.testing.assert_array_equal(slow.sequences(), quick.sequences())
    np.testing.assert_allclose(slow_s, quick_s, rtol=1e-9)


@pytest.mark.parametrize(("pair", "batch"), [(SMALL, 4), (SMALL, 16), (LARGE, 1)])
def test_auto_is_near_the_better_backup(pair: dict[str, Any], batch: int, run: Run) -> None:
    """Start and trials included: the mean of three seeds whose draws are those of its rivals.

    FAST is the better one of the small pair. Of the large one it loses a ninth: with 32 rows of it
    at the start 400 rounds lost 4.7%.
    """
    rates = {
        way: np.array(
            [rate(run(way, {**pair, "batch_size": batch, "seed": seed})) for seed in range(3)]
        )
        for way in ("jit", "fast", "auto")
    }
    better = max(rates["jit"], rates["fast"], key=np.mean)
    assert np.mean(1 - rates["auto"] / better) < 0.015
