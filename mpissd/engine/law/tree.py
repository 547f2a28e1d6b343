"""The shape of a draft: a tree of tokens; a chain is a tree whose nodes have one child.

Node 0 is the last committed token. Nodes 1 … N are the drafted tokens, level by level; the children
of a node are consecutive, the likeliest one first. So the first n drafted tokens form a tree too.
The target accepts a path from node 0; the outcome of a verification is the node at which the path
ends, and the bonus token t* that the target emits there [Miao et al. 2024, SpecInfer].

In the KV cache the *principal path*, which has only first children, is stored in the sequence's
slot, as a chain is. Each other leaf has a *lane*: scratch KV memory for the part of its path that
is off the principal path. A node on the paths of several of these leaves is stored in all their
lanes, which are consecutive.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Outcome, Speculation
from mpissd.engine.law.acceptance import HitLaw

Index = NDArray[np.int64]
Nodes = Sequence[int]
MOST_NODES = 256
MOST_CHILDREN = 16


class Shape:
    """The shape of a draft: a tree, or a chain, of N tokens. Node 0 is the last committed token.

    parents: the parent of each of the nodes 1 … N, ascending. Attributes indexed by node:
    children, the likeliest one first; paths, the columns (node − 1) of the drafted tokens from the
    root to the node; depths, and levels, which is depths as a list; ranks, the node's index among
    its parent's children; lanes, the number of the first lane (scratch KV memory) that stores the
    node, −1 for the path of first children; spans, the number of lanes that store the node; forks,
    the depth at which the node's path enters a lane.

    Attributes indexed by level d: ends, the number of nodes of levels 1 … d; inner, the nodes that
    have children, which a draft forward reads; reads, the columns of these nodes' tokens (an int if
    there is one node); lines, for each node of level d + 1 the index of its parent in inner[d].
    """

    def __init__(self, parents: Sequence[int]) -> None:
        """Computes the attributes. `parents` must be ascending: nodes are numbered by level."""
        count = len(parents) + 1
        above = np.array([0, *parents])
        children = [list[int]() for _ in range(count)]
        self.paths = [tuple[int, ...]()]
        for node, parent in enumerate(parents, 1):
            children[parent].append(node)
            self.paths.append((*self.paths[parent], node - 1))
        self.parents = tuple(parents)
        self.children = [tuple(nodes) for nodes in children]
        self.depths: Index = np.array([len(path) for path in self.paths])
        self.ranks: Index = np.arange(count) - [min(children[of], default=0) for of in above]
        self.ranks[0] = 0
        self.levels: list[int] = self.depths.tolist()
        self.depth = int(self.depths[-1])
        self.width = max(map(len, children))
        levels = [np.flatnonzero(self.depths == d) for d in range(self.depth + 1)]
        self.ends = [int(level[-1]) for level in levels]
        self.inner: list[Index] = [np.unique(above[level]) for level in levels[1:]]
        self.reads = [int(of[0]) - 1 if len(of) == 1 else of - 1 for of in self.inner]
        pairs = zip(self.inner, levels[1:], strict=True)
        self.lines: list[Index] = [np.searchsorted(inner, above[level]) for inner, level in pairs]
        self.lanes, self.forks, self.spans = lay_out(parents, self.depths, count)
        self.num_lanes = _count(self.lanes, self.spans)
        self.is_chain = not self.num_lanes

    def walk(self, drafts: Nodes, best: Nodes, at: Nodes, count: int) -> int:
        """Returns the node at which the path that a greedy target accepts ends. drafts: the drafted
        tokens. best[at[n]]: the target's token after node n. count: how many nodes have tokens."""
        node = 0
        children = self.children
        while True:
            token = best[at[node]]
            for child in children[node]:
                if child <= count and drafts[child - 1] == token:
                    node = child
                    break
            else:
                return node

    def as_chains(self, speculation: Speculation, outcome: Outcome) -> tuple[Speculation, Outcome]:
        """Converts a round verified with this tree to one with chains, for code that knows no
        trees: each sequence keeps the tokens of its accepted path, and the outcome holds their
        number, not a node."""
        if self.is_chain:
            return speculation, outcome
        rows = outcome.rows.copy()
        nodes = outcome.num_accepted.tolist()
        rows[:, 3] = self.depths[nodes]
        version = speculation.version
        chains = Speculation.empty(speculation.round, len(rows), self.depth, version=version)
        chains.rows[:, : Speculation.HEAD] = speculation.rows[:, : Speculation.HEAD]
        chains.num_draft[...] = self.depths[speculation.num_draft]
        for n, node in enumerate(nodes):
            path = list(self.paths[node])
            chains.tokens[n, : len(path)] = speculation.tokens[n, path]
        return chains, Outcome(outcome.round, rows)

    def chances(self, law: NDArray[np.float64]) -> list[float]:
        """Returns the probability that the path to each node is accepted. law[d, r]: P(the child of
        rank r at level d + 1 is the target's token, given that its parent is accepted)."""
        chances = [1.0]
        for node, parent in enumerate(self.parents, 1):
            rate = law[self.levels[node] - 1, self.ranks[node]]
            chances.append(chances[parent] * float(rate))
        return chances

    def rates(self, law: NDArray[np.float64]) -> tuple[float, ...]:
        """Returns, for each level, P(a token of the level is accepted, given that one of the level
        before was). law: as for `chances`."""
        reached = np.bincount(self.depths, self.chances(law)).tolist()
        return tuple(after / before if before else 0.0 for before, after in pairwise(reached))


class BranchLayout:
    """Where a draft's KV cache stores a draft tree and the branches drafted ahead after its nodes.

    Each branch is a tree of the same shape, of which only the `size` nodes that have children are
    stored; with a parallel draft, it is a chain of a token and `masks` mask tokens. Stored tokens
    are numbered by *places*: first the nodes of the tree, then branch after branch. Indexed by
    place: depths, the depth in the tree; lanes, spans, forks: where the token is in scratch memory,
    as in Shape. Indexed by node: firsts, the first place of the node's first branch; inner, the
    node's index among the places of a branch (−1: not stored).
    """

    def __init__(self, tree: Shape, fan_out: Sequence[int], masks: int = 0) -> None:
        """tree: the shape of the tree and of its branches. fan_out: the number of branches after
        each node. masks: the number of mask tokens that a parallel draft reads, else 0."""
        count = len(tree.children)
        nodes = [node for node, children in enumerate(tree.children) if children]
        branch = tree
        if masks:
            branch = Shape(range(masks))
            nodes = list(range(masks + 1))
        self.size = len(nodes)
        self.inner = np.full(len(branch.children), -1)
        self.inner[nodes] = np.arange(self.size)
        counts = np.asarray(fan_out)
        self.firsts: Index = count + (np.cumsum(counts) - counts) * self.size
        parents = list(tree.parents)
        depths = list(tree.levels)
        for node in np.repeat(np.arange(count), counts).tolist():
            root = len(parents) + 1
            parents.append(node)
            parents += [root + int(self.inner[branch.parents[inner - 1]]) for inner in nodes[1:]]
            depths += [tree.levels[node] + 1 + branch.levels[inner] for inner in nodes]
        self.depths: Index = np.array(depths)
        self.lanes, self.forks, self.spans = lay_out(parents, self.depths, count)
        self.num_lanes = _count(self.lanes, self.spans)


def lay_out(parents: Sequence[int], depths: Index, end: int) -> tuple[Index, Index, Index]:
    """Assigns lanes, which are numbered scratch KV memory, to the nodes of a draft tree. Returns
    three arrays indexed by node: the first lane that stores the node (−1: none), the depth at which
    its path enters a lane, and the number of its lanes. parents: of nodes 1 … N. depths: of nodes 0
    … N. end: nodes from this number on get lanes also if they are first children."""
    waiting = set(parents)  # the nodes whose first child is not laid out yet
    leaves = [int(node not in waiting) for node in range(len(parents) + 1)]
    for node in range(len(parents), 0, -1):
        leaves[parents[node - 1]] += leaves[node]
    free = [0] * len(leaves)  # by node, the lane of its next child
    lanes, forks, spans = (np.full(len(leaves), value) for value in (-1, 0, 1))
    for node, parent in enumerate(parents, 1):
        is_side = lanes[parent] >= 0
        forks[node] = forks[parent] if is_side else depths[node]
        is_first = parent in waiting
        waiting.discard(parent)
        if is_side or not is_first or node >= end:
            of = parent if is_side else 0
            lanes[node] = free[node] = free[of]
            spans[node] = leaves[node]
            free[of] += leaves[node]
    return lanes, forks, spans


def _count(lanes: Index, spans: Index) -> int:
    return int((lanes + spans).max()) if (lanes >= 0).any() else 0


CHAIN = Shape(range(MOST_NODES))


Levels = tuple[tuple[float, ...], ...]


def positional(
    hazards: Sequence[float], hit_law: HitLaw, width: int, levels: Levels = ()
) -> NDArray[np.float64]:
    """Returns a table [K, width] whose element [d, r] is the probability that the target's token at
    level d + 1 of a draft is the draft's (r + 1)-th likeliest there, given that the path to there
    is accepted. Column 0 is `hazards`, the acceptance rates; the other columns follow from
    `hit_law`, the distribution of the bonus token's rank after a rejection. levels: if not empty,
    the measured table; columns beyond it are 0."""
    if levels:
        table = np.zeros((len(hazards), width))
        measured = np.array(levels)[: len(hazards), :width]
        table[: len(measured), : measured.shape[1]] = measured
        return table
    later = np.diff(hit_law.hit_probabilities(width - 1)[0])
    return np.array([[rate, *(1 - rate) * later] for rate in hazards])


@lru_cache(maxsize=256)
def best_shape(
    nodes: int, hazards: tuple[float, ...], hit_law: HitLaw, levels: Levels = ()
) -> Shape:
    """Returns the tree of at most `nodes` drafted tokens whose accepted path is longest on average.
    hazards: the acceptance rates by level. levels: a measured table, as for `positional`."""
    return optimal(nodes, positional(hazards, hit_law, min(nodes, MOST_CHILDREN), levels))


def optimal(nodes: int, law: NDArray[np.float64]) -> Shape:
    """Returns the tree of at most `nodes` drafted tokens whose accepted path is longest on average.

    law[d, r]: the probability that the target's token at level d + 1 is the draft's (r + 1)-th
    likeliest there; its shape [K, R] limits the depth to K and the children of a node to R. In the
    dynamic program [Chen et al. 2024, Sequoia, section 3.1], best[n] is the most tokens that n
    nodes get accepted on average in the subtrees of an accepted node's children of rank ≥ r; sizes
    holds how many of the n nodes belong to the child of rank r and its subtree.
    """
    depth, width = law.shape
    below = np.zeros(nodes + 1)
    sizes = np.zeros((depth, width, nodes + 1), np.int64)
    for d in range(depth - 1, -1, -1):
        best = np.zeros(nodes + 1)
        for r in range(width - 1, -1, -1):
            others = best
            best = np.zeros(nodes + 1)
            for n in range(1, nodes + 1):
                gains = law[d, r] * (1 + below[:n]) + others[n - 1 :: -1]
                sizes[d, r, n] = size = int(gains.argmax()) + 1
                best[n] = gains[size - 1]
        below = best
    parents = list[int]()
    level = [(0, nodes)]
    for d in range(depth):
        following = list[tuple[int, int]]()
        first = len(parents) + 1
        for parent, left in level:
            for r in range(width):
                if not left:
                    break
                size = int(sizes[d, r, left])
                parents.append(parent)
                following.append((first + len(following), size - 1))
                left -= size
        level = following
    return Shape(parents)
