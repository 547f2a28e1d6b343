"""A draft that is lost while rounds have no drafting, which nobody waits for."""

from __future__ import annotations

import pytest

from mpissd.common.rounds import Control, Outcome, Request
from mpissd.engine.decode.outliving import OutlivingSpeculator


class Link:
    """A link to a draft that never answers."""

    lookahead, sampled, vocab = 4, False, 0

    def __init__(self) -> None:
        self.sent, self.waiter = 0, self

    def send_outcome(self, outcome: Outcome, stop: bool = False) -> None:
        self.sent += 1

    def arrived(self) -> bool:
        return False

    def until(self, is_true: object, what: str) -> None:
        assert callable(is_true) and is_true(), f"waits for ever: {what}"


@pytest.mark.parametrize("lookahead", [0, 4])
def test_the_first_round_behind_a_loss_notes_it(lookahead: int) -> None:
    link, lost = Link(), False
    speculator = OutlivingSpeculator(link, lambda: lost)  # type: ignore[arg-type]
    outcome = Outcome.admission(-1, [Request(0)])
    outcome.control = Control(0)
    speculator.ask(outcome)
    assert not speculator.answer(0, 1).num_draft.any() and speculator.lost_round is None
    lost = True
    outcome.control = Control(lookahead)
    for round_ in (1, 2):
        speculator.ask(outcome)
        assert not speculator.answer(round_, 1).num_draft.any()
        assert speculator.lost_round == 1 and link.sent == 1
