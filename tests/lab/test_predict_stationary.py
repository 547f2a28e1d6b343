"""The long-run law of a chain, against chains that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.lab.predict.stationary import binomial, hit_counts, long_run, onto, stationary

Floats = NDArray[np.float64]


def chain(moves: list[list[float]], start: list[float]) -> Floats:
    """long_run of a chain whose n says where it goes: n leads from every state to state n."""
    depth = len(moves)
    steps = np.broadcast_to(np.arange(depth), (1, depth, depth))
    return long_run(np.array([start]), np.array([moves]), steps)[0]


def test_a_chain_that_rarely_moves_is_followed_to_its_end() -> None:
    found = chain([[1 - 1e-4, 1e-4], [2e-4, 1 - 2e-4]], [0.0, 1.0])
    assert found == pytest.approx([2 / 3, 1 / 3])


def test_a_chain_that_swings_is_its_mean_over_time() -> None:
    assert chain([[0, 1], [1, 0]], [0.0, 1.0]) == pytest.approx([0.5, 0.5])
    assert chain([[0, 1, 0], [0, 0, 1], [1, 0, 0]], [1.0, 0, 0]) == pytest.approx([1 / 3] * 3)


def test_states_that_never_meet_keep_their_start() -> None:
    assert chain([[1, 0], [0, 1]], [0.3, 0.7]) == pytest.approx([0.3, 0.7])
    assert chain([[1, 0, 0], [0.5, 0, 0.5], [0, 0, 1]], [0, 1, 0]) == pytest.approx([0.5, 0, 0.5])


def test_a_long_run_of_random_chains_is_their_eigenvector() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        moves = rng.dirichlet(np.full(5, 0.3), size=5)
        values, vectors = np.linalg.eig(moves.T)
        known = np.real(vectors[:, np.argmin(np.abs(values - 1))])
        found = chain(moves.tolist(), [0, 0, 0, 0, 1.0])
        assert found == pytest.approx(known / known.sum(), abs=1e-6)


def test_one_sequence_with_two_laws() -> None:
    """After a hit (state 1) the next hits with .9, after a miss with .2: P(hit) = 2/3."""
    chance = np.array([[[0.2, 0.9], [0.2, 0.9]]])
    steps = np.array([[[0, 1], [0, 1]]])
    found = stationary(1, chance, steps)
    assert found.weight[0] == pytest.approx([1 / 3, 2 / 3], abs=1e-5)
    assert found.joint.sum() == pytest.approx(1)
    assert found.joint[0, :, 1].sum() == pytest.approx(2 / 3, abs=1e-5)


def test_states_that_are_left_once_in_ten_thousand_rounds_count() -> None:
    """Eight of eight hit again with .9999 each, any fewer with .3 each: both last."""
    batch, stay = 8, 0.9999
    all_hit = (np.arange(batch + 1) == batch).astype(np.int64)
    chance = np.where(all_hit, stay, 0.3)
    found = stationary(batch, np.array([[chance, chance]]), np.array([[all_hit, all_hit]]))
    up, down = 0.3**batch, 1 - stay**batch
    assert up < down < 1e-3
    assert found.weight[0] == pytest.approx([down / (up + down), up / (up + down)], rel=1e-3)


def test_parts_go_where_their_steps_lead() -> None:
    steps = np.array([[[0, 1, 1], [1, 1, 0]], [[0, 0, 0], [0, 0, 1]]])
    parts = np.arange(12, dtype=float).reshape(2, 2, 3)
    assert onto(steps, parts).tolist() == [[0 + 5, 1 + 2 + 3 + 4], [6 + 7 + 8 + 9 + 10, 11]]


@pytest.mark.parametrize("batch", [0, 1, 7, 64])
def test_a_binomial_is_exact_for_few(batch: int) -> None:
    for chance in (0.0, 0.3, 1.0):
        found = binomial(batch, np.array([chance]))[0]
        ways = [math.comb(batch, n) * chance**n * (1 - chance) ** (batch - n)
                for n in range(batch + 1)]  # fmt: skip
        assert found == pytest.approx(ways, abs=1e-12)
    assert hit_counts(batch).tolist() == list(range(batch + 1))


@pytest.mark.parametrize("batch", [65, 100, 256, 1000, 4096])
def test_a_thinned_binomial_keeps_mean_spread_and_ends(batch: int) -> None:
    counts = hit_counts(batch)
    assert counts[0] == 0 and counts[-1] == batch and (np.diff(counts) > 0).all()
    assert len(counts) < 4 * math.sqrt(batch) + 4
    for chance in np.linspace(0.005, 0.995, 67):
        found = binomial(batch, np.array([chance]))[0]
        assert found.sum() == pytest.approx(1)
        assert abs(found @ counts - batch * chance) < 0.001 * batch
        spread = found @ (counts - batch * chance) ** 2
        assert spread == pytest.approx(batch * chance * (1 - chance), rel=0.07)
        assert abs(found[-1] - chance**batch) < 0.0013
