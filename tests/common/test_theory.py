"""The formulas against the worked numbers they came with, and simulation.

Statistical tests fix their seed and allow 5 standard errors: false-alarm rate 6e-7 each.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common import theory

SEED = 20260301
ROUNDS = 200_000


def near(samples: np.ndarray, value: float) -> bool:
    """Whether a sample mean is within 5 standard errors of a value."""
    return bool(abs(samples.mean() - value) <= 5 * samples.std() / math.sqrt(len(samples)))


def simulate_accepted(hazards: list[float]) -> np.ndarray:
    """k of ROUNDS rounds, drawn token by token."""
    coins = np.random.default_rng(SEED).random((ROUNDS, len(hazards))) < np.array(hazards)
    return np.logical_and.accumulate(coins, axis=1).sum(axis=1)


@given(st.floats(0, 0.999), st.integers(0, 20))
def test_expected_tokens_is_leviathan_s_closed_form(alpha: float, lookahead: int) -> None:
    closed = (1 - alpha ** (lookahead + 1)) / (1 - alpha)
    assert theory.expected_tokens(alpha, lookahead) == pytest.approx(closed, rel=1e-9)


def test_tokens_and_probabilities_against_simulation() -> None:
    hazards = [0.9, 0.8, 0.5, 0.7]
    accepted = simulate_accepted(hazards)
    for k, weight in enumerate(theory.accept_probabilities(hazards)):
        assert near((accepted == k).astype(float), weight)
