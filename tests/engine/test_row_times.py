"""How many rows of prompts go beside a verification, where a forward's true seconds are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from mpissd.engine.decode.row_times import RowTimes
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
@pytest.mark.parametrize("rows", [1, 5, 20, 100])
def test_rounds_take_at_most_30_percent_longer_on_average(
    cost: Callable[[int], float], buckets: Sequence[int], rows: int
) -> None:
    times, rounds = RowTimes(buckets), 400
    for known in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        times.add(known, cost(known))
    taken, stored = 0.0, 0
    for _ in range(rounds):
        more = times.beside(rows, 512)
        times.add(rows + more, cost(padded(rows + more, buckets)))
        taken += cost(padded(rows + more, buckets))
        stored += more
    own = rounds * cost(padded(rows, buckets))
    assert taken <= 1.31 * own
    free = 0.3 * own  # what may be spent, at the price of the largest forward
    assert stored * cost(512) / 512 >= 0.5 * free


def test_prompts_alone_fill_the_largest_forward() -> None:
    times = RowTimes()
    assert times.beside(0, 128) == 128
    times.add(4, 1.0)
    assert times.beside(0, 128) == 128


def test_seconds_lie_on_lines_between_what_was_measured() -> None:
    times = RowTimes()
    assert times.seconds(7) == 0.0
    times.add(10, 2.0)
    assert times.seconds(5) == 2.0 and times.seconds(20) == 4.0
    times.add(20, 3.0)
    assert (times.seconds(15), times.seconds(40)) == (2.5, 5.0)
    times.add(30, 2.0)  # a slow sample below it: more rows take no less
    assert times.seconds(60) == 3.0
