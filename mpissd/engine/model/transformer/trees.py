"""Draft trees as the stages of device-decided rounds (device_rounds.py) read and make them.

A *dynamic* tree has another shape in each round [Li et al. 2024, EAGLE-2]. In each level the draft
computes the WIDTH likeliest nodes of the level before, and the CHOICES best candidates after each
are new nodes. Of all found nodes the N likeliest are verified. A node's probability is the product
of the probabilities on its path, softmax over the CHOICES logits. Its parent is at least as likely,
so the N likeliest form a tree. `find`, `choose` and `plant` compute on host arrays what dynamic.cu
computes on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.law.tree import Index, Tree, lay_out
from mpissd.engine.model.forwards import SPAN

PLANT = -1  # the number of the stage that places a dynamic tree
WIDTH = 4  # nodes of a level that the draft computes
CHOICES = 8  # children of each of them
MOST_LEVELS = 16
MOST_NODES = 64
TOKEN, ABOVE, SURE, NEXT_ROW = range(4)  # rows of Shapes.found
PARENT, LEVEL, RANK, LINE, ROW, LANE, SPANS, FORK, KEPT_LANE, KEPT = range(10)  # rows of table_of
NOBODY = -1  # an empty slot, or a token that is not given
_LEAST = np.float32(-1e30)  # also of a logit that is not finite


def table_of(tree: Tree) -> Ints:
    """Returns what stages read of each node of a tree, int32 [10, N + 1]; NOBODY: none.

    PARENT, LEVEL, RANK: a node's parent, level, and rank among its siblings. LINE, ROW: the rows,
    of one sequence, that its parent and the node itself have in the draft's forwards. LANE, SPANS,
    FORK: its lane (forwards.Places; NOBODY: it is stored in the slot), SPAN times the further lanes
    that hold it, and Tree.forks. KEPT_LANE, KEPT: the lane in which the draft has the node's path,
    and how many of the path's nodes from the fork on.
    """
    table = np.full((KEPT + 1, len(tree.levels)), NOBODY, np.int32)
    table[PARENT, 1:] = tree.parents
    table[LINE, 1:] = np.concatenate([[], *tree.lines])
    table[LINE, tree.depths == 1] = 1  # after the row of the token before the last one
    for inner in tree.inner:
        table[ROW, inner] = np.arange(len(inner))
    table[[LEVEL, RANK, LANE, FORK]] = tree.depths, tree.ranks, tree.lanes, tree.forks
    table[SPANS] = SPAN * (tree.spans - 1)
    table[[KEPT_LANE, KEPT]] = tree.lanes, tree.depths - tree.forks
    return table


@dataclass(frozen=True)
class Size:
    """The sizes of dynamic trees: N = `nodes` drafted tokens in at most K = `depth` levels."""

    nodes: int
    depth: int

    @property
    def most_found(self) -> int:
        """The number of nodes that are found in all levels together."""
        return self.first(self.depth + 1)

    @property
    def draft_lanes(self) -> int:
        """The lanes of a sequence in the draft's cache: one for each node that it computes."""
        return WIDTH * (self.depth - 1)

    def first(self, level: int) -> int:
        """Returns the number of the first found node of a level; levels count from 1."""
        return 0 if level == 1 else CHOICES * (1 + WIDTH * (level - 2))


@dataclass(frozen=True)
class Shapes:
    """The dynamic trees of S sequences, which stages keep on the device; NOBODY: none.

    nodes: int32 [S, 4, size.most_found], of the nodes found so far, level by level: TOKEN; ABOVE,
    the parent (NOBODY: the last committed token); SURE, the float32 log probability; NEXT_ROW, the
    row in the draft's next forward. copies: int32 [S · WIDTH, 3], of each row of that forward the
    lane of its parent, its own lane, and how many levels to copy from the one to the other. tables:
    int32 [S, 10, N + 1], like table_of, without RANK, LINE and ROW.
    """

    size: Size
    nodes: Any
    copies: Any
    tables: Any

    @classmethod
    def made(cls, size: Size, sequences: int, put: Callable[[Ints], Any]) -> Shapes:
        """Returns the arrays of `sequences` trees; put: returns an array's copy on the device."""
        nodes = np.zeros((sequences, NEXT_ROW + 1, size.most_found), np.int32)
        copies = np.full((sequences * WIDTH, 3), NOBODY, np.int32)
        tables = np.zeros((sequences, KEPT + 1, size.nodes + 1), np.int32)
        tables[:, LANE] = NOBODY
        return cls(size, put(nodes), put(copies), put(tables))


def likeliest(sure: NDArray[np.float32], count: int) -> Index:
    """Returns the places of a vector's `count` largest values, in falling order."""
    return np.argsort(-sure, kind="stable")[:count]


def find(shapes: Shapes, s: int, level: int, tokens: Ints, logits: NDArray[np.float32]) -> Index:
    """Finds sequence s's nodes of a level; returns those that the draft computes, likeliest first.
    tokens, logits: the candidates of the forward before, [WIDTH, CHOICES]; [1, CHOICES] in level
    1."""
    size = shapes.size
    nodes = shapes.nodes[s]
    first = size.first(level)
    stop = size.first(level + 1)
    sure = nodes[SURE].view(np.float32)
    above = np.array([NOBODY])
    before = np.zeros(1, np.float32)
    if level > 1:
        start = size.first(level - 1)
        rows = nodes[NEXT_ROW, start:first]
        above = np.array([start + int(np.flatnonzero(rows == w)[0]) for w in range(WIDTH)])
        before = sure[above]
    with np.errstate(invalid="ignore", over="ignore"):
        logs = logits - logits[:, :1]
        logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
        logs = before[:, None] + np.minimum(logs, 0)
    nodes[TOKEN, first:stop] = tokens.ravel()
    nodes[ABOVE, first:stop] = np.repeat(above, CHOICES)
    sure[first:stop] = np.where(logs > _LEAST, logs, _LEAST).ravel()
    chosen = first + likeliest(sure[first:stop], WIDTH)
    nodes[NEXT_ROW, first:stop] = NOBODY
    if level < size.depth:
        nodes[NEXT_ROW, chosen] = np.arange(WIDTH)
    return chosen


def choose(shapes: Shapes, s: int, parents: Ints, tokens: Ints) -> None:
    """Chooses sequence s's N likeliest nodes, and writes their `parents` and `tokens`, int32 [N],
    and to shapes.tables the lanes in which the draft has their paths."""
    size = shapes.size
    nodes = shapes.nodes[s]
    table = shapes.tables[s]
    kept = np.sort(likeliest(nodes[SURE].view(np.float32), size.nodes))
    firsts = [size.first(level) for level in range(1, size.depth + 1)]
    above = nodes[ABOVE, kept]
    levels = np.searchsorted(firsts, np.arange(size.most_found), side="right")
    parents[:] = np.where(above < 0, 0, 1 + np.searchsorted(kept, above))
    tokens[:] = nodes[TOKEN, kept]
    table[[KEPT_LANE, KEPT], 0] = NOBODY, 0
    at = np.where(nodes[NEXT_ROW, kept] >= 0, kept, above)  # the last node that the draft computed
    is_kept = at >= 0
    table[KEPT, 1:] = np.where(is_kept, levels[at], 0)
    lanes = WIDTH * (levels[at] - 1) + nodes[NEXT_ROW, at]
    table[KEPT_LANE, 1:] = np.where(is_kept, lanes, NOBODY)


def plant(table: Ints, parents: Ints) -> None:
    """Writes the table of a tree (table_of) whose nodes the target stores in lanes; parents: int32
    [N], of the nodes 1 … N."""
    depths = np.zeros(len(parents) + 1, np.int64)
    for node, parent in enumerate(parents.tolist(), 1):
        depths[node] = depths[parent] + 1
    lanes, forks, spans = lay_out(parents.tolist(), depths, 1)
    table[PARENT] = [NOBODY, *parents]
    table[[LEVEL, LANE, FORK]] = (depths, lanes, forks)
    table[SPANS] = SPAN * (spans - 1)
