"""Waiting: returns when it may, gives the core away, and gives up at the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from mpissd.common.errors import FaultError
from mpissd.common.wait import Waiter


def after(polls: int) -> tuple[Callable[[], bool], list[int]]:
    """A test that is true from its n-th call on, and the calls so far."""
    calls = [0]

    def test() -> bool:
        calls[0] += 1
        return calls[0] > polls

    return test, calls


@pytest.mark.parametrize("spin", [True, False])
@pytest.mark.parametrize("polls", [0, 1, 5, 200])
def test_a_wait_ends_with_its_test(spin: bool, polls: int) -> None:
    test, calls = after(polls)
    Waiter(60.0, spin).until(test, "peer")
    assert calls[0] == polls + 1  # and does not ask again


@pytest.mark.parametrize("spin", [True, False])
def test_a_deadline_ends_a_wait_and_names_what_did_not_come(spin: bool) -> None:
    start = time.perf_counter()
    with pytest.raises(FaultError, match=r"draft: speculation: nothing for 0\.\d+ s"):
        Waiter(0.1, spin).until(lambda: False, "draft: speculation")
    assert time.perf_counter() - start >= 0.1


@pytest.mark.parametrize("spin", [True, False])
def test_a_sleep_lasts_until_its_end_and_sleeps(spin: bool) -> None:
    waiter = Waiter(60.0, spin)
    for span in (0.0, 1e-5, 1e-3, 0.1):
        before, end = time.thread_time(), time.perf_counter() + span
        waiter.sleep_until(end)
        assert time.perf_counter() >= end
    assert time.thread_time() - before < 0.05  # of the last one's 0.1 s


@pytest.mark.parametrize("spin", [True, False])
def test_a_long_wait_asks_whether_it_is_in_vain(spin: bool) -> None:
    """As NCCL's asynchronous errors: nobody comes, long before the deadline."""
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
