"""The closed network against a Markov chain solved outright, and the shared draft at its limits."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from mpissd.lab.pools.queueing import Shared, SharedDraft, closed_network, shared_draft

from mpissd.common.errors import ConfigError


def chain(away_s: float, turns: float, frame_s: Sequence[float]) -> np.ndarray:
    """P(n seated), from the generator of the chain with exponential delays and visits."""
    count = len(frame_s)
    rates = np.zeros((count + 1, count + 1))
    for n in range(count):
        rates[n, n + 1] = (count - n) / away_s
        rates[n + 1, n] = (n + 1) / (turns * frame_s[n])
    rates -= np.diag(rates.sum(axis=1))
    system = np.vstack([rates.T, np.ones(count + 1)])
    return np.linalg.lstsq(system, np.array([*(0.0,) * (count + 1), 1.0]), rcond=None)[0]


@pytest.mark.parametrize("seed", range(12))
def test_the_product_form_is_that_of_the_chain(seed: int) -> None:
    rnd = random.Random(seed)
    frames = [rnd.uniform(0.2, 3) for _ in range(rnd.randint(1, 9))]
    away, turns = rnd.uniform(0.1, 20), rnd.uniform(0.3, 9)
    network = closed_network(away, turns, frames)
    expected = chain(away, turns, frames)
    assert network.share == pytest.approx(expected, abs=1e-9)
    # Little's law, twice: customers over cycles is throughput, at the server and all together.
    rate = len(frames) / network.cycle_s
    assert network.seated == pytest.approx(rate * network.visit_s)
    assert network.cycle_s == pytest.approx(away + network.visit_s)


def test_equal_frames_are_independent_customers() -> None:
    network = closed_network(3.0, 2.0, [0.5] * 6)
    share = 1 / (3 + 1)  # of a customer's time at the server
    wanted = [math.comb(6, n) * share**n * (1 - share) ** (6 - n) for n in range(7)]
    assert network.share == pytest.approx(wanted)
    assert (network.visit_s, network.busy) == pytest.approx((1.0, 1 - 0.75**6))


def test_without_a_delay_all_are_seated_and_a_thousand_customers_do_not_overflow() -> None:
    assert closed_network(0.0, 4.0, [1.0, 3.0]).share == (0.0, 0.0, 1.0)
    assert closed_network(0.0, 4.0, [1.0, 3.0]).cycle_s == 12
    crowd = closed_network(30.0, 8.0, [0.7 + 0.01 * n for n in range(1, 1001)])
    assert math.fsum(crowd.share) == pytest.approx(1) and math.isfinite(crowd.cycle_s)


@pytest.mark.parametrize(
    ("away", "turns", "frames"),
    [(-1.0, 1.0, [1.0]), (1.0, 0.0, [1.0]), (1.0, 1.0, []), (1.0, 1.0, [0.0]), (math.nan, 1, [1])],
)
def test_refuses_what_is_no_network(away: float, turns: float, frames: list[float]) -> None:
    with pytest.raises(ConfigError, match="closed network"):
        closed_network(away, turns, frames)


def shared(targets: int, hit: float = 1.0, window_s: float = 10.0, slope: float = 0.0) -> Shared:
    """One sequence a target, K = 4, frames of 1 s and `slope` more for each other target."""
    frames = tuple(1 + slope * n for n in range(targets))
    pool = SharedDraft(window_s, 4, hit, 1 - hit, 4, True, targets, lambda *_: frames)
    return shared_draft(pool)


def test_one_target_waits_for_its_own_growth_alone() -> None:
    alone = shared(1)
    assert (alone.grown, alone.wait_s, alone.cycle_s) == pytest.approx((4, 0, 10))
    missed = shared(1, hit=0.0)  # K_b steps, no frame in flight: the growth is over
    assert missed.wait_s == pytest.approx(4)
    late = shared(1, window_s=3.0)  # glue and two steps are over, two are left
    assert (late.grown, late.wait_s) == pytest.approx((2, 2))


def test_others_cost_half_a_frame_while_the_draft_is_not_full_and_more_when_it_is() -> None:
    waits = [shared(n, slope=0.05).wait_s for n in (1, 2, 4, 8, 16)]
    assert waits == sorted(waits) and waits[0] == pytest.approx(0)
    assert 0 < waits[1] < waits[2] < 0.6  # half a frame in flight, where one is
    # 16 targets: frames of up to 1.75 s, five of them a round, do fit in 10 s.
    assert shared(16, slope=0.05).grown == pytest.approx(4)
    crowded = shared(64, slope=0.05)
    assert crowded.grown < 4 and crowded.wait_s > 1 and crowded.busy == 1
