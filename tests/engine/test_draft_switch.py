"""The switch of a draft's client, in virtual time: an engine whose steps cost what a test sets."""

import random
from typing import NamedTuple

import pytest

from mpissd.engine.comm.draft_client import DraftSwitch

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
