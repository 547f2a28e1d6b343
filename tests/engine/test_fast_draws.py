"""Draws and weights in few passes over a row: bit for bit the plain formulas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.engine.spec import sampling

V = 49_152
Floats = NDArray[np.float64]


def softmax(logits: NDArray[np.float32], temperature: float) -> Floats:
    exact = logits.astype(np.float64)
    weights = np.exp((exact - exact.max()) / temperature)
    return np.asarray(weights / weights.sum())


def inverted(probs: Floats, u: float) -> int:
    """One sum after the other."""
    cumulated = np.cumsum(probs)
    return int(np.searchsorted(cumulated, u * cumulated[-1], side="right"))


def flat(rng: np.random.Generator) -> NDArray[np.float32]:
    return np.full(V, 0.25, np.float32)


def peaked(rng: np.random.Generator) -> NDArray[np.float32]:
    return (6 * rng.standard_normal(V)).astype(np.float32)


def sparse(rng: np.random.Generator) -> NDArray[np.float32]:
    """Most weights are 0, whole blocks of them."""
    logits = np.full(V, -1e6, np.float32)
    logits[rng.integers(0, V, 40)] = rng.standard_normal(40)
    return logits


def uneven(rng: np.random.Generator) -> NDArray[np.float32]:
    """The last block is short."""
    return rng.standard_normal(V - 77).astype(np.float32)


@pytest.mark.parametrize("made", [flat, peaked, sparse, uneven])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_draw_is_that_of_the_sums_one_after_the_other(
    made: Callable[[np.random.Generator], NDArray[np.float32]], temperature: float
) -> None:
    """For random u, for the ends, and within an ulp of tokens' bounds (there rounding decides)."""
    rng = np.random.default_rng(3)
    logits = made(rng)
    probs, weights = softmax(logits, temperature), sampling.weigh(logits, temperature)
    assert weights.probs.tobytes() == probs.tobytes()
    cumulated = np.cumsum(probs)
    bounds = rng.choice(cumulated[:-1], 8) / cumulated[-1]
    edges = [np.nextafter(bound, way) for bound in bounds for way in (0, 1)]
    us = [0.0, 1 - 2.0**-53, *rng.random(40), *bounds, *edges]
    for u in (float(u) for u in us if u < 1):
        expected = inverted(probs, u)
        assert sampling.draw(probs, u) == expected
        assert sampling.draw(weights.values, u, weights.total) == expected
