"""Waiting: returns when it may, gives the core away, and gives up at the deadline. The ledger:
exclusive phases that add up to the round."""

import time
from collections.abc import Iterator

import pytest

from mpissd.common import trace
from mpissd.common.errors import FaultError
from mpissd.common.trace import LeadPhase, Ledger
from mpissd.common.wait import Waiter


@pytest.mark.parametrize("spin", [True, False])
def test_a_deadline_ends_a_wait_and_names_what_did_not_come(spin: bool) -> None:
    start = time.perf_counter()
    with pytest.raises(FaultError, match=r"draft: speculation: nothing for 0\.\d+ s"):
        Waiter(0.1, spin).until(lambda: False, "draft: speculation")
    assert time.perf_counter() - start >= 0.1


@pytest.mark.parametrize("spin", [True, False])
def test_a_long_wait_asks_whether_it_is_in_vain(spin: bool) -> None:
    """As NCCL's asynchronous errors: the wait ends long before the deadline."""
    waiter, asked = Waiter(60.0, spin), []

    def alarm() -> None:
        asked.append(time.perf_counter())
        if len(asked) == 2:
            raise FaultError("NCCL on rank 0: unhandled system error")

    waiter.alarm = alarm
    start = time.perf_counter()
    with pytest.raises(FaultError, match="unhandled system error"):
        waiter.until(lambda: False, "forward")
    assert asked[0] - start > 0.19 and asked[1] - asked[0] > 0.19


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
