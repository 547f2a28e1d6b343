"""Handing the tokens to the device is a phase of its own, before the launch."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from mpissd.common.rounds import Ints
from mpissd.common.trace import FollowPhase, LeadPhase, Ledger
from mpissd.engine.decode.speculator import NoSpeculator
from mpissd.engine.decode.target import follow
from tests.loop.harness import (
    WAITER,
    CountingForwards,
    QueuePlans,
    QueuePlanSource,
    Rig,
    Scenario,
    drive,
)

SCENARIO = Scenario(mode="ar", rounds=6, num_followers=1)


class SlowForwards(CountingForwards):
    """An upload takes 3 ms, a launch 1."""

    def upload(self, rows: int, tokens: Ints, places: None = None, *, lists: bool = False) -> None:
        super().upload(rows, tokens, places, lists=lists)
        time.sleep(3e-3)

    def launch(self) -> None:
        super().launch()
        time.sleep(1e-3)


def ledgers() -> dict[str, Ledger]:
    """Of the lead and of its follower, which hears the plans when all rounds are over."""
    rig = Rig(SCENARIO)
    rig.target_forwards = SlowForwards()
    plans = QueuePlans(rig.shape, 1)
    loop = rig.loop(NoSpeculator(), plans)
    drive(loop, SCENARIO)
    loop.stop()
    source = QueuePlanSource(rig.shape, plans.queues[0])
    heard = Ledger(FollowPhase)
    follow(rig.target_worker(SlowForwards()), source, SCENARIO.batch, WAITER, heard)
    return {"lead": loop.ledger, "follower": heard}


@pytest.mark.parametrize(("role", "phases"), [("lead", LeadPhase), ("follower", FollowPhase)])
def test_an_upload_ends_before_the_launch_begins(
    role: str, phases: type[LeadPhase] | type[FollowPhase]
) -> None:
    ledger = ledgers()[role]
    table = ledger.table(0, 99)
    assert len(table) == SCENARIO.rounds
    assert (table[:, 2 + phases.UPLOAD] >= 3e6).all()
    assert (table[:, 2 + phases.LAUNCH] >= 1e6).all()
    assert table[:, 2 + phases.LAUNCH].min() < 3e6  # the upload is not counted there
    marks = ledger.slices(0, 99)[:, 1].tolist()
    follows = {after for before, after in pairwise(marks) if before == phases.UPLOAD}
    assert follows == {phases.LAUNCH}
