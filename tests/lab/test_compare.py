"""A speedup is printed when its 95% interval leaves 1 out, and "no difference" otherwise.

Intervals are held against simulated runs of a known truth (fixed seeds). A run's coins are keyed by
seed and position, as the program's are; its round times are autocorrelated like an H200's, and each
job has its own mean speed. Bands: 95% intervals cover the truth 93 to 97 times in 100; for 800
groups ± 2 points are 2.6 standard errors.
"""

import re

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.common.theory import expected_tokens
from mpissd.lab.tables.compare import (
    HEADLINE_ROUNDS,
    HEADLINE_SEEDS,
    Comparison,
    compare_rows,
    holm,
    student_p,
    student_t,
)


@pytest.mark.parametrize(
    ("low", "high", "shown", "real"),
    [
        (0.97, 0.998, "0.97–0.998", True),
        (1.0021, 1.07, "1.002–1.07", True),
        (0.97, 0.99997, "0.97–0.99997", True),
        (0.97, 1.0031, "0.97–1.003", False),
        (1.0, 1.0, "1.00–1.00", False),
        (0.9, 1.1, "0.90–1.10", False),
    ],
)
def test_a_bound_near_1_shows_its_side(low: float, high: float, shown: str, real: bool) -> None:
    """Two digits print 0.98x (0.97–1.00) both for a difference and for none."""
    found = Comparison(0.98, low, high, HEADLINE_SEEDS, HEADLINE_ROUNDS)
    assert found.interval == shown and found.is_real == real
    assert all(f"({shown})" in text for text in (found.brief, found.claim))
    digits = [float(text) for text in re.findall(r"[\d.]+", str(found).partition("interval")[2])]
    assert (digits[0] <= 1 <= digits[1]) == (not real)


def of_visit(commit: str, gpu: str | None, began: str, rate: float, seed: int) -> Row:
    ranks = [{"uuid": gpu}, {"uuid": None}]
    origin = {"commit": commit, "ranks": ranks, "hosts": ["vm"], "started_at": began}
    made = {"tok_per_s": rate, "seed": seed, "num_rounds": 400, "provenance": origin}
    return Row.from_dict(made)


DAY = "2026-11-22T10:00:00+00:00"


@pytest.mark.parametrize(
    ("commit", "gpu", "began"),
    [("2", "g", DAY), ("1", "h", DAY), ("1", "g", "2026-11-23T10:00:00+00:00"), ("1", None, DAY)],
)
def test_rows_of_two_visits_claim_nothing(commit: str, gpu: str | None, began: str) -> None:
    a = [of_visit("1", "g", DAY, 100.0 + seed, seed) for seed in range(5)]
    b = [of_visit(commit, gpu, began, 110.0 + seed, seed) for seed in range(5)]
    found = compare_rows(a, b)
    assert not found.one_visit and not found.is_headline and found.claim.endswith("(few visits)")


def test_students_t_is_scipy_s() -> None:
    for freedom in (1, 2, 4, 7, 30, 1000):
        assert student_t(freedom) == pytest.approx(stdtrit(freedom, 0.975), rel=0.00055)
        for t in (0.0, 0.5, 2.0, 12.0):
            assert student_p(t, freedom) == pytest.approx(2 * stdtr(freedom, -t), abs=1e-9)


def test_holm_s_correction() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0]


ALPHA, COUNT = 0.8, 400
Floats = NDArray[np.float64]


def coins(rng: np.random.Generator, runs: int) -> NDArray[np.bool_]:
    """Whether the token at each position would be accepted, [runs, positions]."""
    return rng.random((runs, 9 * COUNT)) < ALPHA


def lengths(accepted: NDArray[np.bool_], lookahead: int) -> Floats:
    """Tokens of each round, [runs, rounds], of jobs that draw these coins."""
    ahead = np.zeros((len(accepted), accepted.shape[1] + 1), np.int8)
    for p in range(accepted.shape[1] - 1, -1, -1):
        ahead[:, p] = np.where(accepted[:, p], np.minimum(ahead[:, p + 1] + 1, lookahead), 0)
    at, found = np.zeros(len(accepted), np.int64), []
    for _ in range(COUNT):
        found.append(ahead[np.arange(len(at)), at] + 1)
        at += found[-1]
    return np.array(found, float).T


def seconds(
    rng: np.random.Generator, runs: int, lookahead: int, spread: float, job: float
) -> Floats:
    """Of each round, [runs, rounds], with which every K emits 1 token a second in the long run."""
    noise = rng.normal(size=(runs, COUNT))
    for n in range(1, COUNT):
        noise[:, n] += 0.6 * noise[:, n - 1]
    jobs = np.exp(job * rng.normal(size=(runs, 1)))
    return np.asarray(expected_tokens(ALPHA, lookahead) * jobs * (1 + spread * noise))


def by_seeds(seed: int, count: int, lookaheads: tuple[int, int], job: float) -> list[Comparison]:
    """Pairs of runs of one truth that share their coins, compared five seeds at a time."""
    rng = np.random.default_rng(seed)
    same = coins(rng, count)
    rates = [
        lengths(same, k).sum(axis=1) / seconds(rng, count, k, 0.004, job).sum(axis=1)
        for k in lookaheads
    ]
    groups = [[rows_of(of[n : n + 5].tolist()) for of in rates] for n in range(0, count, 5)]
    found = [compare_rows(a, b) for a, b in groups]
    assert all(c.num_seeds == 5 and c.is_headline for c in found)
    return found


def test_pairs_of_seeds_hold_the_truth() -> None:
    """K = 3 against 6. Seed 21: jobs differ by .3% apart from their draws; 800 groups of five."""
    found = by_seeds(21, 4000, (3, 6), job=0.003)
    assert 0.03 <= sum(c.is_real for c in found) / len(found) <= 0.07


def test_fewer_than_three_seeds_have_no_interval() -> None:
    for count, text in ((1, "1.50× (no interval: 1 seed)"), (2, "1.50× (no interval: 2 seeds)")):
        a, b = rows_of([100.0, 110.0][:count]), rows_of([150.0, 165.0][:count])
        found = compare_rows(a, b)
        assert str(found) == text and not found.is_real and not found.has_interval
    with pytest.raises(ConfigError, match="no seed in common"):
        compare_rows(rows_of([1.0]), rows_of([1.0], first=1))


def rows_of(rates: list[float], num_rounds: int = 400, first: int = 0) -> list[Row]:
    return [
        Row.from_dict({"seed": first + n, "tok_per_s": rate, "num_rounds": num_rounds})
        for n, rate in enumerate(rates)
    ]


@pytest.mark.parametrize(
    ("seeds", "num_rounds", "is_headline"), [(5, 400, True), (4, 400, False), (5, 399, False)]
)
def test_a_headline_takes_5_seeds_of_400(seeds: int, num_rounds: int, is_headline: bool) -> None:
    a = rows_of([100.0 + n for n in range(seeds)], num_rounds)
    b = [row | {"tok_per_s": 1.5 * row.tok_per_s} for row in a]
    found = compare_rows(a, b)
    assert found.is_headline == is_headline and found.is_real
    assert found.claim == ("1.50× (1.50–1.50)" if is_headline else "1.50–1.50 (few seeds)")
    assert compare_rows(a, a).claim == "no difference (1.00–1.00)"
