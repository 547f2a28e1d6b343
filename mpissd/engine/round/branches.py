"""Branches, which are drafts that grow together, and the speculation cache, which keeps them.

A branch is a draft of a sequence: a chain of K tokens, or a tree of K levels. After a miss it
continues the committed tokens; otherwise it is grown while the target verifies, for an outcome that
the verification may have. All branches grow by one level in each step, which is one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import LIVE, Ints, Outcome, Speculation
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.tree import CHAIN, Shape

Index = NDArray[np.int64]
Distribution = Any  # float32 [V] on the host, or a row that is kept on a device
TRUNK = -1  # the lane of a branch that continues the committed tokens in the cache itself


class BranchPlaces(NamedTuple):
    """The places of n branches in the draft's KV cache, each int64 [n].

    slots: the cache slot of the branch's sequence. starts: the position of the token that the
    branch's first step reads; for a tree, the position of the last committed token. lanes: the
    number of the scratch memory that stores the branch (for a tree: its first place in the
    BranchLayout); TRUNK if the branch is stored in the sequence's slot.
    """

    slots: Index
    starts: Index
    lanes: Index

    @property
    def are_trunk(self) -> bool:
        """Whether the branches continue the committed tokens in their slots; all do or none."""
        return bool(len(self.lanes)) and self.lanes[0] == TRUNK


class Branches:
    """n branches that grow together; row i of every array belongs to branch i.

    rows: the sequence's batch row, int64 [n]. nodes, ranks: the outcome that the branch is grown
    for, int32 [n]: the number of accepted tokens (in a tree: the node where the accepted path
    ends), and the rank from 0 of the bonus token among the candidates there. first: the token that
    the branch continues, int32 [n]. tokens: the drafted tokens, int32 [n, N], of which `steps`
    levels are drafted so far. places: None for a model without a KV cache.
    If tokens are sampled, `states` holds what draws them (oracle.sampled.DrawState), one for each
    row of the next step. q, float64 [n, N]: the probability with which each token was drawn.
    drawn_from: by branch, the distribution of each token, None for a token with q = 1. If tokens
    are not sampled, states and q are None.
    """

    def __init__(
        self,
        rows: Index,
        nodes: Ints,
        ranks: Ints,
        first: Ints,
        tokens: Ints,
        *,
        shape: Shape = CHAIN,
        places: BranchPlaces | None = None,
        states: list[Any] | None = None,
    ) -> None:
        self.rows = rows
        self.nodes = nodes
        self.ranks = ranks
        self.first = first
        self.tokens = tokens
        self.shape = shape
        self.places = places
        self.states = states
        self.steps = 0
        self.q = None if states is None else np.ones(tokens.shape)
        self.drawn_from: list[list[Distribution | None]] = [[] for _ in states or ()]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def inputs(self) -> Ints:
        """The tokens that the next step reads, int32 [rows]: the last token of each branch (in a
        tree: the tokens of the last level that have children)."""
        if not self.steps:
            return self.first
        column = self.shape.reads[self.steps]
        return self.tokens[:, column] if type(column) is int else self.tokens[:, column].reshape(-1)

    def begin(self, first: Ints) -> None:
        """Sets the tokens that the branches continue, if they were unknown at first."""
        self.first = first

    def advance(self, levels: int = 1) -> None:
        """Counts `levels` more levels as drafted, whose tokens are in `tokens` already."""
        self.steps += levels

    def append(self, level: Ints) -> None:
        """Appends a token to every branch: level, int32 [n]. For chains that are not sampled."""
        self.tokens[:, self.steps] = level
        self.steps += 1

    def take(self, best: Ints) -> None:
        """Appends a level of the likeliest tokens. best: the likeliest tokens after each row of the
        step, best first, [rows, at least as many as a node has children]."""
        shape = self.shape
        level = self.steps
        columns = slice(shape.ends[level], shape.ends[level + 1])
        ranks = shape.ranks[columns.start + 1 : columns.stop + 1]
        ranked = best.reshape(len(self), -1, best.shape[1])
        self.tokens[:, columns] = ranked[:, shape.lines[level], ranks]
        for distributions in self.drawn_from:  # a token with q = 1 has no distribution
            distributions += [None] * len(ranks)
        self.steps += 1
        if self.states and shape.width > 1 and self.steps < shape.depth:
            firsts = self.states[:: len(shape.inner[level])]  # a state of each branch
            self.states = [state for state in firsts for _ in shape.inner[self.steps]]

    def record(
        self, branch: int, column: int, token: int, q: float, row: Distribution | None
    ) -> None:
        """Stores a branch's token, which was drawn with probability q from `row`."""
        assert self.q is not None, "branches without draws"
        self.tokens[branch, column] = token
        self.q[branch, column] = q
        self.drawn_from[branch].append(row if q < 1 else None)

    def follow(self, states: list[Any]) -> None:
        """Ends a step whose tokens are stored. states: what draws the next step's tokens."""
        self.states = states
        self.steps += 1

    def skip(self, branch: int, tokens: list[int]) -> bool:
        """Drops the first tokens of a branch, because a grammar has forced `tokens` in their place.
        Returns whether both are equal."""
        count = len(tokens)
        self.tokens[branch] = np.roll(self.tokens[branch], -count)
        if self.q is not None:
            self.q[branch] = np.roll(self.q[branch], -count)
            self.drawn_from[branch] = self.drawn_from[branch][count:]
        return bool(self.tokens[branch, -count:].tolist() == tokens)

    def keep(self, branches: Sequence[int], rows: Sequence[int]) -> None:
        """Keeps only the branches with these indices, as drafts of the batch rows `rows`."""
        chosen = np.array(branches, np.int64)
        width = len(self.states or ()) // max(1, len(self))  # states of a branch
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
        """Fills every branch up to `levels` levels without a forward: missing tokens repeat `first`
        with q = 1."""
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
        """Returns the distributions of those of a branch's first `count` tokens that have q < 1."""
        drawn_from = self.drawn_from[branch][:count] if self.drawn_from else ()
        return [row for row in drawn_from if row is not None]


class SpeculationCache:
    """The branches that were grown for predicted outcomes of a verification.

    A key is (round, request id, epoch, k, t*): the round accepted k tokens of the sequence and
    emitted the bonus token t* after them (Kumar, Dao, May 2026, §3); in a tree k is the node where
    the accepted path ends. The cache holds branches of one round. branches: None if there are none.
    fan_outs: how many branches were grown after each k.
    """

    def __init__(self) -> None:
        self.branches: Branches | None = None
        self.fan_outs = FanOuts()
        self._numbers: dict[tuple[int, int, int, int, int], int] = {}  # of the branches, by key

    def clear(self) -> None:
        """Drops all branches, so that every outcome misses."""
        self.branches = None
        self._numbers = {}

    def fill(
        self, identity: Ints, speculation: Speculation, branches: Branches, fan_outs: FanOuts
    ) -> None:
        """Replaces the contents by `branches`, grown for outcomes of verifying `speculation`.
        identity: the ids and epochs of the batch's sequences (Batch.identity)."""
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
        """Returns, for each of the `count` live sequences, the index of the branch that was grown
        for the sequence's outcome, or None (a miss)."""
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
        """Keeps only the branches that were hit and returns them, or None if all outcomes missed.
        found: the result of `lookup`."""
        rows = [row for row, branch in enumerate(found) if branch is not None]
        if not rows or self.branches is None:
            return None
        self.branches.keep([branch for branch in found if branch is not None], rows)
        return self.branches
