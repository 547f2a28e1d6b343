"""The fitted power law against brute force over its likelihood, and against known parameters.

Statistical tests fix their seed. The likelihood here is written out rank by rank on its own.
"""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpissd.common.theory import power_law_miss
from mpissd.engine.spec.acceptance import HitLaw, Power
from mpissd.engine.spec.fit import LEAST_COUNT, most_likely

SEED = 20260302
Outcomes = st.lists(
    st.integers(1, 9).flatmap(lambda f: st.tuples(st.integers(0, f), st.just(f))),
    min_size=LEAST_COUNT,
    max_size=60,
)


def log_likelihood(ranks: np.ndarray, limits: np.ndarray, a: float, r: float) -> float:
    total = 0.0
    for rank, limit in zip(ranks.tolist(), limits.tolist(), strict=True):
        p = power_law_miss(limit, a, r) if limit else 1.0
        if rank:
            p = power_law_miss(rank - 1, a, r) - power_law_miss(rank, a, r)
        total += math.log(p) if p > 0 else -math.inf
    return total


def drawn(a: float, r: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(ranks, limits) drawn from a hit model, with limits of several sizes."""
    rng = np.random.default_rng([SEED, seed])
    limits = rng.choice([0, 1, 2, 3, 4, 8], count).astype(np.int32)
    ranks = HitLaw("", None, (Power(a, r),)).ranks(rng.random(count))
    return np.where(ranks <= limits, ranks, 0), limits


def arrays(outcomes: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(outcomes, np.int32).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@settings(max_examples=60)
@given(Outcomes, st.integers(0, 2**32 - 1))
def test_nothing_is_likelier_than_the_fit(outcomes: list[tuple[int, int]], seed: int) -> None:
    ranks, limits = arrays(outcomes)
    fit = most_likely(ranks, limits)
    assume(fit is not None)
    assert fit is not None
    top = log_likelihood(ranks, limits, fit[0], fit[1])
    rng = np.random.default_rng(seed)
    others = [
        *zip(np.exp(rng.uniform(-4, 3, 20)), np.exp(rng.uniform(-4, 3, 20)), strict=True),
        *zip(
            fit[0] * np.exp(rng.normal(0, 0.02, 20)),
            fit[1] * np.exp(rng.normal(0, 0.02, 20)),
            strict=True,
        ),
    ]
    for a, r in others:
        assert log_likelihood(ranks, limits, float(a), float(r)) <= top + 1e-6


@pytest.mark.parametrize(("a", "r"), [(0.4, 2.0), (1.0, 0.5), (2.0, 1.5)])
def test_a_known_law_is_found(a: float, r: float) -> None:
    fit = most_likely(*drawn(a, r, 40_000, 1))
    assert fit is not None
    assert fit[0] == pytest.approx(a, rel=0.06)
    assert fit[1] == pytest.approx(r, rel=0.06)


@pytest.mark.parametrize(
    ("ranks", "limits"),
    [
        ([], []),
        ([1, 2, 3, 0] * 2, [4] * 8),  # too few
        ([0] * 50, [4] * 50),  # all miss: any larger A is likelier
        ([1] * 50, [4] * 50),  # all hit at once: any smaller A is likelier
        ([1, 0] * 25, [1] * 50),  # only A is determined
        ([1, 2] * 25, [4] * 50),  # r without end
        ([2, 0] * 25, [2] * 50),  # one share, two parameters
        ([1, 0] * 25, [4] * 50),  # no hit beyond rank 1: r = 0
        ([0] * 50, [0] * 50),  # nothing was kept
    ],
)
def test_what_leaves_a_or_r_open_has_no_fit(ranks: list[int], limits: list[int]) -> None:
    assert most_likely(np.array(ranks, np.int32), np.array(limits, np.int32)) is None
