"""How long a group waits for a draft that others keep busy: for one forward at most.

Time is counted in the draft's forwards. Each group's next outcome falls due a drawn number of
forwards after its last answer: in the midst of the others' glues, growth and answers.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from mpissd.common.rounds import Ints, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.serve import serve
from mpissd.engine.model.shared import SharedForwards
from mpissd.engine.spec.fanout import FanOuts
from tests.loop.harness import WAITER, Rig, Scenario
from tests.loop.test_draft import ScriptedEnd

K, ROUNDS = 4, 30
DUE = (0, 0.4, 1.5, 2.5, 4.7, 9.1, 20)
MIXED = Scenario("ssd", batch=2, lookahead=K, p_hit=0.6, seed=5, fan_out=(2, 1, 3, 1, 2))


class Clock:
    """The stepper under the seats: its time is the number of forwards that began, and polls of a
    draft without work."""

    most_rows = 1 << 20

    def __init__(self) -> None:
        self.begun = 0
        self.now = 0.0
        self.ends: list[DueEnd] = []
        self.shared: SharedForwards | None = None
        self.carried: list[set[int]] = []  # the groups with rows in each forward

    def go_on(self, time: float, *, running: bool = False) -> None:
        self.now += time
        for end in self.ends:
            if end.ready_at is None and self.now >= end.due:
                end.ready_at = self.begun - running

    def upload(self, rows: int, tokens: Ints, places: None, *, lists: bool) -> None:
        assert len(tokens) <= rows

    def launch(self) -> None:
        assert self.shared is not None
        windows = [seat.window for seat in self.shared.seats]
        self.carried.append({n for n, w in enumerate(windows) if w.stop > w.start})
        self.begun += 1
        self.go_on(1, running=True)

    def wait(self, waiter: Waiter) -> None:
        assert self.shared is not None
        for seat in self.shared.seats:
            seat.window = slice(0, 0)

    def elapsed_s(self) -> float:
        return 1e-3


class DueEnd(ScriptedEnd):
    """A group's link: its outcome arrives when the clock says that it is due."""

    def __init__(self, scenario: Scenario, clock: Clock, group: int, dice: random.Random) -> None:
        super().__init__(scenario, ROUNDS, 0)
        self.clock, self.group, self.dice = clock, group, dice
        self.due, self.ready_at = dice.uniform(0, 5), None
        # Of each outcome, the first forward that ran or began from when it fell due on, and the
        # first one behind its answer.
        self.asked: list[tuple[int, int]] = []
        clock.ends.append(self)

    ready_at: int | None

    def outcome_arrived(self) -> bool:
        self.clock.go_on(0.01)
        return self.ready_at is not None

    def send_speculation(self, speculation: Speculation) -> None:
        super().send_speculation(speculation)
        assert self.ready_at is not None
        self.asked.append((self.ready_at, self.clock.begun))
        self.due, self.ready_at = self.clock.now + self.dice.choice(DUE), None
        self.clock.go_on(0)


def pool(groups: int, scenario: Scenario, seed: int) -> tuple[Clock, list[DueEnd]]:
    """Serves scripted groups until each has had its rounds."""
    clock, dice = Clock(), random.Random(seed)
    stepper: Any = clock
    clock.shared = SharedForwards(stepper, groups, slots=scenario.batch, lanes=99)
    ends, served = [], []
    for number, seat in enumerate(clock.shared.seats):
        each = replace(scenario, seed=scenario.seed + number)
        rig = Rig(each)
        policy = DraftPolicy(K, FanOuts(each.fans, each.fans), each.source, K)
        worker = rig.draft_worker
        worker.stepper = seat
        ends.append(DueEnd(each, clock, number, dice))
        served.append((ends[-1], Drafter(worker, policy, each.batch, WAITER)))
    serve(*served)
    return clock, ends


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
@pytest.mark.parametrize("p_hit", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_waits_for_another_groups_work_longer_than_one_forward(
    groups: int, p_hit: float, seed: int
) -> None:
    clock, ends = pool(groups, replace(MIXED, p_hit=p_hit), seed)
    for end in ends:
        assert len(end.sent) == len(end.asked) == ROUNDS
        for ready, answered in end.asked:
            # One runs or is being made up when the outcome comes; all others carry rows for it.
            after = clock.carried[ready:answered]
            assert all(end.group in carried for carried in after[1:]), (ready, answered, after)
            assert len(after) <= K + 2  # that one, a glue that was due, the K steps of the answer


def test_groups_that_ask_together_share_their_forwards() -> None:
    clock, _ = pool(4, replace(MIXED, p_hit=0.0), 1)
    alone = [pool(1, replace(MIXED, p_hit=0.0, seed=5 + n), 1)[0].begun for n in range(4)]
    assert clock.begun < 0.6 * sum(alone)
    assert max(len(groups) for groups in clock.carried) == 4


def test_an_outcome_that_waits_is_taken_before_the_next_forward() -> None:
    """A hit that is grown needs no forward: its answer leaves before any other begins."""
    _, ends = pool(3, replace(MIXED, p_hit=1.0, batch=1), 2)
    waits = [answered - ready for end in ends for ready, answered in end.asked[1:]]
    assert 0 in waits and sum(wait <= 1 for wait in waits) > len(waits) / 3
