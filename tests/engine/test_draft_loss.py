"""A draft that is lost: while rounds have no drafting, while a message to it or from it is awaited,
and while the distributions of a sampled round are on their way. The switch of a draft's client, in
virtual time: an engine whose steps cost what a test sets."""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.rounds import Control, Outcome, Request, Speculation
from mpissd.common.wait import Overdue, Waiter
from mpissd.engine.features.draft_client import DraftSwitch
from mpissd.engine.features.draft_loss import ARFallback, LossWaiter, PeerLost

ASKED = Outcome.admission(-1, [Request(0)])


class Link:
    """A link to a draft that answers `answers` rounds, and never sends distributions."""

    lookahead, vocab = 4, 8

    def __init__(
        self, is_lost: Callable[[], bool], answers: int = 0, sampled: bool = False, q: float = 0.5
    ) -> None:
        self.waiter = LossWaiter(Waiter(9.0, spin=False), is_lost)
        self.sent, self.answers, self.sampled, self.q = 0, answers, sampled, q
        self.proposed, self.blocked = False, False  # distributions have arrived; sends block

    def branches(self, round_: int) -> None:
        return None

    def send_outcome(self, outcome: Outcome, stop: bool = False, taken: int | None = None) -> None:
        self.waiter.until(lambda: not self.blocked, "send")
        self.sent += 1

    def speculation(self, round_: int, count: int, find: object) -> Speculation:
        self.waiter.until(lambda: self.answers > 0, "draft: speculation")
        self.answers -= 1
        found = Speculation.empty(round_, count, self.lookahead, sampled=self.sampled)
        found.num_draft[:] = 2
        if self.sampled:
            found.q[:] = self.q
        return found

    def wait_for_proposals(self) -> None:
        self.waiter.until(lambda: self.proposed, "draft: proposals")

    def proposals(self, round_: int, count: int) -> NDArray[np.float32]:
        self.wait_for_proposals()
        return np.full((count, self.vocab), 1 / self.vocab, np.float32)

    def skip_proposals(self, round_: int, count: int) -> None:
        self.wait_for_proposals()


class Loss:
    """Whether the draft is gone; `looks`: the number of calls after which it is."""

    def __init__(self) -> None:
        self.looks: int | None = None

    def __call__(self) -> bool:
        if self.looks is not None:
            self.looks -= 1
        return self.looks is not None and self.looks <= 0


def pair(**told: object) -> tuple[ARFallback, Link, Loss]:
    loss = Loss()
    link = Link(loss, **told)  # type: ignore[arg-type]
    return ARFallback(link, loss), link, loss  # type: ignore[arg-type]


def asked(speculator: ARFallback, round_: int, lookahead: int = 4) -> Speculation:
    ASKED.control = Control(lookahead)
    speculator.ask(ASKED)
    return speculator.answer(round_, 1)


@pytest.mark.parametrize("lookahead", [0, 4])
def test_the_first_round_behind_a_loss_notes_it(lookahead: int) -> None:
    speculator, link, loss = pair()
    assert not asked(speculator, 0, 0).num_draft.any() and speculator.lost_round is None
    loss.looks = 0
    for round_ in (1, 2):
        assert not asked(speculator, round_, lookahead).num_draft.any()
        assert speculator.lost_round == 1 and link.sent == 1


def test_a_draft_that_dies_while_its_answer_is_awaited_is_noted_in_that_round() -> None:
    speculator, link, loss = pair(answers=1)
    assert asked(speculator, 0).num_draft.all()
    loss.looks = 5
    assert not asked(speculator, 1).num_draft.any()
    assert speculator.lost_round == 1 and link.sent == 2


def test_a_message_that_the_dead_draft_no_longer_takes_holds_up_nobody() -> None:
    speculator, link, loss = pair(answers=9)
    asked(speculator, 0)
    link.blocked, loss.looks = True, 5
    assert not asked(speculator, 1).num_draft.any() and speculator.lost_round == 1
    speculator.stop(ASKED)
    again, link, loss = pair(answers=9)
    asked(again, 0)
    link.blocked, loss.looks = True, 5
    again.stop(Outcome(7, ASKED.rows))
    assert again.lost_round == 8


def test_a_sampled_round_is_judged_once_its_distributions_are_there_or_not_at_all() -> None:
    speculator, link, loss = pair(answers=9, sampled=True)
    link.proposed = True
    assert speculator.confirm(asked(speculator, 0))
    served = asked(speculator, 1)
    link.proposed, loss.looks = False, 5
    assert not speculator.confirm(served), "whatever is accepted in this round"
    assert not asked(speculator, 2).num_draft.any() and speculator.lost_round == 2
    assert speculator.confirm(served)


K, PLAIN_S = 3, 0.02  # tokens of a draft; seconds of a step without drafts


class Draft(NamedTuple):
    """stretch: of a step that verifies. wait_s: of two in five questions. alpha: acceptance."""

    stretch: float
    wait_s: float
    alpha: float


GOOD = Draft(1.1, 0.02, 0.7)


class Engine:
    """Decodes without end; after each 100 steps its rows are others, and it has paused."""

    def __init__(self, rows: int, switch: DraftSwitch) -> None:
        self.rows, self.switch, self.rng = rows, switch, random.Random(1)
        self.now_s, self.length, self.added = 0.0, 0, rows

    def decode(self, steps: int, draft: Draft) -> tuple[float, float]:
        """Returns the share of steps with drafts, and a token's cost, 1 without drafts."""
        busy_s, tokens, asked = 0.0, 0, 0
        for step in range(steps):
            if step % 100 == 0:
                self.now_s += 30.0
                self.length = self.rng.randrange(1000, 9000)
            step_s = PLAIN_S * self.rng.choice([0.8, 1.0, 1.2])
            seen = self.now_s, self.rows, self.length, self.added
            self.added = self.rows
            if self.switch.choose(*seen, possible=True):
                asked += 1
                step_s = step_s * draft.stretch + self.rng.choice([0, 0, 0, 1, 1]) * draft.wait_s
                luck = [
                    [self.rng.random() < draft.alpha for _ in range(K)] for _ in range(self.rows)
                ]
                self.added += sum([*own, False].index(False) for own in luck)
            busy_s, tokens = busy_s + step_s, tokens + self.added
            self.now_s, self.length = self.now_s + step_s, self.length + self.added
        return asked / steps, busy_s / tokens * self.rows / PLAIN_S


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("draft", [GOOD, Draft(1, 0, 0.9), Draft(1.2, 0.02, 0.65)])
def test_a_draft_that_pays_is_asked(rows: int, draft: Draft) -> None:
    share, cost = Engine(rows, DraftSwitch()).decode(6000, draft)
    assert share >= 0.95 and cost < 0.8


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("draft", [Draft(1.1, 0, 0), Draft(1, 0.2, 0.7), Draft(4, 0, 0.7)])
def test_one_that_costs_more_than_it_saves_is_not(rows: int, draft: Draft) -> None:
    share, cost = Engine(rows, DraftSwitch()).decode(6000, draft)
    assert share < 0.2 and cost < 1.02


def test_a_change_is_followed() -> None:
    engine = Engine(4, DraftSwitch())
    for draft, low, high in 2 * [(GOOD, 0.9, 1.0), (GOOD._replace(alpha=0.0), 0.0, 0.1)]:
        engine.decode(3000, draft)
        assert low <= engine.decode(3000, draft)[0] <= high


def test_each_load_has_its_own() -> None:
    engine = Engine(1, DraftSwitch())
    for _ in range(40):
        engine.rows = 1
        one = engine.decode(100, GOOD)
        engine.rows = 8
        many = engine.decode(100, Draft(3.0, 0.0, 0.6))
    assert one[0] == 1 and many[0] == 0


def test_a_draft_that_does_not_answer_is_reported_once() -> None:
    reports: list[str] = []
    waiter = LossWaiter(Waiter(2.0, spin=False), lambda: False, reports.append)
    with pytest.raises(Overdue, match="speculation"):
        waiter.until(lambda: False, "speculation")
    waiter = LossWaiter(Waiter(2.0, spin=False), lambda: len(reports) > 1, reports.append)
    with pytest.raises(PeerLost, match="proposals"):
        waiter.until(lambda: False, "proposals")
    assert reports == ["speculation", "proposals"]
