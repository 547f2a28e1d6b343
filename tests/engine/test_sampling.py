"""Rejection sampling: distributions as they are sent, acceptance, and replacement tokens."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError
from mpissd.common.rng import Purpose
from mpissd.engine.law import sampling
from tests.loop.choices import Choices

LAST = 1 - 2.0**-53  # the largest uniform
Uniforms = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, LAST])
# From a few values, so that there are equals.
Logits = st.integers(1, 12).flatmap(
    lambda size: arrays.arrays(
        np.float32,
        size,
        elements=st.sampled_from([0.0, 0.5, 1.0, 2.5, 9.0]) | st.floats(0, 20, width=32),
    )
)


@st.composite
def distributions(draw: st.DrawFn, size: int | None = None) -> NDArray[np.float64]:
    """[V], zeros among them."""
    count = size or draw(st.integers(1, 8))
    weights = draw(arrays.arrays(np.float64, count, elements=st.integers(0, 5).map(float)))
    weights[draw(st.integers(0, count - 1))] += draw(st.floats(0.01, 3))
    return np.asarray(weights / weights.sum())


@st.composite
def pairs(draw: st.DrawFn) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    size = draw(st.integers(1, 6))
    return draw(distributions(size)), draw(distributions(size))


@given(Logits, st.floats(0.05, 50))
def test_probabilities_are_a_softmax(logits: NDArray[np.float32], temperature: float) -> None:
    probs = sampling.weigh(logits, temperature).probs
    best = max(logits.tolist())
    weights = [np.exp((z - best) / temperature) for z in logits.tolist()]
    assert probs == pytest.approx([w / sum(weights) for w in weights], abs=1e-12)
    assert probs.dtype == np.float64


@given(Logits)
def test_temperature_0_is_greedy_and_takes_the_first_of_equals(logits: NDArray[np.float32]) -> None:
    for top, scale in ((0, 1.0), (3, 0.1), (3, 0.0)):
        probs = sampling.weigh(logits, 0.0, top, scale).probs
        assert probs.tolist() == np.eye(len(logits))[logits.tolist().index(max(logits))].tolist()


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-12, 1e300])
def test_no_temperature_is_too_extreme(temperature: float) -> None:
    logits = np.array([1.0, 7.5, 0.0, 7.0], np.float32)
    probs = sampling.weigh(logits, temperature).probs
    want = [0.25] * 4 if temperature > 1 else [0.0, 1.0, 0.0, 0.0]
    assert probs == pytest.approx(want, abs=1e-12)


@given(Logits, st.floats(0.2, 5), st.integers(0, 14), st.sampled_from([1.0, 0.7, 0.1, 0.0]))
def test_saguaro_sampling_damps_the_likeliest(
    logits: NDArray[np.float32], temperature: float, top: int, scale: float
) -> None:
    plain = sampling.weigh(logits, temperature).probs
    found = sampling.weigh(logits, temperature, top, scale).probs
    order = sorted(range(len(logits)), key=lambda n: (-logits[n], n))
    damped = [p * scale if n in order[:top] else p for n, p in enumerate(plain.tolist())]
    if scale == 1 or top == 0 or (scale == 0 and top >= len(logits)):
        assert found.tobytes() == plain.tobytes()  # bit for bit
    else:
        total = sum(damped)
        assert found == pytest.approx([p / total for p in damped], rel=1e-9, abs=1e-15)


@given(distributions())
def test_what_is_recorded_is_a_distribution(probs: NDArray[np.float64]) -> None:
    row = sampling.record(probs)
    exact = sampling.recorded(row)
    assert row.dtype == np.float32
    assert exact.sum() == pytest.approx(1, abs=1e-15)
    assert exact == pytest.approx(probs, rel=2e-7) and ((exact == 0) == (probs == 0)).all()
    arrived = np.frombuffer(row.tobytes(), np.float32)
    assert sampling.recorded(arrived).tobytes() == exact.tobytes()


@given(distributions(), Uniforms)
def test_a_proposal_is_of_the_row_that_travels(probs: NDArray[np.float64], u: float) -> None:
    """And inverts its cumulative distribution."""
    token, q, row = sampling.propose(probs, u)
    exact = sampling.recorded(row)
    assert q == exact[token] > 0
    assert token == sampling.draw(exact, u)
    assert exact[:token].sum() <= u + 1e-12 and u - 1e-12 <= exact[: token + 1].sum()


@pytest.mark.parametrize("kind", ["flat", "peaked", "mostly 0"])
@pytest.mark.parametrize("size", [49_152, 49_075])  # whole blocks, and a short last one
def test_a_draw_among_many_tokens_has_the_bits_of_a_plain_sum(kind: str, size: int) -> None:
    """For random u, for the ends, and within an ulp of tokens' bounds (there rounding decides)."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(size) * {"flat": 0, "peaked": 6}.get(kind, 1)).astype(np.float32)
    if kind == "mostly 0":
        logits[rng.random(size) > 40 / size] = -1e6
    weights = sampling.weigh(logits, 0.7)
    expected = np.exp((logits.astype(np.float64) - float(logits.max())) / 0.7)
    assert weights.probs.tobytes() == (expected / expected.sum()).tobytes()
    cumulated = np.cumsum(weights.probs)
    bounds = rng.choice(cumulated[:-1], 8) / cumulated[-1]
    edges = [np.nextafter(bound, way) for bound in bounds for way in (0, 1)]
    for u in (u for u in (0.0, LAST, *rng.random(40), *bounds, *edges) if u < 1):
        token = int(np.searchsorted(cumulated, u * cumulated[-1], side="right"))
        assert sampling.draw(weights.probs, float(u)) == token
        assert sampling.draw(weights.values, float(u), weights.total) == token


@given(pairs())
def test_the_residual_is_p_beyond_q(pair: tuple[NDArray[np.float64], NDArray[np.float64]]) -> None:
    p, q = pair
    missing = [max(a - b, 0) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    left = sampling.residual(p, q)
    if sum(missing) <= 1e-14:
        assert left is None
    else:
        assert left == pytest.approx([x / sum(missing) for x in missing], abs=1e-12)


def never(i: int) -> sampling.Row:
    raise AssertionError(f"asked for row {i}")


def verdicts(judge: Callable[[Choices], tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Every verdict and its probability."""
    draws = SimpleNamespace(watched=(0,), rename=lambda name: name, fresh=True)
    choices, law = Choices((), 0, draws), dict[tuple[int, int], float]()
    for chance, _, verdict in choices.fork(lambda: judge(choices)):
        law[verdict] = law.get(verdict, 0.0) + chance
    return law


@given(pairs(), st.booleans())
def test_a_verified_token_has_the_law_of_the_target(
    pair: tuple[NDArray[np.float64], NDArray[np.float64]], certain: bool
) -> None:
    """Summed over the proposed tokens: P(first token) = p, whatever q is."""
    p, row = pair[0], sampling.record(pair[1])
    exact, behind = sampling.recorded(row), np.roll(p, 1)
    law = np.zeros(len(p))
    proposals = [(0, 1.0)] if certain else list(enumerate(exact.tolist()))
    for token, q in proposals:
        if q == 0:
            continue

        def judge(choices: Choices, token: int = token, q: float = q) -> tuple[int, int]:
            coins = choices.uniforms(0, Purpose.ACCEPT, 0, 0, 1)
            u = choices.uniforms(0, Purpose.BONUS, 0, 0, 1)[0]
            rows = never if certain else (lambda i: row)
            told = 1.0 if certain else q
            return sampling.judge((p, behind).__getitem__, [token], [told], rows, coins, u)

        for (k, bonus), chance in verdicts(judge).items():
            law[token if k else bonus] += q * chance
    assert law == pytest.approx(p, abs=1e-12)


def test_each_token_is_judged_behind_those_before_it() -> None:
    """k counts the leading acceptances; p(i) and q_row(i) are of the same place."""
    p = np.array([[0.5, 0.5, 0.0], [0.2, 0.0, 0.8], [0.0, 0.1, 0.9], [1.0, 0.0, 0.0]])
    q = np.array([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]], np.float32)
    asked: list[int] = []

    def q_row(i: int) -> sampling.Row:
        asked.append(i)
        return np.asarray(q[i])

    def judge(coins: list[float], u: float = 0.0) -> tuple[int, int]:
        return sampling.judge(p.__getitem__, [1, 0, 1], [0.5] * 3, q_row, coins, u)

    assert judge([0.99, 0.3, 0.1], 0.4) == (3, 0) and asked == []
    assert judge([0.99, 0.39, 0.2]) == (2, 2) and asked == [2]  # .2·.5 < .1 is not so: strict
    assert judge([0.99, 0.4, 0.0]) == (1, 2) and asked == [2, 1]


ROWS = [[0.25, 0.75], [0.0, 0.0], [0.5, 0.50001], [1.0, 0.0]]


@pytest.mark.parametrize("told", [0.0, -0.5, 1.5, float("nan"), *ROWS], ids=str)
def test_a_token_that_could_not_be_drawn_so_is_refused(told: Any) -> None:
    """Its probability is none, or its row has another one."""
    q_row, q, says = never, told, "token 1 was proposed with probability"
    if isinstance(told, list):
        q_row, q = (lambda i: np.array(told, np.float32)), 0.5
        says = r"token 1: its row says .*, its proposal said 0\.5"
    with pytest.raises(ProtocolError, match=says):
        sampling.judge(lambda i: np.array([0.9, 0.1]), [1], [q], q_row, [0.9], 0.0)


def test_models_that_agree_but_for_rounding_reject_nothing() -> None:
    """If p − q is only rounding, no residual is left, and any coin accepts the token."""
    p = np.full(7, 1 / 7)
    q = p + np.array([3, -3, 0, 0, 0, 0, 0]) * 2.0**-54
    assert sampling.residual(p, q) is None and sampling.residual(q, p) is None
    row = sampling.record(p)
    exact = sampling.recorded(row)
    found = sampling.judge(lambda i: exact, [1], [float(exact[1])], lambda i: row, [LAST], 0.0)
    assert found == (1, 0)
