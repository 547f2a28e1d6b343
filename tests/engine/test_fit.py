"""The fitted power law against brute force over its likelihood, and against known laws.

Statistical tests fix their seed. The likelihood here is written out rank by rank on its own.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpissd.common.errors import ConfigError
from mpissd.common.theory import power_law_miss
from mpissd.engine.spec.fit import LEAST_COUNT, fit_power_law, shrunk_power_laws
from mpissd.engine.spec.hits import HitLaw

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
    """(ranks, limits) of a law, with limits of several sizes."""
    rng = np.random.default_rng([SEED, seed])
    limits = rng.choice([0, 1, 2, 3, 4, 8], count).astype(np.int32)
    ranks = HitLaw("", None, a, r).ranks(rng.random(count))
    return np.where(ranks <= limits, ranks, 0), limits


def arrays(outcomes: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(outcomes, np.int32).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@settings(max_examples=60)
@given(Outcomes, st.integers(0, 2**32 - 1))
def test_nothing_is_likelier_than_the_fit(outcomes: list[tuple[int, int]], seed: int) -> None:
    ranks, limits = arrays(outcomes)
    fit = fit_power_law(ranks, limits)
    assume(fit is not None)
    assert fit is not None
    top = log_likelihood(ranks, limits, fit.hit_a, fit.hit_r)
    rng = np.random.default_rng(seed)
    others = [
        *zip(np.exp(rng.uniform(-4, 3, 20)), np.exp(rng.uniform(-4, 3, 20)), strict=True),
        *zip(
            fit.hit_a * np.exp(rng.normal(0, 0.02, 20)),
            fit.hit_r * np.exp(rng.normal(0, 0.02, 20)),
            strict=True,
        ),
    ]
    for a, r in others:
        assert log_likelihood(ranks, limits, float(a), float(r)) <= top + 1e-6


@pytest.mark.parametrize(("a", "r"), [(0.4, 2.0), (0.75, 1.0), (1.0, 0.5), (1.2, 1.0), (2.0, 1.5)])
def test_a_known_law_is_found(a: float, r: float) -> None:
    fit = fit_power_law(*drawn(a, r, 40_000, 1))
    assert fit is not None
    assert fit.hit_a == pytest.approx(a, rel=0.06)
    assert fit.hit_r == pytest.approx(r, rel=0.06)
    assert fit.a_low < fit.hit_a < fit.a_high and fit.r_low < fit.hit_r < fit.r_high


@pytest.mark.parametrize(("a", "r"), [(0.6, 1.0), (1.2, 0.7)])
def test_95_of_100_intervals_hold_the_truth(a: float, r: float) -> None:
    """Of 200; 5 standard errors of a share of .95 are .077."""
    fits = [fit_power_law(*drawn(a, r, 600, seed)) for seed in range(200)]
    found = [fit for fit in fits if fit is not None]
    assert len(found) == 200
    for share in (
        np.mean([fit.a_low <= a <= fit.a_high for fit in found]),
        np.mean([fit.r_low <= r <= fit.r_high for fit in found]),
    ):
        assert 0.873 < share < 0.999


@pytest.mark.parametrize("a", [0.6, 1.3])
def test_an_interval_ends_where_the_profile_has_fallen_by_half_of_chi_squared(a: float) -> None:
    ranks, limits = drawn(a, 1.0, 120, 3)
    fit = fit_power_law(ranks, limits)
    assert fit is not None
    top = log_likelihood(ranks, limits, fit.hit_a, fit.hit_r)
    r_grid = np.geomspace(fit.hit_r / 4, fit.hit_r * 4, 300)
    a_grid = np.geomspace(fit.hit_a / 4, fit.hit_a * 4, 300)
    for a_end in (fit.a_low, fit.a_high):
        profile = max(log_likelihood(ranks, limits, a_end, float(r)) for r in r_grid)
        assert top - profile == pytest.approx(1.9207, abs=0.03)
    for r_end in (fit.r_low, fit.r_high):
        profile = max(log_likelihood(ranks, limits, float(a), r_end) for a in a_grid)
        assert top - profile == pytest.approx(1.9207, abs=0.03)


def test_without_censoring_a_is_the_share_behind_rank_one() -> None:
    ranks = np.array([1] * 30 + [2] * 12 + [3] * 5 + [7] * 3)
    fit = fit_power_law(ranks, np.full(50, 20))
    assert fit is not None and fit.count == 50
    assert fit.hit_a == pytest.approx(20 / 50, rel=1e-9)


@pytest.mark.parametrize(
    ("ranks", "limits"),
    [
        ([], []),
        ([1, 2, 3, 0] * 2, [4] * 8),  # too few
        ([0] * 50, [4] * 50),  # all miss: any larger A is likelier
        ([1] * 50, [4] * 50),  # all hit at once: any smaller A is likelier
        ([1, 0] * 25, [1] * 50),  # A alone shows
        ([1, 2] * 25, [4] * 50),  # r without end
        ([2, 0] * 25, [2] * 50),  # one share, two parameters
        ([1, 0] * 25, [4] * 50),  # nothing behind rank 1 was ever seen: r = 0
        ([0] * 50, [0] * 50),  # nothing was kept
    ],
)
def test_what_leaves_a_or_r_open_has_no_fit(ranks: list[int], limits: list[int]) -> None:
    assert fit_power_law(np.array(ranks, np.int32), np.array(limits, np.int32)) is None


def test_one_limit_is_enough_if_ranks_are_spread() -> None:
    ranks = [1] * 10 + [2] * 15 + [3] * 5 + [0] * 10  # as often as A = .75, r = 1 says
    fit = fit_power_law(np.array(ranks), np.full(40, 3))
    assert fit is not None and fit.count == 40
    assert fit.hit_a == pytest.approx(0.75) and fit.hit_r == pytest.approx(1.0)


@settings(max_examples=25)
@given(Outcomes, st.randoms(use_true_random=False), st.integers(0, 20))
def test_order_and_outcomes_with_nothing_kept_change_nothing(
    outcomes: list[tuple[int, int]], random: object, empty: int
) -> None:
    mixed = outcomes + [(0, 0)] * empty
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert fit_power_law(*arrays(mixed)) == fit_power_law(*arrays(outcomes))


@settings(max_examples=40)
@given(Outcomes, st.integers(1, 9))
def test_one_more_first_hit_lowers_a(outcomes: list[tuple[int, int]], limit: int) -> None:
    before = fit_power_law(*arrays(outcomes))
    after = fit_power_law(*arrays([*outcomes, (1, limit)]))
    if before is not None and after is not None:
        assert after.hit_a <= before.hit_a * (1 + 1e-6)


def test_a_rank_beyond_its_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 5: allowed: 0 to its limit, 3"):
        fit_power_law(np.array([1, 5]), np.array([4, 3]))
    with pytest.raises(ConfigError, match="rank -1"):
        fit_power_law(np.array([-1]), np.array([4]))


def posterior(
    ranks: np.ndarray, limits: np.ndarray, a: float, r: float, prior: tuple[float, float]
) -> float:
    pull = math.log(a / prior[0]) ** 2 / 2 + math.log(r / prior[1]) ** 2 / (2 * 0.25)
    return log_likelihood(ranks, limits, a, r) - pull


@settings(max_examples=30)
@given(st.lists(Outcomes, min_size=1, max_size=1), st.integers(0, 2**32 - 1))
def test_the_shrunken_r_is_the_posterior_s_mode(
    groups: list[list[tuple[int, int]]], seed: int
) -> None:
    """Nothing with another A and r is better than the best A for the r returned."""
    ranks, limits = arrays(groups[0])
    _, r = shrunk_power_laws([(ranks, limits)], 0.75, 1.0)
    log_a = np.linspace(-5, 3, 401)
    top = max(posterior(ranks, limits, math.exp(x), r, (0.75, 1.0)) for x in log_a)
    rng = np.random.default_rng(seed)
    for a, other in np.exp(rng.uniform([-4, -3], [2, 2.5], (30, 2))):
        assert posterior(ranks, limits, float(a), float(other), (0.75, 1.0)) <= top + 0.02


def test_without_ranks_the_prior_stays_and_with_many_it_goes() -> None:
    none = np.zeros(0, np.int32)
    assert shrunk_power_laws([(none, none)] * 2, 0.6, 1.5) == (
        pytest.approx((0.6, 0.6)),
        pytest.approx(1.5),
    )
    (a,), r = shrunk_power_laws([drawn(1.2, 2.0, 50_000, 5)], 0.4, 0.5)
    assert a == pytest.approx(1.2, rel=0.1) and r == pytest.approx(2.0, rel=0.1)


def test_groups_share_r_and_keep_their_own_a() -> None:
    groups = [drawn(0.8, 1.5, 6000, 6), drawn(0.4, 1.5, 6000, 7)]
    empty = np.zeros(0, np.int32)
    (first, second, unseen), r = shrunk_power_laws([*groups, (empty, empty)], 0.75, 1.0)
    assert r == pytest.approx(1.5, rel=0.1)
    assert first == pytest.approx(0.8, rel=0.06) and second == pytest.approx(0.4, rel=0.06)
    assert second < unseen < first


def test_all_misses_and_all_hits_still_give_a_law() -> None:
    (misses,), _ = shrunk_power_laws([(np.zeros(300, np.int32), np.full(300, 4))], 0.75, 1.0)
    (hits,), _ = shrunk_power_laws([(np.ones(300, np.int32), np.full(300, 4))], 0.75, 1.0)
    assert misses > 1.5 and 0 < hits < 0.1
