"""Shapes of drafts: their places, and the optimal one against all that there are."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from mpissd.engine.law.acceptance import named_hit_law
from mpissd.engine.law.tree import CHAIN, Tree, optimal, positional


def shapes(nodes: int, width: int) -> list[Tree]:
    """Every tree of `nodes` nodes whose nodes have at most `width` children."""
    every = product(*(range(n) for n in range(1, nodes + 1)))
    rising = (of for of in every if [*of] == sorted(of))
    return [Tree(of) for of in rising if max(Counter(of).values()) <= width]


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
