"""Tables of draft trees, for rounds that a GPU runs without the host (device_rounds.py).

A *dynamic* tree has another shape in each round [Li et al. 2024, EAGLE-2]. In each level the draft
computes the WIDTH likeliest nodes of the level before, and the CHOICES likeliest tokens after each
of them become new nodes. Of all these nodes the N likeliest are verified. A node's probability is
the product of the probabilities on its path, softmax over the CHOICES logits. Its parent is at
least as likely, so the N likeliest form a tree. A parallel draft reads mask tokens after the last
token, and so has the candidates of all levels after one forward; all nodes of a level have the same
candidates. `find`, `choose`, `search` and `plant` compute on host arrays what dynamic.cu computes
on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.law.tree import Index, Shape, lay_out
from mpissd.engine.model.forwards import SPAN

PLANT = -1  # stage number of the kernel that runs `plant` before the target's forward
COPY = -2  # stage number of the kernel that drafts by a prompt lookup, there as well
WIDTH = 4  # the most nodes of a dynamic tree's level that the draft computes
CHOICES = 8  # number of children (likeliest next tokens) of a node that the draft computes
MOST_LEVELS = 16
MOST_NODES = 64
TOKEN, ABOVE, SURE, NEXT_ROW = range(4)  # rows of Shapes.nodes
PARENT, LEVEL, RANK, LINE, ROW, LANE, SPANS, FORK, KEPT_LANE, KEPT = range(10)  # rows of table_of
NOBODY = -1  # marks an absent value in arrays, such as no parent
_LEAST = np.float32(-1e30)  # floor of log probabilities; also replaces those that are not finite


def table_of(tree: Shape, masks: int = 0) -> Ints:
    """Returns a draft tree as the kernels between two forwards read it: int32 [10, N + 1], with a
    column for the root (the last committed token), then one for each of the N drafted nodes. A
    value that does not exist is −1 (NOBODY). The rows are:

        PARENT, LEVEL, RANK  the node's parent, its level, and its rank among its siblings
        LINE, ROW            which of one sequence's rows in the draft's forwards computes the
                             node's parent, and which computes the node
        LANE, SPANS          the lane (scratch KV memory) that stores the node in the target's
                             cache, and SPAN · the number of further lanes that store it
        FORK                 the level at which the node's path enters a lane
        KEPT_LANE, KEPT      the draft's lane that holds the node's path, and how many of the
                             path's nodes are there

    masks: the number of mask tokens of a parallel draft, which computes and stores no node.
    """
    table = np.full((KEPT + 1, len(tree.levels)), NOBODY, np.int32)
    table[PARENT, 1:] = tree.parents
    table[LINE, 1:] = np.concatenate([[], *tree.lines])
    table[LINE, tree.depths == 1] = 1  # the root is in row 1 of the draft's first forward
    for inner in tree.inner:
        table[ROW, inner] = np.arange(len(inner))
    if masks:  # In the draft's only forward, row number masks + j computes level j.
        table[LINE, 1:] = masks + tree.depths[1:]
    table[[LEVEL, RANK, LANE, FORK]] = tree.depths, tree.ranks, tree.lanes, tree.forks
    table[SPANS] = SPAN * (tree.spans - 1)
    table[[KEPT_LANE, KEPT]] = tree.lanes, tree.depths - tree.forks
    if masks:
        table[[ROW, KEPT_LANE]] = NOBODY
    return table


@dataclass(frozen=True)
class Size:
    """Sizes of dynamic draft trees: N = `nodes` drafted tokens in at most K = `depth` levels."""

    nodes: int
    depth: int

    @property
    def most_found(self) -> int:
        """The number of candidate nodes on all levels; the N likeliest become the tree."""
        return self.first(self.depth + 1)

    @property
    def draft_lanes(self) -> int:
        """The draft's lanes (scratch KV memory) a sequence: one for each node it computes."""
        return WIDTH * (self.depth - 1)

    def first(self, level: int) -> int:
        """Returns the index of a level's first node among all candidates; levels count from 1."""
        return 0 if level == 1 else CHOICES * (1 + WIDTH * (level - 2))


@dataclass(frozen=True)
class Shapes:
    """The draft trees of S sequences in device arrays, if trees change shape each round; −1
    (NOBODY) is an absent value. nodes: int32 [S, 4, size.most_found], the candidate nodes found so
    far, level by level. Its rows: TOKEN; ABOVE, the parent (NOBODY: the last committed token);
    SURE, the log probability (float32 bits); NEXT_ROW, the row in the draft's next forward. copies:
    int32 [S · WIDTH, 3], for each row of that forward its parent's lane (scratch KV memory), its
    own lane, and how many levels to copy to it. tables: int32 [S, 10, N + 1], the chosen trees as
    table_of returns them, without RANK, LINE and ROW."""

    size: Size
    nodes: Any
    copies: Any
    tables: Any

    @classmethod
    def made(cls, size: Size, sequences: int, put: Callable[[Ints], Any]) -> Shapes:
        """Allocates the arrays for `sequences` trees. put: copies an array to the device."""
        nodes = np.zeros((sequences, NEXT_ROW + 1, size.most_found), np.int32)
        copies = np.full((sequences * WIDTH, 3), NOBODY, np.int32)
        tables = np.zeros((sequences, KEPT + 1, size.nodes + 1), np.int32)
        tables[:, [LANE, KEPT_LANE]] = NOBODY
        return cls(size, put(nodes), put(copies), put(tables))


def likeliest(sure: NDArray[np.float32], count: int) -> Index:
    """Returns the indices of the `count` largest values, the largest first."""
    return np.argsort(-sure, kind="stable")[:count]


def find(shapes: Shapes, s: int, level: int, tokens: Ints, logits: NDArray[np.float32]) -> Index:
    """Adds the nodes of one level to sequence s's draft tree, whose shape changes each round.
    Returns the indices of the nodes to compute next, likeliest first. tokens, logits: the likeliest
    tokens after each node computed last, [WIDTH, CHOICES]; in level 1 [1, CHOICES]."""
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
    logs = _sums(before[:, None], _logs(logits))
    nodes[TOKEN, first:stop] = tokens.ravel()
    nodes[ABOVE, first:stop] = np.repeat(above, CHOICES)
    sure[first:stop] = logs.ravel()
    chosen = first + likeliest(sure[first:stop], WIDTH)
    nodes[NEXT_ROW, first:stop] = NOBODY
    if level < size.depth:
        nodes[NEXT_ROW, chosen] = np.arange(WIDTH)
    return chosen


def choose(shapes: Shapes, s: int, parents: Ints, tokens: Ints) -> None:
    """Chooses the N likeliest of the candidate nodes found for sequence s, which become its draft
    tree. Writes their `parents` and `tokens`, int32 [N], and writes to shapes.tables which of the
    draft's lanes (scratch KV memory) hold their paths."""
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
    at = np.where(nodes[NEXT_ROW, kept] >= 0, kept, above)  # the node or its parent
    is_kept = at >= 0
    table[KEPT, 1:] = np.where(is_kept, levels[at], 0)
    lanes = WIDTH * (levels[at] - 1) + nodes[NEXT_ROW, at]
    table[KEPT_LANE, 1:] = np.where(is_kept, lanes, NOBODY)


def search(logits: NDArray[np.float32], tokens: Ints, parents: Ints, chosen: Ints) -> None:
    """Chooses the N likeliest nodes of a tree if a level's candidates are the same after every
    node. logits, tokens: each level's candidates and their logits, [K, CHOICES], the likeliest
    first. Writes the nodes' `parents` and tokens (`chosen`), int32 [N], the likeliest node first.

    Each chosen node, and the root, offers its likeliest child that is not chosen yet. The likeliest
    of the offered children is chosen next; of equal ones, the child of the node chosen first.
    """
    logs = _logs(logits)
    count = len(parents) + 1
    # By chosen node: its log probability, and that of its likeliest child not chosen yet.
    sure, opened = np.full((2, count), -np.inf, np.float32)
    # By chosen node: that child's parent, and the child's index in the flattened `logs`.
    above, places = np.zeros((2, count), np.int64)
    sure[0] = 0
    for number in range(count):
        if number:
            at = int(opened.argmax())
            sure[number] = opened[at]
            parents[number - 1] = above[at]
            level, rank = divmod(int(places[at]), CHOICES)
            chosen[number - 1] = tokens[level, rank]
            places[at] += 1
            is_last = rank == CHOICES - 1
            opened[at] = -np.inf if is_last else _sums(sure[above[at]], logs[level, rank + 1])
        child = level + 1 if number else 0
        if child < len(logs):
            above[number] = number
            places[number] = child * CHOICES
            opened[number] = _sums(sure[number], logs[child, 0])


def searched(logits: NDArray[np.float32], nodes: int) -> tuple[Ints, Ints]:
    """Runs `search` for n trees of `nodes` nodes. logits: of their candidates, [n, K, CHOICES].
    Returns the nodes' parents, and their ranks among their levels' candidates, int32 [n, nodes]."""
    parents, ranks = np.zeros((2, len(logits), nodes), np.int32)
    candidates = np.tile(np.arange(CHOICES, dtype=np.int32), (logits.shape[1], 1))
    for tree in zip(logits, parents, ranks, strict=True):
        search(tree[0], candidates, *tree[1:])
    return parents, ranks


def accepted(parents: Ints, tokens: Ints, true: NDArray[np.integer[Any]]) -> Index:
    """Returns how many of the target's next tokens lie on a path of each of n trees, [n]. parents,
    tokens: of the N nodes of each tree, whose parents come first, [n, N]. true: the next tokens,
    at least one more than the trees have levels, [n, K + 1]."""
    rows = np.arange(len(true))
    node, depth = np.zeros((2, len(true)), np.int64)
    for number in range(parents.shape[1]):
        is_next = (parents[:, number] == node) & (tokens[:, number] == true[rows, depth])
        node[is_next] = number + 1
        depth += is_next
    return depth


def _logs(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the log softmax, at most 0, of logits [rows, candidates], the largest first."""
    with np.errstate(invalid="ignore", over="ignore"):
        logs = logits - logits[:, :1]
        logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
        return np.asarray(np.minimum(logs, 0))


def _sums(before: Any, logs: Any) -> Any:
    with np.errstate(invalid="ignore", over="ignore"):
        logs = before + logs
        return np.where(logs > _LEAST, logs, _LEAST)


def plant(table: Ints, parents: Ints) -> None:
    """Fills in a draft tree's table (see table_of). parents: int32 [N], the parent of each node 1 …
    N (0: the root). The target stores all these nodes in lanes, scratch KV memory."""
    depths = np.zeros(len(parents) + 1, np.int64)
    for node, parent in enumerate(parents.tolist(), 1):
        depths[node] = depths[parent] + 1
    lanes, forks, spans = lay_out(parents.tolist(), depths, 1)
    table[PARENT] = [NOBODY, *parents]
    table[[LEVEL, LANE, FORK]] = (depths, lanes, forks)
    table[SPANS] = SPAN * (spans - 1)
