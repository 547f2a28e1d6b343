"""The ledger: exclusive phases that add up to the round."""

from collections.abc import Iterator

import pytest

from mpissd.common import trace
from mpissd.common.trace import LeadPhase, Ledger


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
