"""How long a group waits for a draft that others keep busy: for one forward at most.

Time is counted in the draft's forwards. Each group's next outcome is due a drawn number of forwards
after its last answer: during the others' glues, growth and answers.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from mpissd.common.rounds import Ints, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.round import serve
from mpissd.engine.model.stepper import SharedForwards
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.workers import DraftWorker
from tests.loop.harness import WAITER, Rig, Scenario
from tests.loop.test_draft import ScriptedEnd

K, ROUNDS = 4, 30
DUE = (0, 0.4, 1.5, 2.5, 4.7, 9.1, 20)
MIXED = Scenario("ssd", batch=2, lookahead=K, p_hit=0.6, seed=5, fan_out=(2, 1, 3, 1, 2))


class Clock:
    """The stepper that the groups share: its time is the number of forwards that began, and polls
    of a draft without work. carried: the groups with rows in each forward."""

    most_rows = 1 << 20

    def __init__(self, groups: int, slots: int) -> None:
        self.begun, self.now = 0, 0.0
        self.ends: list[DueEnd] = []
        self.carried: list[set[int]] = []
        stepper: Any = self
        self.shared = SharedForwards(stepper, groups, slots=slots, lanes=99)

    def advance(self, time: float, *, running: bool = False) -> None:
        self.now += time
        for end in self.ends:
            if end.ready_at is None and self.now >= end.due:
                end.ready_at = self.begun - running

    def upload(self, rows: int, tokens: Ints, places: None, *, lists: bool) -> None:
        assert len(tokens) <= rows

    def launch(self) -> None:
        windows = [seat.window for seat in self.shared.seats]
        self.carried.append({n for n, one in enumerate(windows) if one.stop > one.start})
        self.begun += 1
        self.advance(1, running=True)

    def wait(self, waiter: Waiter) -> None:
        for seat in self.shared.seats:
            seat.window = slice(0, 0)

    def elapsed_s(self) -> float:
        return 1e-3


class DueEnd(ScriptedEnd):
    """A group's link: its outcome arrives when the clock says that it is due.

    waits: of each outcome, the forwards that had begun when it was due, and when it was answered.
    """

    ready_at: int | None = None

    def __init__(self, scenario: Scenario, clock: Clock, dice: random.Random) -> None:
        super().__init__(scenario, ROUNDS, 0)
        self.clock, self.dice, self.due = clock, dice, dice.uniform(0, 5)
        self.waits: list[tuple[int, int]] = []
        clock.ends.append(self)

    def outcome_arrived(self) -> bool:
        self.clock.advance(0.01)
        return self.ready_at is not None

    def send_speculation(self, speculation: Speculation) -> None:
        super().send_speculation(speculation)
        assert self.ready_at is not None
        self.waits.append((self.ready_at, self.clock.begun))
        self.due, self.ready_at = self.clock.now + self.dice.choice(DUE), None
        self.clock.advance(0)


@pytest.mark.parametrize(("groups", "seed"), [(1, 0), (2, 1), (3, 2), (8, 0)])
@pytest.mark.parametrize("p_hit", [0.0, 0.6, 1.0])
def test_no_group_waits_for_another_ones_work_longer_than_one_forward(
    groups: int, p_hit: float, seed: int
) -> None:
    clock, dice, served = Clock(groups, MIXED.batch), random.Random(seed), []
    for number, seat in enumerate(clock.shared.seats):
        rig = Rig(replace(MIXED, p_hit=p_hit, seed=MIXED.seed + number))
        fans = FanOuts(rig.scenario.fans, rig.scenario.fans)
        worker = DraftWorker(seat, rig.draft_worker.oracle)
        policy = DraftPolicy(K, fans, rig.scenario.source, K)
        end = DueEnd(rig.scenario, clock, dice)
        served.append((end, Drafter(worker, policy, MIXED.batch, WAITER)))
    serve(*served)
    for group, end in enumerate(clock.ends):
        assert len(end.sent) == len(end.waits) == ROUNDS
        for ready, answered in end.waits:
            # One forward runs or is prepared when the outcome comes; all others have rows for it.
            after = clock.carried[ready:answered]
            assert all(group in carried for carried in after[1:]), (ready, answered, after)
            assert len(after) <= K + 2  # that one, a glue that was due, the K steps of the answer
