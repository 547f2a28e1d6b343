"""Shapes of drafts: their places, and the optimal one against all that there are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.engine.spec.acceptance import named_hit_law
from mpissd.engine.spec.tree import CHAIN, Tree, optimal, positional


def shapes(nodes: int, width: int) -> Iterator[Tree]:
    """Every tree of `nodes` nodes whose nodes have at most `width` children."""

    def more(parents: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(parents) == nodes:
            yield parents
            return
        for parent in range(parents[-1] if parents else 0, len(parents) + 1):
            if parents.count(parent) < width:
                yield from more((*parents, parent))

    return map(Tree, more(()))


def mean_accepted(tree: Tree, law: NDArray[np.float64]) -> float:
    """The sum of the nodes' chances."""
    chances = [1.0]
    for node, parent in enumerate(tree.parents, 1):
        chances.append(chances[parent] * float(law[tree.depths[node] - 1, tree.ranks[node]]))
    assert np.cumprod(tree.rates(law)).sum() == pytest.approx(sum(chances) - 1)
    return sum(chances) - 1


@pytest.mark.parametrize("rates", [(0.7, 0.7, 0.7), (0.3, 0.9, 0.1), (0.05, 0.5, 0.2)])
@pytest.mark.parametrize("law", ["power:A=.5,r=.6", "power:A=.1,r=2,floor=.05"])
def test_the_optimal_tree_is_the_best_of_all(rates: tuple[float, ...], law: str) -> None:
    chances = positional(rates, named_hit_law(law), 3)
    assert np.allclose(positional(rates, named_hit_law(law), 64).sum(axis=1), 1, atol=0.15)
    for nodes in range(1, 7):
        each = [mean_accepted(t, chances) for t in shapes(nodes, 3) if t.depth <= len(rates)]
        assert mean_accepted(optimal(nodes, chances), chances) == pytest.approx(max(each))


def test_places_of_every_small_tree() -> None:
    """A path is in the trunk, or in it up to a fork and then in lanes; no nodes share an entry."""
    for tree in shapes(6, 3):
        held = dict[tuple[int, int], int]()  # {(lane, or −1 for the trunk; depth): node}
        for node in range(7):
            for lane in range(tree.lanes[node], tree.lanes[node] + tree.spans[node]):
                assert lane < tree.num_lanes
                assert held.setdefault((lane, int(tree.depths[node])), node) == node
        for node, path in enumerate(tree.paths):
            nodes = [column + 1 for column in path]
            lane, fork = int(tree.lanes[node]), int(tree.forks[node])
            entries = [(lane if d >= fork else -1, d) for d in range(1, len(path) + 1)]
            assert [held[at] for at in entries] == nodes
            assert tree.ends[len(path)] >= node and tree.depths[node] == len(path)


def test_a_chain_needs_no_lanes() -> None:
    assert CHAIN.num_lanes == 0 and CHAIN.ends == list(range(257)) and CHAIN.width == 1
    assert CHAIN.walk([5, 6, 7], [5, 6, 8, 9], range(4), 3) == 2
    assert Tree((0, 0, 2)).walk([4, 5, 6], [5, 0, 6, 1], range(4), 3) == 3
