"""How many rows of prompts go with a verification if a forward's true seconds are known."""

import math
from collections.abc import Callable, Sequence

import pytest

from mpissd.engine.decode.goodput import ForwardTimes
from mpissd.engine.job import fine_buckets


def bandwidth(rows: int) -> float:
    """A forward that reads weights, and computes once there are many rows."""
    return max(10.0, 0.05 * rows)


def linear(rows: int) -> float:
    return 4.0 + rows


def buckets_of_two(rows: int) -> float:
    return linear(1 << math.ceil(math.log2(rows)))


def padded(rows: int, buckets: Sequence[int]) -> int:
    return next((n for n in buckets if n >= rows), rows)


CASES = [
    (bandwidth, []),
    (linear, []),
    (linear, fine_buckets(512)),
    (buckets_of_two, [1 << n for n in range(10)]),
]


@pytest.mark.parametrize(("cost", "buckets"), CASES)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_nine_rounds_in_ten_take_at_most_30_percent_longer(
    cost: Callable[[int], float], buckets: Sequence[int], rows: int
) -> None:
    times, own_s = known(cost, buckets), cost(padded(rows, buckets))
    stored = [times.prefill_rows(rows, 512) for _ in range(400)]
    growth = [cost(padded(rows + more, buckets)) / own_s - 1 for more in stored]
    assert sorted(growth)[int(0.9 * len(growth))] <= 0.3 + 1e-9
    assert max(growth) <= 1.0
    assert sum(stored) >= 400 / 11  # no prompt waits for ever


def known(cost: Callable[[int], float], buckets: Sequence[int]) -> ForwardTimes:
    times = ForwardTimes(buckets)
    for rows in buckets or (1, 2, 4, 8, 16, 32, 64, 128, 200, 256, 512):
        times.add(rows, cost(rows))
    return times


def steps_of_six(rows: int) -> float:
    """A CPU's forward, whose kernel takes six rows at a time."""
    return 9.0 * math.ceil(rows / 6)


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    """SmolLM2's forward of 6 rows takes 9.5 ms; one of 16.8 made a server of AR speed leave it."""
    times = ForwardTimes()
    for rows in 4 * [1, 2, 3, 4, 5, 10, 20, 40]:
        times.add(rows, steps_of_six(rows))
    times.add(6, 16.8)
    assert times.seconds(6) < 11
    for _ in range(20):
        rows = 2 + times.prefill_rows(2, 40)
        times.add(rows, steps_of_six(rows))
    assert times.seconds(6) == pytest.approx(9.0) and times.room(2, 40) == 4


@pytest.mark.parametrize("place", range(4))
def test_one_delayed_forward_of_a_warm_up_changes_little(place: int) -> None:
    times, seconds = ForwardTimes(), [15.0] * 4
    seconds[place] = 80.0
    for one in seconds:
        times.add(10, one)
    assert times.seconds(10) <= 17
