"""A speedup is printed when its 95% interval leaves 1 out, and "no difference" otherwise."""

import re

import pytest
from scipy.special import stdtr, stdtrit

from mpissd.common.compare import (
    HEADLINE_ROUNDS,
    HEADLINE_SEEDS,
    Comparison,
    compare_rows,
    holm,
    student_p,
    student_t,
)
from mpissd.common.row import Row


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
