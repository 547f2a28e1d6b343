"""What a learner is told of a round: when, and with which logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mpissd.common.rounds import Batch, Ints, Outcome, Request
from tests.loop.harness import Scenario
from tests.loop.test_target import Server


def noted(events: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes its name down before it does what `call` does."""

    def wrapped(*args: Any, **told: Any) -> Any:
        events.append(name)
        return call(*args, **told)

    return wrapped


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_round_is_taught_behind_the_outcome_that_it_led_to(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the draft works meanwhile; and before anything of the next round changes the batch."""
    server, events = Server(Scenario(mode, batch=2, lookahead=3)), list[str]()
    loop, told = server.loop, list[tuple[Ints, Ints]]()
    for owner, names in ((loop._speculator, ["ask", "answer"]), (loop._worker, ["enter"])):
        for name in names:
            monkeypatch.setattr(owner, name, noted(events, name, getattr(owner, name)))

    def teach(batch: Batch, accepted: Ints, bonus: Ints) -> None:
        told.append((accepted, bonus))

    loop.teach = noted(events, "teach", teach)
    loop.admit([Request(0), Request(1)])
    outcomes: list[Outcome] = [server.step().outcome for _ in range(4)]
    assert events == ["ask", "enter", "answer", *["ask", "teach", "enter", "answer"] * 3]
    loop.tell()  # the last round, whose outcome no draft needs
    loop.tell()
    assert events[-1] == "teach" and len(told) == 4
    for (accepted, bonus), outcome in zip(told, outcomes, strict=True):
        assert outcome.rows[:, 3].tolist() == accepted.tolist()
        assert outcome.rows[:, 4].tolist() == bonus.tolist()
