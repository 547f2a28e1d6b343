"""Several draft ranks: who grows what, who answers, and that nothing is decided by it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.rounds import Ints, Source
from mpissd.engine.comm.link import DraftEnd, LinkShape
from mpissd.engine.comm.queue_link import queue_link
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.serve import serve
from mpissd.engine.decode.share import Share
from mpissd.engine.decode.speculator import RemoteSpeculator
from mpissd.engine.spec.fanout import FanOuts, lanes_of, owners_of
from tests.loop.harness import (
    WAITER,
    CountingForwards,
    Guarded,
    Result,
    Rig,
    Scenario,
    check_against_the_law,
    drive,
)

WEIGHTS = (0.2, 0.16, 0.13, 0.1, 0.41)


def owners(fan_out: tuple[int, ...], num_drafts: int) -> Ints:
    weights = WEIGHTS if len(fan_out) == 5 else (1 / len(fan_out),) * len(fan_out)
    return owners_of(fan_out, num_drafts, weights, [0.75] * len(fan_out), 1.0)


def run_drafts(
    scenario: Scenario,
    num_drafts: int,
    fan_outs: FanOuts | None = None,
    *,
    patient: bool = False,
) -> tuple[Result, list[CountingForwards]]:
    """The scenario with D drafts in threads of their own; patient: growth is never cut short."""
    rig = Rig(scenario)
    shape = LinkShape(3, scenario.batch, scenario.K, num_drafts=num_drafts)
    links, threads, logs = [], [], []
    for index in range(num_drafts):
        own = Rig(scenario)  # a worker of its own: no stream is shared
        share = Share(index, num_drafts, lambda fan_out: owners(fan_out, num_drafts))
        policy = DraftPolicy(
            scenario.K,
            fan_outs or FanOuts(scenario.fans, scenario.fans),
            scenario.source,
            scenario.backup_tokens,
            share=share,
        )
        drafter = Drafter(own.draft_worker, policy, scenario.batch, WAITER)
        lead, draft = queue_link(shape, WAITER)
        if patient:
            _be_patient(draft, drafter)
        links.append(lead)
        logs.append(own.draft_forwards)
        threads.append(Guarded(lambda d=draft, w=drafter: serve((d, w))))  # type: ignore[misc]
    loop = rig.loop(RemoteSpeculator(*links))
    records = drive(loop, scenario)
    loop.stop()
    for thread in threads:
        thread.finish()
    return Result(rig, records), logs


def _be_patient(link: DraftEnd, drafter: Drafter) -> None:
    """Lets an outcome arrive only when nothing is left to grow."""
    arrived = link.outcome_arrived
    link.outcome_arrived = lambda: not drafter.growing and arrived()  # type: ignore[method-assign]


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(batch=1, p_hit=0.6, seed=3),
        Scenario(batch=5, p_hit=0.5, seed=4, fan_out=(2, 1, 3, 1, 2)),
        Scenario(batch=3, seed=5, fan_out=(4, 3, 2, 1, 5), backup="fast"),
        Scenario(batch=4, seed=6, p_hit=1.0),
        Scenario(batch=4, seed=7, p_hit=0.0, fan_out=(1, 1, 1, 1, 1)),
        Scenario("sd", batch=4, seed=8),
        Scenario(batch=3, seed=9, rounds=None, num_tokens=30),
    ],
)
def test_several_drafts_answer_as_one(scenario: Scenario, num_drafts: int) -> None:
    """With `finish` the rows, sources and hits are those of one draft."""
    result, logs = run_drafts(scenario, num_drafts)
    check_against_the_law(result)
    alone, _ = run_drafts(scenario, 1)
    assert result.rows.tolist() == alone.rows.tolist()
    if scenario.mode == "ssd" and scenario.p_hit != 0.0:
        assert all(log.log for log in logs), "a draft that never ran a forward"


@pytest.mark.parametrize("num_drafts", [2, 3])
def test_every_draft_grows_its_share_and_all_run_the_glue(num_drafts: int) -> None:
    scenario = Scenario(batch=2, p_hit=1.0, seed=2, fan_out=(3, 2, 2, 1, 4), rounds=10)
    _, logs = run_drafts(scenario, num_drafts, patient=True)
    glues = [sum(rows == 2 * 5 for rows, _ in log.log) for log in logs]
    assert min(glues) >= 9, glues
    branches = 2 * 12 // num_drafts
    assert all(any(rows == branches for rows, _ in log.log) for log in logs)


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_lists_after_a_hit_and_after_a_miss(num_drafts: int) -> None:
    """A list of its own behind each: hits only where that list keeps a candidate."""
    scenario = Scenario(batch=4, seed=11, rounds=40, backup_lookahead=2, fan_out=(6,) * 5)
    fan_outs = FanOuts((3, 3, 3, 3, 3), (5, 4, 6, 0, 0))
    result, _ = run_drafts(scenario, num_drafts, fan_outs)
    rows = result.rows
    law = scenario.law()
    seen = {"hit": 0, "miss": 0}
    for id_ in range(4):
        mine = rows[rows[:, 1] == id_]
        length = 1 + np.concatenate([[0], np.cumsum(mine[:, 3] + 1)])
        for before, after, n in zip(mine, mine[1:], length, strict=False):
            k, was_hit = int(before[3]), bool(before[6])
            limit = (fan_outs.after_hit if was_hit else fan_outs.after_miss)[k]
            assert bool(after[6]) == (law.rank(id_, int(n) + k) <= limit)
            seen["hit" if was_hit else "miss"] += 1
    assert min(seen.values()) > 20


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 4))
def test_lanes_are_dealt_evenly_and_the_likeliest_first(
    fan_out: list[int], num_drafts: int
) -> None:
    found = owners(tuple(fan_out), num_drafts)
    shares = np.bincount(found, minlength=num_drafts)
    assert len(found) == sum(fan_out) and shares.max() - shares.min() <= 1
    k, place = lanes_of(fan_out)
    for row in range(len(fan_out)):  # a lane is never dealt before a likelier one of its row
        assert place[k == row].tolist() == list(range(fan_out[row]))
    if sum(fan_out):
        assert shares[0] == shares.max()


def test_a_share_of_several_needs_owners() -> None:
    with pytest.raises(AssertionError, match="nobody owns a lane"):
        Share(0, 2)
    assert [Share().drafts_miss(row) for row in range(3)] == [True] * 3
    split = [Share(n, 3, lambda fan_out: owners(fan_out, 3)) for n in range(3)]
    for row, n in itertools.product(range(6), range(3)):
        assert split[n].drafts_miss(row) == (row % 3 == n)


def test_sources_are_counted_once() -> None:
    """No row is answered twice, and none by nobody: every round's sources are drafts'."""
    result, _ = run_drafts(Scenario(batch=6, p_hit=0.5, seed=12), 4)
    assert set(result.rows[:, 5].tolist()) == {Source.CACHE, Source.JIT}
