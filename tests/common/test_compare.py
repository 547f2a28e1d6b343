"""A speedup is printed when its 95% interval leaves 1 out, and "no difference" otherwise."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import stdtrit

from mpissd.common.compare import HEADLINE_ROUNDS, HEADLINE_SEEDS, Comparison, How, compare_rates
from mpissd.common.errors import ConfigError
from mpissd.common.rates import Rate, Samples, student_t
from mpissd.common.row import Row


def compare(
    a: Samples, b: Samples, a_tokens: Samples | None = None, b_tokens: Samples | None = None
) -> Comparison:
    """b against a, as independent runs of so many seconds and tokens a round."""
    return compare_rates(Rate.of_rounds(a, a_tokens), Rate.of_rounds(b, b_tokens))


def rounds(
    rng: np.random.Generator, mean_s: float, count: int = 200, memory: float = 0.3
) -> NDArray[np.float64]:
    """Seconds a round, spread by 5%, each like the one before it."""
    noise = rng.normal(size=count)
    for n in range(1, count):
        noise[n] += memory * noise[n - 1]
    return np.asarray(mean_s * (1 + 0.05 * noise))


def test_a_speedup_comes_with_its_interval() -> None:
    rng = np.random.default_rng(5)
    slow, fast = rounds(rng, 2.0), rounds(rng, 1.0)
    found = compare(slow, fast)
    assert found.is_real and found.low < 2 < found.high and found.high - found.low < 0.1
    assert found == compare(slow.tolist(), fast.tolist())  # no draws
    assert str(found).startswith(("1.9", "2.0")) and "× (95% interval " in str(found)


def test_equal_runs_show_no_difference() -> None:
    rng = np.random.default_rng(6)
    text = str(compare(rounds(rng, 1.0), rounds(rng, 1.0)))
    assert text.startswith("no difference (95% interval 0.9")
    assert str(compare([1.0] * 40, [1.0] * 40)).startswith("no difference")


def test_tokens_count() -> None:
    """Rounds twice as long that emit three times as much: 1.5 times the rate."""
    rng = np.random.default_rng(7)
    a, b = rounds(rng, 1.0), rounds(rng, 2.0)
    found = compare(a, b, np.ones(200), rng.integers(2, 5, 200))
    assert found.low < 1.5 < found.high and found.is_real
    assert compare(a, b).speedup == pytest.approx(0.5, rel=0.03)


def test_it_is_the_same_the_other_way_round() -> None:
    rng = np.random.default_rng(8)
    a, b = rounds(rng, 1.0), rounds(rng, 1.3, 90)
    there, back = compare(a, b), compare(b, a)
    assert there.speedup * back.speedup == pytest.approx(1)
    assert there.low * back.high == pytest.approx(1)


@pytest.mark.parametrize("count", [50, 200])
def test_equal_runs_are_told_apart_once_in_twenty(count: int) -> None:
    """Seed 9: of 1000 pairs 5% ± 2 points; fails by chance once in 200 seeds."""
    rng = np.random.default_rng(9)
    pairs = [(rounds(rng, 1.0, count), rounds(rng, 1.0, count)) for _ in range(1000)]
    apart = sum(compare(a, b).is_real for a, b in pairs) / len(pairs)
    assert 0.03 <= apart <= 0.07


def test_a_small_gain_is_seen_in_enough_rounds() -> None:
    rng = np.random.default_rng(10)
    assert compare(rounds(rng, 1.0, 2000), rounds(rng, 0.98, 2000)).is_real


@pytest.mark.parametrize(
    ("seconds", "tokens", "says"),
    [
        ([1.0] * 19, None, "19 rounds"),
        ([1.0] * 40, [1] * 39, "40 rounds (39 with tokens)"),
        ([1.0] * 39 + [0.0], None, "a round of 0 s"),
        ([1.0] * 40, [0] * 40, "0 tokens"),
    ],
)
def test_what_cannot_be_compared(seconds: list[float], tokens: list[int] | None, says: str) -> None:
    with pytest.raises(ConfigError, match="allowed") as caught:
        compare(seconds, [1.0] * 40, tokens)
    assert says in str(caught.value)


def row(**changed: Any) -> Row:
    """A row of 100 rounds of 1 or 3 tokens in 10 ms, with no luck and no spread told."""
    flat = {"mean": 1e4, "p50": 1e4, "p90": 1e4, "p99": 1e4, "n": 100}
    made = {"run_id": "r", "num_rounds": 100, "tok_per_s": 200.0, "round_us": flat}
    return Row.from_dict(made | {"accept_histogram": [50, 0, 50], "sampling_sd": None} | changed)


def test_a_row_alone_tells_of_its_draws() -> None:
    """Lengths 1 and 3, evenly: standard deviation 1 of a mean of 2, over √100."""
    found = Rate.of_row(row())
    assert found.value == 200 and not found.from_rounds and found.freedom == 99
    assert found.variance == pytest.approx(0.05**2)
    assert Rate.of_row(row(sampling_sd=0.02)).variance == pytest.approx(0.02**2)
    assert Rate.of_row(row(sampling_sd=0.0)).variance == 0  # AR draws nothing


@pytest.mark.parametrize("times", [{"p90": 1.1281552e4}, {"p90": 1e4, "p99": 1.2326348e4}])
def test_a_row_alone_tells_of_the_spread_of_its_rounds(times: dict[str, float]) -> None:
    """σ = 1 ms of 10 ms by the one percentile or the other, over √100."""
    flat = dict(row().round_us)
    found = Rate.of_row(row(sampling_sd=0.0, round_us=flat | times))
    assert found.variance == pytest.approx(0.01**2)


def test_rows_alone_are_told_apart_once_in_twenty() -> None:
    """Seed 11: runs of one law, known by their rows: of 1000 pairs 5% ± 2 points."""
    rng = np.random.default_rng(11)

    def one() -> Rate:
        counts = rng.multinomial(100, [0.5, 0.0, 0.5])
        us = rng.normal(1e4, 800, 100)
        p50, p90, p99 = np.percentile(us, [50, 90, 99])
        times = {"mean": us.mean(), "p50": p50, "p90": p90, "p99": p99}
        rate = float(counts @ [1, 2, 3] / us.sum() * 1e6)
        return Rate.of_row(row(accept_histogram=counts.tolist(), round_us=times, tok_per_s=rate))

    apart = sum(compare_rates(one(), one()).is_real for _ in range(1000)) / 1000
    assert 0.02 <= apart <= 0.07


@pytest.mark.parametrize(
    "changed",
    [
        {"num_rounds": 19},
        {"tok_per_s": 0.0},
        {"tok_per_s": None},
        {"accept_histogram": []},
        {"accept_histogram": [0, 0]},
        {"round_us": None},
        {"round_us": {"mean": 1.0}},
        {"round_us": dict.fromkeys(("mean", "p50", "p90", "p99"))},
    ],
    ids=str,
)
def test_a_row_that_tells_too_little(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="row 'r'"):
        Rate.of_row(row(**changed))


@pytest.mark.parametrize("freedom", [*range(1, 31), 100, 1000])
def test_students_t(freedom: int) -> None:
    """It is within .055% of SciPy's quantile."""
    assert student_t(freedom) == pytest.approx(stdtrit(freedom, 0.975), rel=0.00055)


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
def test_a_bound_that_rounds_to_1_shows_its_side(
    low: float, high: float, shown: str, real: bool
) -> None:
    """Two digits said 0.98x (0.97–1.00) of a difference, and the same interval of none."""
    found = Comparison(0.98, low, high, How.SEEDS, HEADLINE_SEEDS, HEADLINE_ROUNDS)
    assert found.interval == shown and found.is_real == real
    assert all(f"({shown})" in text for text in (found.brief, found.claim))
    digits = [float(text) for text in re.findall(r"[\d.]+", str(found).partition("interval")[2])]
    assert (digits[0] <= 1 <= digits[1]) == (not real)
