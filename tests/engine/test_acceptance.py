"""Acceptance laws, histograms, matching of tokens, and hit laws.

Statistical tests fix their seed and allow 5 standard errors: false-alarm rate 6e-7 each.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.real_pairs import REAL_PAIRS
from mpissd.engine.spec.acceptance import (
    AcceptanceLaw,
    count_accepted,
    hazards_of_counts,
    resolve_acceptance,
)
from mpissd.engine.spec.hits import NEVER, HitLaw, hit_law_of, named_hit_law

SEED = 20260302


def test_alpha_in_both_spellings() -> None:
    short, long = resolve_acceptance(" 0.80 ", 3), resolve_acceptance("alpha:0.8", 3)
    assert short == long == AcceptanceLaw((0.8, 0.8, 0.8), "alpha:0.8")
    assert long.probabilities() == pytest.approx((0.2, 0.16, 0.128, 0.512))
    assert long.mean_accepted == pytest.approx(0.8 + 0.64 + 0.512)
    assert long.acceptance_length == pytest.approx((1 - 0.8**4) / 0.2)
    assert resolve_acceptance("1", 2).mean_accepted == 2
    assert resolve_acceptance("0", 2).mean_accepted == 0


def test_rates_are_hazards_and_marginals_their_products() -> None:
    hazards = resolve_acceptance("rates:.9,.5,0,.7", 4)
    assert hazards.hazards == (0.9, 0.5, 0.0, 0.7)
    marginal = resolve_acceptance("marginal:.9,.45,0,0", 4)
    assert marginal.hazards == pytest.approx((0.9, 0.5, 0.0, 0.0))
    assert marginal.probabilities() == pytest.approx(hazards.probabilities())
    assert marginal.mean_accepted == pytest.approx(0.9 + 0.45)


def test_without_drafts_every_law_accepts_nothing() -> None:
    for text in ("0.8", "rates:.9,.8", "marginal:.9,.8"):
        law = resolve_acceptance(text, 0)
        assert law.hazards == () and law.probabilities() == (1.0,)
        assert law.acceptance_length == 1


@pytest.mark.parametrize(
    "content",
    [
        "[10, 20, 30, 40]",
        '{"counts": [10, 20, 30, 40]}',
        '{"schema": 1, "accept_histogram": [10, 20, 30, 40]}',
        "10\n20\n30\n40\n",
        "10, 20,30,40\n",
    ],
)
def test_histogram_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "accepted"
    path.write_text(content, "utf-8")
    law = resolve_acceptance(f"histogram:{path}", 3)
    assert law.label == f"histogram:{path}"
    assert law.probabilities() == pytest.approx((0.1, 0.2, 0.3, 0.4))


def test_histograms_longer_and_shorter_than_the_lookahead() -> None:
    counts = [10, 20, 30, 40]
    assert hazards_of_counts(counts, 2) == pytest.approx((0.9, 70 / 90))  # k >= 2 is one outcome
    assert hazards_of_counts(counts, 5) == pytest.approx((0.9, 70 / 90, 40 / 70, 0, 0))
    assert hazards_of_counts([0, 0, 5, 0], 4) == (1, 1, 0, 0)
    assert hazards_of_counts([3], 0) == ()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any), st.integers(0, 14))
def test_a_histogram_s_law_is_the_truncated_histogram(counts: list[int], lookahead: int) -> None:
    law = AcceptanceLaw(hazards_of_counts(counts, lookahead), "")
    padded = counts + [0] * (lookahead + 1)
    expected = [*padded[:lookahead], sum(padded[lookahead:])]
    assert law.probabilities() == pytest.approx([c / sum(counts) for c in expected], abs=1e-12)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "[0, 0]", "[1, -2]", "[1.5]", "[true]", "{}", '{"counts": 3.5}', '"text"'),
        *("1\nx\n", "0,100\n1,50\n", "[" * 100_000),
    ],
)
def test_a_file_that_is_no_histogram_is_a_config_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken"
    path.write_text(content, "utf-8")
    with pytest.raises(ConfigError, match="broken"):
        resolve_acceptance(f"histogram:{path}", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.2", "1.2: allowed: 0 to 1"),
        ("-0.1", "allowed: 0 to 1"),
        ("nan", "nan: allowed: 0 to 1"),
        ("alpha:inf", "inf: allowed: 0 to 1"),
        ("alpha:x", "'x'"),
        ("alpha:", "''"),
        ("rates:.9,.8", "2 values: allowed: lookahead = 3"),
        ("rates:.9,.8,1.7", "1.7: allowed: 0 to 1"),
        ("rates:.9,.8,nan", "nan"),
        ("rates:.9,,.8", "''"),
        ("marginal:.9,.8", "2 values: allowed: lookahead = 3"),
        ("marginal:.8,.9,.1", "never rise"),
        ("rate:.9,.8,.7", "did you mean 'rates'"),
        ("often", "allowed: alpha, histogram, laws, marginal, prompt, rates, suffix"),
        ("", "unknown acceptance ''"),
        ("histogram:/no/such/file", "cannot read '/no/such/file'"),
        ("histogram:", "cannot read"),
    ],
)
def test_errors_name_the_value_and_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_acceptance(text, 3)
    assert message in str(error.value)


def test_a_law_refuses_hazards_outside_zero_to_one() -> None:
    with pytest.raises(ConfigError, match=r"1\.5"):
        AcceptanceLaw((0.5, 1.5), "by hand")


def test_count_accepted_by_hand() -> None:
    drafts = np.array([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3], [1, 2, 3]], np.int32)
    stream = np.array([[1, 2, 3, 4]] * 5, np.int32)
    num_draft = np.array([3, 3, 3, 1, 0], np.int32)
    accepted = count_accepted(drafts, stream, num_draft)
    assert accepted.tolist() == [3, 1, 0, 1, 0]
    assert accepted.dtype == np.int32
    none = count_accepted(drafts[:, :0], stream, np.zeros(5, np.int32))
    assert none.tolist() == [0] * 5


@given(st.integers(0, 5), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_count_accepted_against_a_loop(batch: int, lookahead: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drafts = rng.integers(0, 2, (batch, lookahead), np.int32)
    stream = rng.integers(0, 2, (batch, lookahead + 1), np.int32)
    num_draft = rng.integers(0, lookahead, batch, np.int32, endpoint=True)
    for i, accepted in enumerate(count_accepted(drafts, stream, num_draft)):
        k = 0
        while k < num_draft[i] and drafts[i, k] == stream[i, k]:
            k += 1
        assert accepted == k


def test_imposed_hits() -> None:
    law = named_hit_law("p_hit:0.7")
    assert (law.rank(0.0), law.rank(0.699), law.rank(0.7)) == (1, 1, NEVER)
    assert (law.hit_probability(0), law.hit_probability(1), law.hit_probability(9)) == (0, 0.7, 0.7)
    assert law.label == "p_hit:0.7"
    assert named_hit_law("p_hit:0.0").rank(0.0) == NEVER
    assert named_hit_law("p_hit:1.0").rank(1 - 2**-53) == 1


def test_power_law_defaults_are_plausible() -> None:
    law = hit_law_of(RunConfig(), 4)
    assert law == named_hit_law("smollm2") == named_hit_law(law.label)
    assert hit_law_of(RunConfig(p_hit=0.5), 4) == named_hit_law("p_hit:0.5")
    assert hit_law_of(RunConfig(hit_law="p_hit:.5"), 4) == named_hit_law("p_hit:0.5")
    assert 0.4 <= law.hit_probability(3) <= 0.8 < law.hit_probability(3, end=True)
    assert law.hit_probability(0) == 0 < law.hit_probability(1)


def test_the_default_law_is_what_was_measured() -> None:
    """The numbers are those of the committed file of laws at K = 4, made from the recordings."""
    measured = named_hit_law("laws:results/recordings/smollm2.laws.json", 4)
    assert named_hit_law("smollm2") == measured


def test_a_law_with_floors() -> None:
    law = named_hit_law("power:A=.5/.2,r=1,floor=.1/.02")
    assert law.label == "power:A=0.5/0.2,r=1.0/1.0,floor=0.1/0.02"
    assert named_hit_law(law.label) == law
    hits = law.hit_probability(5), law.hit_probability(10, end=True)
    assert hits == pytest.approx((0.8, 0.96))
    assert law.rank(0.05) == NEVER and law.rank(0.01, end=True) == NEVER and law.rank(0.36) == 2
    assert law.powers(1, 1) == ((0.5, 0.2), (1.0, 1.0), (0.1, 0.02))


@pytest.mark.parametrize(("a", "r"), [(0.75, 1.0), (1.0, 0.5), (2.5, 2.0), (0.0, 1.0)])
def test_ranks_follow_the_power_law(a: float, r: float) -> None:
    law = HitLaw("", None, a, r)
    ranks = law.ranks(np.random.default_rng(SEED).random(100_000))
    for fan_out in (1, 2, 3, 8, 40):
        expected = law.hit_probability(fan_out)
        error = math.sqrt(expected * (1 - expected) / len(ranks))
        assert abs((ranks <= fan_out).mean() - expected) <= 5 * error


@given(st.floats(0, 1, exclude_max=True), st.floats(0, 3), st.floats(0.05, 4))
def test_one_rank_and_many_agree_and_stay_in_range(u: float, a: float, r: float) -> None:
    law = HitLaw("", None, a, r)
    rank = law.rank(u)
    assert 1 <= rank <= NEVER
    assert law.ranks(np.full((2, 3), u)).tolist() == [[rank] * 3] * 2
    assert law.ranks(np.full(2, u)).dtype == np.int32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p_hit:1.1", "p_hit: 1.1: allowed: 0 to 1"),
        ("p_hit:-0.1", "p_hit"),
        ("p_hit:nan", "p_hit"),
        ("power:A=-1,r=1", "hit_a=-1.0"),
        ("power:A=nan,r=1", "hit_a=nan"),
        ("power:A=.5,r=0", "hit_r=0.0"),
        ("power:A=.5,r=nan", "hit_r=nan"),
    ],
)
def test_hit_law_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        named_hit_law(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["p_hit:0.7", "power:A=0.75,r=1.0", "power:A=0.65/0.25,r=0.3/0.4", "power:A=0.5/0.5,r=1.0/2.0"],
)
def test_a_law_is_named_by_its_label(text: str) -> None:
    assert named_hit_law(text).label == text


def test_a_law_of_two_ends() -> None:
    law = named_hit_law("power:A=.8/.4,r=1")
    assert law.label == "power:A=0.8/0.4,r=1.0/1.0"
    assert law.powers(3, 2) == ((0.8, 0.8, 0.4, 0.4), (1.0,) * 4, (0.0,) * 4)
    assert (law.hit_probability(2), law.hit_probability(2, end=True)) == (0.6, 0.8)
    assert law.hit_probabilities(2).tolist() == [
        [0, pytest.approx(0.2), 0.6], [0, 0.6, 0.8]
    ]  # fmt: skip
    assert law.rank(0.5) == 2 and law.rank(0.5, end=True) == 1
    single = named_hit_law("power:A=.8,r=1")
    assert single == HitLaw("power:A=0.8,r=1.0", None, 0.8, 1.0) and single.ends == (False,)


# Miss rates that were measured, F = 1, 2, 4, 8, 16: behind a rejection, behind all accepted.
MEASURED = {
    "smollm2-own": ((0.644, 0.512, 0.394, 0.297, 0.233), (0.232, 0.150, 0.102, 0.073, 0.055)),
    "smollm2-chat": ((0.777, 0.682, 0.570, 0.501, 0.431), (0.316, 0.245, 0.192, 0.161, 0.139)),
}


@pytest.mark.parametrize("name", REAL_PAIRS)
def test_the_laws_of_the_real_pair_are_what_was_measured(name: str) -> None:
    """Within 8% of each miss rate, exactly at F = 1."""
    law = named_hit_law(name)
    for end in (False, True):
        misses = [1 - law.hit_probability(f, end) for f in (1, 2, 4, 8, 16)]
        assert misses == pytest.approx(MEASURED[name][end], rel=0.08)
        assert misses[0] == pytest.approx(MEASURED[name][end][0], abs=1e-12)


@pytest.mark.parametrize(
    "text", ["power:A=1", "power:A=1,r=0", "power:A=x,r=1", "A=1,r=1", "p_hit:2"]
)
def test_texts_that_name_no_law(text: str) -> None:
    with pytest.raises(ConfigError):
        named_hit_law(text)


def test_imposed_hits_need_a_candidate_for_every_outcome() -> None:
    with pytest.raises(ConfigError, match=r"p_hit=0\.5"):
        named_hit_law("p_hit:0.5").check_fan_out((3, 0, 2))
    named_hit_law("p_hit:0.5").check_fan_out((3, 1, 2))
    named_hit_law("p_hit:0.0").check_fan_out((3, 0, 2))
    named_hit_law("smollm2").check_fan_out((3, 0, 2))


def test_a_result_row_is_a_histogram(tmp_path: Path) -> None:
    path = tmp_path / "row.json"
    path.write_text(json.dumps({"accept_histogram": [1, 0, 3]}), "utf-8")
    assert resolve_acceptance(f"histogram:{path}", 2).hazards == (0.75, 1.0)
