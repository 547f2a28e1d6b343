"""Acceptance models, hit models, and the power law fitted to ranks.

Statistical tests fix their seed and allow 5 standard errors: false-alarm rate 6e-7 each. The
likelihood of the fit is written out rank by rank here.
"""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpissd.common.errors import ConfigError
from mpissd.common.real_pairs import MissLaw
from mpissd.common.theory import expected_tokens, power_law_miss
from mpissd.engine.law.acceptance import (
    NEVER,
    AcceptanceLaw,
    HitLaw,
    hazards_of_counts,
    named_hit_law,
    resolve_acceptance,
)
from mpissd.engine.law.fit import LEAST_COUNT, most_likely

SEED = 20260302


@given(st.floats(0, 0.999), st.integers(0, 20))
def test_expected_tokens_is_leviathan_s_closed_form(alpha: float, lookahead: int) -> None:
    closed = (1 - alpha ** (lookahead + 1)) / (1 - alpha)
    assert expected_tokens(alpha, lookahead) == pytest.approx(closed, rel=1e-9)


def test_alpha_in_both_spellings() -> None:
    short, long = resolve_acceptance(" 0.80 ", 3), resolve_acceptance("alpha:0.8", 3)
    assert short == long == AcceptanceLaw((0.8, 0.8, 0.8), "alpha:0.8")
    assert long.probabilities() == pytest.approx((0.2, 0.16, 0.128, 0.512))
    assert long.mean_accepted == pytest.approx(0.8 + 0.64 + 0.512)
    assert resolve_acceptance("1", 2).mean_accepted == 2
    assert resolve_acceptance("0", 2).mean_accepted == 0


def test_rates_are_hazards_and_marginals_their_products() -> None:
    hazards = resolve_acceptance("rates:.9,.5,0,.7", 4)
    assert hazards.hazards == (0.9, 0.5, 0.0, 0.7)
    marginal = resolve_acceptance("marginal:.9,.45,0,0", 4)
    assert marginal.hazards == pytest.approx((0.9, 0.5, 0.0, 0.0))
    assert marginal.probabilities() == pytest.approx(hazards.probabilities())
    assert marginal.mean_accepted == pytest.approx(0.9 + 0.45)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any), st.integers(0, 14))
def test_a_histogram_s_law_is_the_truncated_histogram(counts: list[int], lookahead: int) -> None:
    law = AcceptanceLaw(hazards_of_counts(counts, lookahead), "")
    padded = counts + [0] * (lookahead + 1)
    expected = [*padded[:lookahead], sum(padded[lookahead:])]
    assert law.probabilities() == pytest.approx([c / sum(counts) for c in expected], abs=1e-12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.2", "1.2: allowed: 0 to 1"),
        ("nan", "nan: allowed: 0 to 1"),
        ("alpha:x", "'x'"),
        ("rates:.9,.8", "2 values: allowed: lookahead = 3"),
        ("rates:.9,.8,1.7", "1.7: allowed: 0 to 1"),
        ("marginal:.8,.9,.1", "never rise"),
        ("rate:.9,.8,.7", "did you mean 'rates'"),
        ("often", "allowed: alpha, laws, marginal, parallel, prompt, rates, suffix"),
        ("p_hit:1.1", "p_hit: 1.1: allowed: 0 to 1"),
        ("power:A=-1,r=1", "hit_a=-1.0"),
        ("power:A=.5,r=0", "hit_r=0.0"),
        ("power:A=1", "unknown hit_law"),
        ("power:A=x,r=1", "'x'"),
    ],
)
def test_errors_name_the_value_and_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        named_hit_law(text) if text[0] == "p" else resolve_acceptance(text, 3)
    assert message in str(error.value)


def test_imposed_hits() -> None:
    law = named_hit_law("p_hit:0.7")
    assert law.ranks(np.array([0.0, 0.699, 0.7])).tolist() == [1, 1, NEVER]
    assert (law.hit_probability(0), law.hit_probability(1), law.hit_probability(9)) == (0, 0.7, 0.7)
    assert law.label == "p_hit:0.7"
    assert named_hit_law("p_hit:0.0").ranks(np.zeros(1)) == NEVER
    assert named_hit_law("p_hit:1.0").ranks(np.array([1 - 2**-53])) == 1


def test_the_default_law_is_what_was_measured() -> None:
    """The numbers equal the committed file of models at K = 4, made from the recordings."""
    measured = named_hit_law("laws:results/recordings/smollm2.laws.json", 4)
    assert named_hit_law("smollm2") == measured


def test_a_law_with_floors() -> None:
    law = named_hit_law("power:A=.5/.2,r=1,floor=.1/.02")
    assert law.label == "power:A=0.5/0.2,r=1.0/1.0,floor=0.1/0.02"
    assert named_hit_law(law.label) == law
    hits = law.hit_probability(5), law.hit_probability(10, end=True)
    assert hits == pytest.approx((0.8, 0.96))
    assert law.ranks(np.array([0.05, 0.36])).tolist() == [NEVER, 2]
    assert law.ranks(np.array([0.01]), end=True) == NEVER
    assert law.powers(1, 1) == ((0.5, 0.2), (1.0, 1.0), (0.1, 0.02))


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
    ranks = HitLaw("", None, (MissLaw(a, r),)).ranks(rng.random(count))
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
    near = np.array(fit) * np.exp(rng.normal(0, 0.02, (20, 2)))
    for a, r in (*np.exp(rng.uniform(-4, 3, (20, 2))), *near):
        assert log_likelihood(ranks, limits, float(a), float(r)) <= top + 1e-6


@pytest.mark.parametrize(("a", "r"), [(0.4, 2.0), (1.0, 0.5), (2.0, 1.5)])
def test_a_known_law_is_found(a: float, r: float) -> None:
    fit = most_likely(*drawn(a, r, 40_000, 1))
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
