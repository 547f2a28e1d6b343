"""The draft, forward by forward: the rows it runs, for which sequences, and the rows it skips.

The draft shares the lead's thread here, so that it grows exactly as many steps as a test sets.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.rounds import Event, Outcome, Speculation
from mpissd.common.trace import DraftLog
from mpissd.engine.comm.link import DraftEnd
from mpissd.engine.round.draft import serve
from tests.loop.harness import Forward, Rig, Scenario, check_against_the_law, requests, run_stepped

K = 4
MIXED = Scenario("ssd", batch=6, lookahead=K, p_hit=0.5, rounds=12, seed=5, fan_out=(2, 1, 3, 1, 2))


def sizes(forwards: Iterable[tuple[int, list[int]]]) -> list[int]:
    return [rows for rows, _ in forwards]


@pytest.mark.parametrize("backup_lookahead", [None, 2])
@pytest.mark.parametrize("backup", ["jit", "fast"])
@pytest.mark.parametrize("steps", [0, 2, K + 1])
def test_an_answer_drafts_what_lacks(steps: int, backup: str, backup_lookahead: int | None) -> None:
    """Hits are pruned to their lane and finished, misses start over, in shared forwards; growth is
    a forward of all served tokens, and steps over all branches."""
    scenario = replace(MIXED, backup=backup, backup_lookahead=backup_lookahead)
    result, draft = run_stepped(scenario, steps)
    check_against_the_law(result)
    grown, mixed = min(steps, K), 0
    glue, branches = MIXED.batch * (K + 1), MIXED.batch * sum(MIXED.fans)
    assert all(sizes(forwards) == [glue] + [branches] * grown for forwards in draft.grown)
    assert len(draft.answered) == len(result.records)
    for round_, forwards in enumerate(draft.answered):
        rows = result.rows[result.rows[:, 0] == round_]
        hits = int(rows[:, 6].sum())
        misses = len(rows) - hits
        mixed += 0 < hits < len(rows)
        late = K - grown
        again = scenario.backup_tokens if backup == "jit" else 0
        want = [
            hits * (step < late) + misses * (step < again)
            for step in range(max(late * bool(hits), again * bool(misses)))
        ]
        assert sizes(forwards) == want
    assert mixed > 3, "no round with hits and misses: choose another seed"


def test_an_outcome_of_another_round_finds_nothing() -> None:
    """The keys are right in all but the round: a cache that ignores it would hit."""
    rig = Rig(replace(MIXED, p_hit=1.0, batch=1))
    first = rig.drafter.answer(Outcome.admission(-1, requests(1)))
    rig.drafter.begin_growth(first)
    law, drafts = rig.scenario.law(), first.tokens[0].tolist()
    k, bonus = law.judge(0, 1, drafts)
    row = np.array([[0, 0, Event.COMMIT, k, bonus]], np.int32)
    late = rig.drafter.answer(Outcome(7, row))
    assert (late.round, late.hit.tolist()) == (8, [0])


class ScriptedEnd(DraftEnd):
    """A link that gives the imposed model's outcomes, each after `polls` polls of the growth."""

    def __init__(self, scenario: Scenario, rounds: int, polls: int) -> None:
        self.scenario, self.rounds, self.polls = scenario, rounds, polls
        self.law, self.length = scenario.law(), dict.fromkeys(range(scenario.batch), 1)
        self.sent: list[Speculation] = []
        self.polled = 0
        self.log: list[Forward] = []
        self.polled_at: set[int] = set()  # how many forwards had run when it was polled

    def outcome(self, round_: int | None = None) -> tuple[Outcome, bool]:
        self.polled = 0
        if not self.sent:
            return Outcome.admission(-1, requests(self.scenario.batch)), False
        last, rows = self.sent[-1], []
        for id_, count in enumerate(last.num_draft.tolist()):
            k, bonus = self.law.judge(id_, self.length[id_], last.tokens[id_, :count].tolist())
            self.length[id_] += k + 1
            rows.append((id_, 0, Event.COMMIT, k, bonus))
        stop = len(self.sent) == self.rounds
        if stop:
            rows = [(id_, 0, Event.RELEASE, k, bonus) for id_, _, _, k, bonus in rows]
        return Outcome(last.round, np.array(rows, np.int32)), stop

    def outcome_arrived(self) -> bool:
        self.polled += 1
        self.polled_at.add(len(self.log))
        return self.polled > self.polls

    def send_speculation(self, speculation: Speculation) -> None:
        self.sent.append(speculation)


@pytest.mark.parametrize("polls", [0, 1, K - 1, K, 99])
@pytest.mark.parametrize("p_hit", [0.0, 1.0])
def test_growth_ends_when_the_outcome_is_there(p_hit: float, polls: int) -> None:
    """A miss aborts it: the remaining steps are never grown."""
    rig = Rig(replace(MIXED, p_hit=p_hit))
    link, log = ScriptedEnd(rig.scenario, 5, polls), rig.draft_forwards.log
    link.log = log
    serve(link, rig.drafter)
    assert len(link.sent) == 5  # the outcome with the stop flag is not answered
    branches, glue = 6 * sum(MIXED.fans), 6 * (K + 1)
    steps = min(polls, K)
    answer = [6] * K if p_hit == 0 else [6] * (K - steps)
    one = [glue] + [branches] * steps
    assert sizes(log) == [6] * K + one + 4 * (answer + one)
    # Polled before each step: an outcome waits for one step at most.
    assert {n for n, rows in enumerate(sizes(log)) if rows == branches} <= link.polled_at


def test_the_draft_s_own_times() -> None:
    """t_draft: rounds in which all missed and K tokens were drafted; t_growth: to its end."""
    columns = {name: n for n, name in enumerate(DraftLog.COLUMNS)}

    def table(scenario: Scenario, steps: int) -> NDArray[Any]:
        return run_stepped(scenario, steps)[0].rig.drafter.log.table(0, 99)

    mixed = table(MIXED, K)
    num_jit = mixed[:, columns["num_jit"]]
    assert mixed[:, columns["round"]].tolist() == list(range(12))
    assert num_jit[0] == 6 and num_jit[1:].max() > 0 and num_jit.min() < 6
    assert (np.isfinite(mixed[:, columns["t_draft_s"]]) == (num_jit == 6)).all()
    assert np.isfinite(mixed[:, columns["t_growth_s"]]).all()
    assert not np.isfinite(table(MIXED, K - 1)[:, columns["t_growth_s"]]).any()
    for scenario in (replace(MIXED, backup_lookahead=2), replace(MIXED, backup="fast")):
        assert not np.isfinite(table(scenario, K)[:, columns["t_draft_s"]]).any()
    late = table(replace(MIXED, p_hit=1.0), 3)[:, columns["steps_ready"]]
    assert late.tolist() == [0, *[3] * 11]
