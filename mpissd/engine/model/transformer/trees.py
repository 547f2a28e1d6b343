"""What the stages of chained rounds know of a tree, and trees whose shape they decide themselves.

A *dynamic* tree has another shape in each round [Li et al. 2024, EAGLE-2]. In each level the draft
computes the WIDTH likeliest nodes of the level before; the CHOICES best candidates after each are
new nodes. Of all of them the N likeliest are verified. A node's probability is the product of the
probabilities on its path, softmax over the CHOICES logits. Its parent is at least as likely, so the
N likeliest form a tree.

These functions compute on host arrays what dynamic.cu computes on a device.
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
WIDTH, CHOICES = 4, 8
MOST_LEVELS, MOST_NODES = 16, 64
TOKEN, ABOVE, SURE, SEAT = range(4)  # rows of Shapes.found
PARENT, LEVEL, RANK, LINE, ROW, LANE, SPANS, FORK, KEPT_LANE, KEPT = range(10)  # rows of table_of
NOBODY = -1  # an empty slot, or a token that is not given
_LEAST = np.float32(-1e30)  # also of a logit that is not finite


def table_of(tree: Tree) -> Ints:
    """Returns what stages read of a tree by node, int32 [10, N + 1].

    A node's parent (NOBODY: none), its level and its rank among its siblings; the rows, of one
    sequence, that its parent and the node itself have in the draft's forwards (NOBODY: none); its
    lane (NOBODY: the trunk), SPAN times the further lanes that hold it, and Tree.forks; the lane in
    which the draft keeps its path, and how many of the path's nodes from the fork on.
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
    """The sizes of such trees: N drafted tokens of at most K levels."""

    nodes: int
    depth: int

    @property
    def most_found(self) -> int:
        """The nodes that are found in all levels."""
        return self.first(self.depth + 1)

    @property
    def draft_lanes(self) -> int:
        """The lanes of a sequence in the draft's cache: one for each computed node."""
        return WIDTH * (self.depth - 1)

    def first(self, level: int) -> int:
        """Returns the first node that is found in a level, from 1 on."""
        return 0 if level == 1 else CHOICES * (1 + WIDTH * (level - 2))


@dataclass(frozen=True)
class Shapes:
    """What stages keep between them, on the device.

    found: int32 [S, 4, most_found], the nodes that were found, level by level: token, parent
    (NOBODY: the last committed token), the float32 logarithm of the probability, and the row that
    the node has in the draft's next forward (NOBODY: none). copies: int32 [S · WIDTH, 3], of each
    row of that forward the lane of its parent (NOBODY: none), its own lane, and the levels of the
    first that it begins with. tables: int32 [S, 10, N + 1], like table_of, without RANK, LINE, ROW.
    """

    size: Size
    found: Any
    copies: Any
    tables: Any

    @classmethod
    def made(cls, size: Size, sequences: int, put: Callable[[Ints], Any]) -> Shapes:
        """Returns the arrays of S sequences; put: brings one to the device."""
        found = np.zeros((sequences, SEAT + 1, size.most_found), np.int32)
        copies = np.full((sequences * WIDTH, 3), NOBODY, np.int32)
        tables = np.zeros((sequences, KEPT + 1, size.nodes + 1), np.int32)
        tables[:, LANE] = NOBODY
        return cls(size, put(found), put(copies), put(tables))


def likeliest(sure: NDArray[np.float32], count: int) -> Index:
    """Returns the `count` largest of a vector, largest first; of equal ones the first."""
    return np.argsort(-sure, kind="stable")[:count]


def find(shapes: Shapes, s: int, level: int, tokens: Ints, logits: NDArray[np.float32]) -> Index:
    """Finds sequence s's nodes of a level; returns those that the draft computes, likeliest first.

    tokens, logits: the candidates of the forward before, [WIDTH, CHOICES]; [1, CHOICES] in level 1.
    """
    size, found = shapes.size, shapes.found[s]
    first, stop = size.first(level), size.first(level + 1)
    sure = found[SURE].view(np.float32)
    above, before = np.array([NOBODY]), np.zeros(1, np.float32)
    if level > 1:
        seats = found[SEAT, size.first(level - 1) : first]
        above = np.array([int(np.flatnonzero(seats == w)[0]) for w in range(WIDTH)])
        above += size.first(level - 1)
        before = sure[above]
    with np.errstate(invalid="ignore", over="ignore"):
        own = logits - logits[:, :1]
        own -= np.log(np.exp(own).sum(axis=1, keepdims=True))
        each = before[:, None] + np.minimum(own, 0)
    found[TOKEN, first:stop], found[ABOVE, first:stop] = tokens.ravel(), np.repeat(above, CHOICES)
    sure[first:stop] = np.where(each > _LEAST, each, _LEAST).ravel()
    chosen = first + likeliest(sure[first:stop], WIDTH)
    found[SEAT, first:stop] = NOBODY
    if level < size.depth:
        found[SEAT, chosen] = np.arange(WIDTH)
    return chosen


def choose(shapes: Shapes, s: int, parents: Ints, tokens: Ints) -> None:
    """Writes the parents and the tokens of sequence s's N likeliest nodes, and where the draft
    keeps their paths; both int32 [N]."""
    size, found, table = shapes.size, shapes.found[s], shapes.tables[s]
    kept = np.sort(likeliest(found[SURE].view(np.float32), size.nodes))
    firsts = [size.first(level) for level in range(1, size.depth + 1)]
    above = found[ABOVE, kept]
    levels = np.searchsorted(firsts, np.arange(size.most_found), side="right")
    parents[:] = np.where(above < 0, 0, 1 + np.searchsorted(kept, above))
    tokens[:] = found[TOKEN, kept]
    table[[KEPT_LANE, KEPT], 0] = NOBODY, 0
    at = np.where(found[SEAT, kept] >= 0, kept, above)  # the last node that the draft computed
    is_kept = at >= 0
    table[KEPT, 1:] = np.where(is_kept, levels[at], 0)
    lanes = WIDTH * (levels[at] - 1) + found[SEAT, at]
    table[KEPT_LANE, 1:] = np.where(is_kept, lanes, NOBODY)


def plant(table: Ints, parents: Ints) -> None:
    """Writes the table of a tree of these parents, all of whose nodes are stored in lanes."""
    depths = np.zeros(len(parents) + 1, np.int64)
    for node, parent in enumerate(parents.tolist(), 1):
        depths[node] = depths[parent] + 1
    lanes, forks, spans = lay_out(parents.tolist(), depths, 1)
    table[PARENT] = [NOBODY, *parents]
    table[[LEVEL, LANE, FORK]], table[SPANS] = (depths, lanes, forks), SPAN * (spans - 1)
