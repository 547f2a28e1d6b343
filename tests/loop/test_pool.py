"""Target groups that share a draft decode the same as each with a draft of its own, and wait for it
while others keep it busy: for one forward at most.

That time is counted in the draft's forwards. Each group's next outcome is due a drawn number of
forwards after its last answer: during the others' glues, growth and answers.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.rounds import Ints, Outcome, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.features.pool import GroupWaiter, SharedForwards, serve_groups
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.round.draft import Drafter, DraftPolicy
from mpissd.engine.round.rows import DraftWorker
from tests.loop.harness import WAITER, Rig, Scenario
from tests.loop.pool_rig import Pool, config_of, decided
from tests.loop.test_draft import ScriptedEnd
from tests.text_config import PROMPTS, finished, text_config
from tests.tiny_pair import TinyPair

ROUNDS = 12
NULL = {"pair": "toy", "backend": "emulated", "device": "null"}
GEMM = {**NULL, "workload": "gemm", "seed": 3}
MARKOV = "vocab=12 order=2 prompt_tokens=3 divergence=0.35".split()
MARKOV_FLAGS = {**NULL, "workload": "markov", **dict(flag.split("=") for flag in MARKOV)}


Decisions = dict[int, list[tuple[int, ...]]]


def alone(flags: dict[str, Any]) -> Decisions:
    """The decisions of one group that has all sequences in one batch."""
    batch = int(flags.get("groups", 1)) * int(flags["batch_size"])
    one = config_of(**{**flags, "groups": 1, "batch_size": batch})
    return decided(finished(one, ROUNDS).records)


def together(
    config: RunConfig, order: Sequence[int], rounds: int = ROUNDS
) -> tuple[Decisions, dict[int, list[int]]]:
    """The decisions and the tokens of all groups, which ask in this order."""
    found, tokens = Decisions(), dict[int, list[int]]()
    with Pool(config) as pool:
        pool.decode(order, rounds)
    for number, group in enumerate(pool.groups):
        mine, share = decided(group.records), pool.job.workload.share(number)
        assert set(mine) <= set(share), "a group decodes its own sequences alone"
        found |= mine
        tokens |= group.records.tokens()
    return found, tokens


CASES: dict[str, dict[str, Any]] = {
    "ssd": {**GEMM, "groups": 2, "batch_size": 2},
    "sd": {**GEMM, "groups": 3, "batch_size": 1, "mode": "sd"},
    "fast": {**GEMM, "groups": 2, "batch_size": 2, "backup": "fast"},
    "markov": {**MARKOV_FLAGS, "groups": 2, "batch_size": 2, "temperature": 0},
    "markov, drawn": {**MARKOV_FLAGS, "groups": 3, "batch_size": 1, "temperature": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_groups_decide_what_one_batch_of_them_decides(name: str) -> None:
    """In whatever order they ask."""
    flags = CASES[name]
    order = 1, 0, 0, 1, *range(flags["groups"])
    assert together(config_of(**flags), order)[0] == alone(flags)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("groups", [2, 3])
def test_groups_answer_prompts_as_one_does(pair: TinyPair, groups: int, temperature: float) -> None:
    """Bit for bit: tokens, outcomes and hits, with more prompts than places."""
    told = {"prompt_ids": PROMPTS, "num_tokens": 20, "temperature": temperature}
    flags = {**told, "fan_out": "uniform:2", "lookahead": 3, "seed": 5}
    decoder = finished(text_config(pair, **flags, batch_size=5))
    several = text_config(pair, **flags, batch_size=1, groups=groups)
    assert together(several, range(groups), 10**6) == (decided(decoder.records), decoder.tokens)


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_group_that_leaves_early_leaves_the_others_their_draft(leaver: int) -> None:
    flags = {**GEMM, "groups": 3, "batch_size": 1}
    with Pool(config_of(**flags)) as pool:
        pool.decode((0, 1, 2), 3)
        pool.groups[leaver].stop()
        pool.decode((2, 1, 0), ROUNDS)
    wanted = alone(flags)
    for number, group in enumerate(pool.groups):
        rounds = 3 if number == leaver else ROUNDS
        assert decided(group.records)[number] == wanted[number][:rounds]


def test_groups_stop_in_any_order_even_before_they_began() -> None:
    with Pool(config_of(**{**GEMM, "groups": 3, "batch_size": 1})) as pool:
        for number in (2, 0, 1):
            pool.groups[number].stop()
    assert all(group.is_stopped for group in pool.groups)  # and the draft loop has ended


K, WAITS = 4, 30
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
        self.backend = NumpyBackend()

    def advance(self, time: float, *, running: bool = False) -> None:
        self.now += time
        for end in self.ends:
            if end.ready_at is None and self.now >= end.due:
                end.ready_at = self.begun - running

    def upload(self, rows: int, tokens: Ints, places: None, *, lists: bool) -> None:
        assert len(tokens) <= rows

    def launch(self) -> None:
        windows = [group._window for group in self.shared.groups]
        self.carried.append({n for n, rows in enumerate(windows) if rows.stop > rows.start})
        self.begun += 1
        self.advance(1, running=True)

    def wait(self, waiter: Waiter) -> None:
        for group in self.shared.groups:
            group._window = slice(0, 0)

    def elapsed_s(self) -> float:
        return 1e-3


class DueEnd(ScriptedEnd):
    """A group's link: its outcome arrives when the clock says that it is due.

    waits: of each outcome, the forwards that had begun when it was due, and when it was answered.
    """

    ready_at: int | None = None

    def __init__(
        self, scenario: Scenario, clock: Clock, dice: random.Random, waiter: Waiter
    ) -> None:
        super().__init__(scenario, WAITS, 0)
        self.waiter = waiter
        self.clock, self.dice, self.due = clock, dice, dice.uniform(0, 5)
        self.waits: list[tuple[int, int]] = []
        clock.ends.append(self)

    def outcome(self, round_: int | None = None) -> tuple[Outcome, bool]:
        self.waiter.until(self.outcome_arrived, "outcome")
        return super().outcome(round_)

    def outcome_arrived(self) -> bool:
        self.clock.advance(0.01)
        return self.ready_at is not None

    def send_speculation(self, speculation: Speculation) -> None:
        super().send_speculation(speculation)
        self.waits.append((self.ready_at, self.clock.begun))
        self.due, self.ready_at = self.clock.now + self.dice.choice(DUE), None
        self.clock.advance(0)


@pytest.mark.parametrize(("groups", "seed"), [(1, 0), (2, 1), (3, 2), (8, 0)])
@pytest.mark.parametrize("p_hit", [0.0, 0.6, 1.0])
def test_no_group_waits_longer_than_one_forward(groups: int, p_hit: float, seed: int) -> None:
    clock, dice, served = Clock(groups, MIXED.batch), random.Random(seed), []
    for number, part in enumerate(clock.shared.groups):
        rig = Rig(replace(MIXED, p_hit=p_hit, seed=MIXED.seed + number))
        fans = FanOuts(rig.scenario.fans, rig.scenario.fans)
        worker = DraftWorker(part, rig.draft_worker.oracle)
        policy = DraftPolicy(K, fans, rig.scenario.source, K)
        waiter = GroupWaiter(30.0)
        end = DueEnd(rig.scenario, clock, dice, waiter)
        served.append((end, Drafter(worker, policy, MIXED.batch, waiter)))
    serve_groups(served, clock.shared, WAITER)
    for group, end in enumerate(clock.ends):
        assert len(end.sent) == len(end.waits) == WAITS
        for ready, answered in end.waits:
            # One forward runs or is prepared when the outcome comes; all others have rows for it.
            after = clock.carried[ready:answered]
            assert all(group in carried for carried in after[1:]), (ready, answered, after)
            assert len(after) <= K + 2  # that one, a glue that was due, the K steps of the answer
