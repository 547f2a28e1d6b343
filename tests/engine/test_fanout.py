"""Fan-outs and shapes of drafts: the optimum against all that there are; every way to write one."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.errors import ConfigError
from mpissd.common.theory import accept_probabilities, each_k, power_law_miss
from mpissd.engine.law.acceptance import named_hit_law
from mpissd.engine.law.fanout import key_chances, optimal_fan_out, resolve_fan_out, tree_fan_out
from mpissd.engine.law.tree import CHAIN, Shape, optimal, positional


def miss_probability(weights: Any, fan_out: Any, a: Any, r: Any) -> float:
    """Σ_k w_k·miss_k(F_k)."""
    rows = zip(weights, fan_out, a, each_k(r, len(weights)), strict=True)
    return math.fsum(w * power_law_miss(*law) for w, *law in rows)


def least_miss(
    weights: tuple[float, ...], budget: int, a: list[float], r: float | list[float]
) -> float:
    """By trying every fan-out within the budget."""
    choices = itertools.product(range(budget + 1), repeat=len(weights))
    return min(miss_probability(weights, f, a, r) for f in choices if sum(f) <= budget)


@settings(max_examples=60)
@given(
    st.lists(st.floats(0, 1), min_size=0, max_size=3),
    st.integers(1, 8),
    st.lists(st.floats(0.05, 2), min_size=4, max_size=4),
    st.lists(st.floats(0.2, 3), min_size=4, max_size=4),
)
def test_the_optimum_is_what_exhaustive_search_finds(
    hazards: list[float], budget: int, a: list[float], r: list[float]
) -> None:
    """With an A and an r of each k."""
    weights = accept_probabilities(hazards)
    a, r = a[: len(weights)], r[: len(weights)]
    fan_out = optimal_fan_out(weights, budget, a, r)
    assert sum(fan_out) <= budget and min(fan_out) >= 0
    found = miss_probability(weights, fan_out, a, r)
    assert found == pytest.approx(least_miss(weights, budget, a, r), abs=1e-10)


def test_outcomes_that_cannot_happen_get_nothing() -> None:
    assert resolve_fan_out("geometric:5", 3, [1.0] * 3, 0.75, 1.0) == (0, 0, 0, 5)
    assert resolve_fan_out("geometric:5", 3, [0.0] * 3, 0.75, 1.0) == (5, 0, 0, 0)
    assert resolve_fan_out("geometric:9", 3, [0.5] * 3, 0.0, 1.0) == (1, 1, 1, 1)


def test_uniform_and_list() -> None:
    assert resolve_fan_out("uniform:3", 7, [0.8] * 7, 1.0, 1.0) == (3,) * 8
    assert resolve_fan_out(" list:4, 0,2 ", 2, [0.8] * 2, 1.0, 1.0) == (4, 0, 2)
    assert resolve_fan_out("uniform:2", 0, [], 1.0, 1.0) == (2,)
    assert resolve_fan_out("geometric:6", 0, [], 1.0, 1.0) == (6,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("geom:24", "did you mean 'geometric'"),
        ("uniform:0", "allowed: 1 to"),
        ("uniform:2.5", "'2.5'"),
        ("uniform:99999", "allowed: 1 to 1365"),
        ("geometric:4097", "allowed: 1 to 4096"),
        ("geometric:1", "no candidate hits"),
        ("list:1,2,3,4", "4 values: allowed: lookahead + 1 = 3"),
        ("list:0,0,0", "allowed: a sum from 1"),
        ("list:1,,2", "''"),
    ],
)
def test_errors_name_the_value_and_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_fan_out(text, 2, [0.8] * 2, 1.0, 1.0)
    assert message in str(error.value)


def test_a_budget_below_the_minimum_says_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match="a budget of 3 or more"):
        resolve_fan_out("geometric:2", 2, [0.8] * 2, 1.0, 1.0, minimum=1)


@pytest.mark.parametrize("law", ["power:A=.64/.23,r=.4/.5", "power:A=1,r=1", "p_hit:.7"])
@pytest.mark.parametrize("parents", [(0, 0, 1), (0, 1, 1, 2), (0,)])
def test_a_tree_s_branches_follow_the_likeliest_outcomes(law: str, parents: tuple[int]) -> None:
    told = Shape(parents), (0.6, 0.7, 0.5)[: Shape(parents).depth], named_hit_law(law)
    chances = key_chances(*told, 5)
    assert all((np.diff(each) >= 0).all() for each in chances)
    assert sum(each[-1] for each in key_chances(*told, 10**4)) <= 1 + 1e-9

    def hits(fan_out: Any) -> float:
        return math.fsum(each[f] for each, f in zip(chances, fan_out, strict=True))

    every = itertools.product(range(6), repeat=len(chances))
    best = tree_fan_out(*told, 5)
    assert sum(best) <= 5
    assert hits(best) == pytest.approx(max(hits(each) for each in every if sum(each) <= 5))


def shapes(nodes: int, width: int) -> list[Shape]:
    """Every tree of `nodes` nodes whose nodes have at most `width` children."""
    every = itertools.product(*(range(n) for n in range(1, nodes + 1)))
    rising = (of for of in every if [*of] == sorted(of))
    return [Shape(of) for of in rising if max(Counter(of).values()) <= width]


@pytest.mark.parametrize("rates", [(0.7, 0.7, 0.7), (0.3, 0.9, 0.1), (0.05, 0.5, 0.2)])
@pytest.mark.parametrize("law", ["power:A=.5,r=.6", "power:A=.1,r=2,floor=.05"])
def test_the_optimal_tree_is_the_best_of_all(rates: tuple[float, ...], law: str) -> None:
    chances = positional(rates, named_hit_law(law), 3)
    for nodes in range(1, 7):
        trees = [optimal(nodes, chances), *(t for t in shapes(nodes, 3) if t.depth <= 3)]
        mean, *others = (np.cumprod(tree.rates(chances)).sum() for tree in trees)
        assert mean == pytest.approx(max(others))


def test_a_chain_needs_no_lanes() -> None:
    assert CHAIN.num_lanes == 0 and CHAIN.ends == list(range(257)) and CHAIN.width == 1
