"""Branches, which are drafts that grow together, and the speculation cache, which finds them.

A branch is a draft of a sequence: a chain of K tokens, or a tree of K levels. It is grown while the
target verifies, for one possible outcome of the verification (number of accepted tokens and bonus
token); or, after a cache miss, it continues the committed tokens. Each forward (step) of the draft
adds one level to all branches.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import LIVE, Ints, Outcome, Speculation
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.tree import CHAIN, Shape

Index = NDArray[np.int64]
Distribution = Any  # a float32 array over the vocabulary, or a handle of a row that the GPU keeps
TRUNK = -1  # the lane number of a branch that is stored in its sequence's slot, not in scratch


class BranchPlaces(NamedTuple):
    """Where the draft's KV cache stores n branches; every array is int64 [n].

    slots: the cache slot of the branch's sequence. starts: the position of the token that the
    branch's first forward reads; for a tree, of the last committed token. lanes: the number of the
    scratch memory that stores the branch (for a tree: its first place in the BranchLayout), or
    TRUNK if the branch is stored in the sequence's slot.
    """

    slots: Index
    starts: Index
    lanes: Index

    @property
    def are_trunk(self) -> bool:
        """Whether all branches are stored in their sequences' slots; else all are in scratch."""
        return bool(len(self.lanes)) and self.lanes[0] == TRUNK


@dataclass(eq=False)
class Branches:
    """n branches (drafts of sequences) that grow together; row i of every array is branch i.

    rows: the row of the branch's sequence in the batch, int64 [n]. nodes: the number of accepted
    tokens that the branch is grown for (in a tree: the node where the accepted path ends), int32
    [n]. ranks: the rank from 0 of the branch's bonus token among the candidates after these
    accepted tokens, int32 [n]. first: the token that the branch continues, int32 [n]. tokens: the N
    drafted tokens of each branch, int32 [n, N], of which `steps` levels are drafted so far. shape:
    the chain or tree. places: where K and V are stored (None: the model has no KV cache). Only if
    tokens are sampled: states: what draws the tokens (oracle.sampled.DrawState), one for each row
    of the next forward. q: the probability with which each token was drawn, float64 [n, N].
    drawn_from: by branch, the distribution of each token (None for a token with q = 1). trees: if
    recorded trees that change shape each round replace the chains, the parents and the tokens of
    their nodes, int32 [n, N] each.
    """

    rows: Index
    nodes: Ints
    ranks: Ints
    first: Ints
    tokens: Ints
    _: KW_ONLY
    shape: Shape = CHAIN
    places: BranchPlaces | None = None
    states: list[Any] | None = None
    trees: tuple[Ints, Ints] | None = None

    def __post_init__(self) -> None:
        self.steps = 0
        self.q = None if self.states is None else np.ones(self.tokens.shape)
        self.drawn_from: list[list[Distribution | None]] = [[] for _ in self.states or ()]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def inputs(self) -> Ints:
        """The tokens that the next draft forward reads, int32 [rows]: the last token of each branch
        (in a tree: the tokens of the last level that have children)."""
        if not self.steps:
            return self.first
        column = self.shape.reads[self.steps]
        return self.tokens[:, column] if type(column) is int else self.tokens[:, column].reshape(-1)

    def advance(self, levels: int = 1) -> None:
        """Counts `levels` more levels as drafted; the attribute `tokens` already holds them."""
        self.steps += levels

    def append(self, level: Ints) -> None:
        """Appends one greedy token to each of n chains. level: the tokens, int32 [n]."""
        self.tokens[:, self.steps] = level
        self.steps += 1

    def take(self, best: Ints) -> None:
        """Appends one level, made of the likeliest tokens, to every branch. best: the likeliest
        tokens after each row of the draft forward, likeliest first, int32 [rows, at least a node's
        children]."""
        shape = self.shape
        level = self.steps
        columns = slice(shape.ends[level], shape.ends[level + 1])
        ranks = shape.ranks[columns.start + 1 : columns.stop + 1]
        ranked = best.reshape(len(self), -1, best.shape[1])
        self.tokens[:, columns] = ranked[:, shape.lines[level], ranks]
        for distributions in self.drawn_from:  # None, because these tokens have q = 1
            distributions += [None] * len(ranks)
        self.steps += 1
        if self.states and shape.width > 1 and self.steps < shape.depth:
            firsts = self.states[:: len(shape.inner[level])]  # one state of each branch
            self.states = [state for state in firsts for _ in shape.inner[self.steps]]

    def record(
        self, branch: int, column: int, token: int, q: float, row: Distribution | None
    ) -> None:
        """Stores a token, drawn with probability q from the distribution `row`, in its branch.
        branch: its index. column: the token's place among the branch's tokens."""
        assert self.q is not None, "branches without draws"
        self.tokens[branch, column] = token
        self.q[branch, column] = q
        self.drawn_from[branch].append(row if q < 1 else None)

    def follow(self, states: list[Any]) -> None:
        """Counts one more level as drafted, after `record` has stored its sampled tokens. states:
        what draws the tokens of the next level."""
        self.states = states
        self.steps += 1

    def skip(self, branch: int, tokens: list[int]) -> bool:
        """Drops the first tokens of a branch, because a grammar has forced and committed as many
        tokens (`tokens`) meanwhile. Returns whether the dropped tokens equal the forced ones."""
        count = len(tokens)
        self.tokens[branch] = np.roll(self.tokens[branch], -count)
        if self.q is not None:
            self.q[branch] = np.roll(self.q[branch], -count)
            self.drawn_from[branch] = self.drawn_from[branch][count:]
        return bool(self.tokens[branch, -count:].tolist() == tokens)

    def keep(self, branches: Sequence[int], rows: Sequence[int]) -> None:
        """Keeps only the branches with the indices `branches`. rows: the batch rows of these
        branches, which change when sequences join or leave."""
        chosen = np.array(branches, np.int64)
        width = len(self.states or ()) // max(1, len(self))  # the number of states of a branch
        self.rows = np.array(rows, np.int64)
        self.nodes = self.nodes.take(chosen)
        self.ranks = self.ranks.take(chosen)
        self.first = self.first.take(chosen)
        self.tokens = self.tokens.take(chosen, axis=0)
        if self.places is not None:
            self.places = BranchPlaces(*(column[chosen] for column in self.places))
        if self.states is not None and self.q is not None:
            states = self.states
            self.q = self.q.take(chosen, axis=0)
            self.states = [state for n in branches for state in states[n * width : (n + 1) * width]]
            self.drawn_from = [self.drawn_from[n] for n in branches]

    def pad(self, levels: int) -> None:
        """Fills every branch up to `levels` levels without a forward, by repeating the token that
        it continues. Used if newer weights gave no valid logits."""
        if self.steps < levels:
            start = self.shape.ends[self.steps]
            end = self.shape.ends[levels]
            if self.q is not None:
                self.q[:, start:end] = 1.0
            for distributions in self.drawn_from:
                distributions[start:] = [None] * (end - start)
            self.tokens[:, start:end] = self.first[:, None]
            self.steps = levels

    def distributions(self, branch: int, count: int) -> list[Distribution]:
        """Returns the distributions from which the first `count` tokens of a branch were drawn.
        Tokens with q = 1 have none and are left out."""
        drawn_from = self.drawn_from[branch][:count] if self.drawn_from else ()
        return [row for row in drawn_from if row is not None]


class SpeculationCache:
    """Finds a ready draft by what the target decided: holds the branches grown for one
    verification.

    A branch is found by its key (round, request id, epoch, k, t*): in that round, the target
    accepts k tokens of the sequence (in a tree: the path to node k) and emits the bonus token t*
    after them (Kumar, Dao, May 2026, §3). fan_outs: how many branches were grown for each k.
    """

    def __init__(self) -> None:
        self.branches: Branches | None = None
        self.fan_outs = FanOuts()
        self._numbers: dict[tuple[int, int, int, int, int], int] = {}  # key → index of branch

    def clear(self) -> None:
        """Empties the cache, so that every outcome is a miss."""
        self.branches = None
        self._numbers = {}

    def fill(
        self, identity: Ints, speculation: Speculation, branches: Branches, fan_outs: FanOuts
    ) -> None:
        """Replaces the contents by `branches`, grown for outcomes of verifying `speculation`.
        identity: (request id, epoch, …) of each sequence of the batch, [b, 5]. fan_outs: how many
        branches were grown for each number of accepted tokens."""
        self.branches = branches
        self.fan_outs = fan_outs
        names = identity[:, :2].tolist()
        columns = (branches.rows, branches.nodes, branches.first)
        keys = zip(*(column.tolist() for column in columns), strict=True)
        self._numbers = {
            (speculation.round, *names[row], node, token): branch
            for branch, (row, node, token) in enumerate(keys)
        }

    def lookup(self, outcome: Outcome, count: int) -> list[int | None]:
        """Looks up the outcome of every sequence that goes on. Returns, for each of these `count`
        sequences, the index of the branch that was grown for its outcome, or None (a miss)."""
        if not self._numbers:
            return [None] * count
        get = self._numbers.get
        round_ = outcome.round
        return [
            None if event else get((round_, request_id, epoch, k, token))
            for request_id, epoch, event, k, token in outcome.rows.tolist()
            if LIVE[event]
        ]

    def keep(self, found: Sequence[int | None]) -> Branches | None:
        """Drops the branches that were not hit and returns the others, or None if none was hit.
        found: by batch row, the index in the cache of the branch that was hit, or None (a miss)."""
        rows = [row for row, branch in enumerate(found) if branch is not None]
        if not rows or self.branches is None:
            return None
        self.branches.keep([branch for branch in found if branch is not None], rows)
        return self.branches
