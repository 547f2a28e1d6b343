"""The ledger: exclusive phases that add up to the round, to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpissd.common import trace
from mpissd.common.trace import DraftPhase, LeadPhase, Ledger


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A clock that reads 0, then each number given."""
    times = [0]
    monkeypatch.setattr(trace, "perf_counter_ns", lambda: times.pop(0))
    yield times


def test_a_phase_is_the_time_since_the_last_mark(clock: list[int]) -> None:
    ledger = Ledger(LeadPhase)
    clock += [5, 7, 20, 50, 51, 100]
    ledger.restart()
    ledger.mark(LeadPhase.SEND)
    ledger.mark(LeadPhase.LAUNCH)
    ledger.mark(LeadPhase.SEND)  # again: summed
    ledger.close_round(3, LeadPhase.RECORD)
    ledger.close_round(4, LeadPhase.RECORD)  # begins where the last one ended
    table = ledger.table(0, 9).tolist()
    assert [dict(zip(["round", "wall", *ledger.names], row, strict=True)) for row in table] == [
        {**dict.fromkeys(ledger.names, 0), "round": 3, "wall": 46, "send": 32, "launch": 13}
        | {"record": 1},
        {**dict.fromkeys(ledger.names, 0), "round": 4, "wall": 49, "record": 49},
    ]


@pytest.mark.parametrize("phases", [LeadPhase, DraftPhase])
def test_rounds_close_against_the_real_clock(phases: type[LeadPhase] | type[DraftPhase]) -> None:
    ledger = Ledger(phases)
    for round_ in range(20):
        for phase in phases:
            ledger.mark(phase)
        ledger.close_round(round_, len(phases) - 1)
    table = ledger.table(0, 20)
    assert (table[:, 1] == table[:, 2:].sum(axis=1)).all()
    assert (table[:, 1] > 0).all()


def test_a_restart_forgets_what_came_before(clock: list[int]) -> None:
    ledger = Ledger(DraftPhase)
    clock += [50, 60, 61, 65, 66, 68]
    ledger.mark(DraftPhase.COMMIT)
    ledger.restart()
    ledger.close_round(0, DraftPhase.WAIT)
    ledger.mark(DraftPhase.GLUE)
    ledger.restart()  # a round that was begun is begun again
    ledger.close_round(1, DraftPhase.WAIT)
    nothing = [0] * (len(DraftPhase) - 1)
    assert ledger.table(0, 2).tolist() == [[0, 1, 1, *nothing], [1, 2, 2, *nothing]]


def test_a_table_is_of_the_rounds_asked_for() -> None:
    ledger = Ledger(LeadPhase)
    assert ledger.table(0, 5).shape == (0, 2 + len(LeadPhase))
    for round_ in range(5):
        ledger.close_round(round_, LeadPhase.RECORD)
    assert ledger.table(1, 3)[:, 0].tolist() == [1, 2]
