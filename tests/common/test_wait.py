"""Waiting: returns when it may, gives the core away, and gives up at the deadline."""

import time

import pytest

from mpissd.common.errors import FaultError
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
