"""The scheduler on its own: order, pages, preemption, and that every request ends."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Outcome, Request, Speculation
from mpissd.engine.decode.round import RoundResult
from mpissd.engine.decode.scheduler import Room, Scheduler, Task

K = 3
ROOM = Room(sequences=4, context=100, ahead=K + 1, page=10, pages=12)


def task(request_id: int, prompt: int = 5, tokens: int = 5, **told: object) -> Task:
    prompts = tuple(range(prompt))
    return Task(request_id, prompts, tokens, arrived_s=float(request_id), **told)  # type: ignore[arg-type]


@dataclass
class Ranks:
    """Replaces the ranks: every live sequence accepts as many tokens as `dice` gives."""

    dice: random.Random
    live: dict[int, Request] = field(default_factory=dict)

    def step(self) -> RoundResult:
        count = len(self.live)
        served = Speculation.empty(0, count, K)
        rows = np.zeros((count, Outcome.WIDTH), np.int32)
        for n, request in enumerate(self.live.values()):
            served.rows[n, 2] = K
            served.tokens[n] = [self.dice.randrange(50) for _ in range(K)]
            k = self.dice.randrange(K + 1)
            rows[n] = request.request_id, request.epoch, 0, k, self.dice.randrange(50)
        return RoundResult(served, Outcome(0, rows), 0.0)

    def turn(self, leave: Sequence[int], join: Sequence[Request]) -> None:
        for request_id in leave:
            del self.live[request_id]
        for request in join:
            assert request.request_id not in self.live
            self.live[request.request_id] = request


def test_requests_join_in_their_order_as_far_as_there_is_room() -> None:
    scheduler = Scheduler(ROOM)
    for n in (2, 0, 1, 3, 4, 5):
        scheduler.submit(task(n))
    assert [request.request_id for request in scheduler.turn(0.0).join] == [0, 1, 2, 3]
    assert (scheduler.num_waiting, scheduler.free_pages) == (2, 8)


def test_a_request_that_does_not_fit_is_waited_for() -> None:
    scheduler = Scheduler(Room(sequences=8, context=100, ahead=K + 1, page=10, pages=12))
    for n, length in enumerate((50, 70, 2)):
        scheduler.submit(task(n, length, 20))
    assert [request.request_id for request in scheduler.turn(0.0).join] == [0]


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (task(0, 100), "prompt of 100 tokens: allowed: 1..99"),
        (task(0, 0), "prompt of 0 tokens"),
        (task(0, tokens=0), "max_tokens=0"),
    ],
)
def test_what_can_never_run_is_refused(made: Task, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Scheduler(ROOM).submit(made)


def test_more_than_the_pool_holds_is_refused() -> None:
    room = Room(sequences=2, context=100, ahead=K + 1, page=10, pages=6)
    Scheduler(room).submit(task(0, 20, 36))
    with pytest.raises(ConfigError, match="20 tokens and max_tokens=37: allowed: 56 together"):
        Scheduler(room).submit(task(0, 20, 37))


def test_a_deadline_and_a_cancel_end_what_waits_and_what_runs() -> None:
    scheduler, ranks = Scheduler(ROOM), Ranks(random.Random(0))
    for n in range(6):
        scheduler.submit(task(n, tokens=90, deadline_s=9.0 if n in (0, 5) else None))
    ranks.turn([], scheduler.turn(1.0).join)
    scheduler.take(ranks.step())
    scheduler.cancel(1)
    scheduler.cancel(99)
    turn = scheduler.turn(10.0)
    told = {(one.task.request_id, one.ended) for one in turn.ended}
    assert told == {(1, "cancelled"), (0, "deadline"), (5, "deadline")}
    assert sorted(turn.leave) == [0, 1] and [r.request_id for r in turn.join] == [4]


def test_a_stop_token_or_the_limit_ends_a_request_within_a_round() -> None:
    served, rows = Speculation.empty(0, 2, K), np.zeros((2, Outcome.WIDTH), np.int32)
    served.rows[:, 2], served.tokens[:] = K, [[7, 8, 9], [7, 8, 9]]
    rows[:] = [(0, 0, 0, 3, 6), (1, 0, 0, 3, 6)]
    scheduler = Scheduler(ROOM)
    scheduler.submit(task(0, tokens=9, stop_ids=frozenset({8})))
    scheduler.submit(task(1, tokens=3))
    scheduler.turn(0.0)
    first, second = scheduler.take(RoundResult(served, Outcome(0, rows), 0.0))
    assert (first.tokens, first.ended) == ([7, 8], "stop")
    assert (second.tokens, second.ended) == ([7, 8, 9], "length")
    assert scheduler.turn(0.0).leave == [0, 1] and not scheduler.running


def test_what_was_cached_of_a_prompt_is_counted_at_its_first_admission_alone() -> None:
    scheduler, ranks = Scheduler(ROOM), Ranks(random.Random(0))
    scheduler.submit(task(0))
    ranks.turn([], scheduler.turn(0.0).join)
    (given,) = scheduler.take(replace(ranks.step(), adopted={0: 4, 9: 1}))
    given.task.epoch += 1  # preempted, and back: its own pages are no cache of others
    scheduler.take(replace(ranks.step(), adopted={0: 5}))
    assert given.task.cached == 4


@pytest.mark.parametrize("seed", range(8))
def test_random_arrivals_all_end_and_no_page_is_lost_or_lent_twice(seed: int) -> None:
    dice = random.Random(seed)
    pages = dice.choice([10, 12, 20, 40])
    room = Room(dice.randint(1, 6), 100 - K - 1, K + 1, 10, pages)
    scheduler, ranks = Scheduler(room), Ranks(dice)
    left, ended, emitted, waited = 120, dict[int, str](), dict[int, int](), 0
    wanted: dict[int, int] = {}
    while left or scheduler.num_waiting or scheduler.running or scheduler._ended:
        while left and dice.random() < 0.4:
            left -= 1
            made = task(left, dice.randint(1, 60), dice.randint(1, 60))
            made.arrived_s = float(waited)
            scheduler.submit(made)
            wanted[left] = made.max_tokens
        if dice.random() < 0.1:
            scheduler.cancel(dice.randrange(120))
        turn = scheduler.turn(0.0)
        ended |= {one.task.request_id: one.ended or "" for one in turn.ended}
        ranks.turn(turn.leave, turn.join)
        held = sum(room.pages_of(one.length) for one in scheduler.running)
        assert held + scheduler.free_pages == pages and scheduler.free_pages >= 0
        assert set(ranks.live) == {one.request_id for one in scheduler.running}
        assert ranks.live or not scheduler.num_waiting, "somebody runs while others wait"
        waited += 1
        if ranks.live:
            for given in scheduler.take(ranks.step()):
                name = given.task.request_id
                emitted[name] = emitted.get(name, 0) + len(given.tokens)
                if given.ended:
                    ended[name] = given.ended
    assert set(ended) == set(range(120)) and scheduler.free_pages == pages
    for name, reason in ended.items():
        assert reason == "cancelled" or emitted[name] == wanted[name]
