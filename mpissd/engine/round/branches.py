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
    """The places of n branches in the draft's KV cache; all are int64 [n].

    slots: the cache slot of the sequence. starts: the position of the token that the branch's first
    step reads; in a tree, of the last committed token before it. lanes: the scratch memory in which
    the branch stores its keys and values (in a tree: its first place in the BranchLayout); TRUNK if
    it writes the sequence's slot.
    """

    slots: Index
    starts: Index
    lanes: Index

    @property
    def are_trunk(self) -> bool:
        """Whether the branches continue the committed tokens; all of them do or none does."""
        return bool(len(self.lanes)) and self.lanes[0] == TRUNK


class Branches:
    """n branches that grow together; row i of every array belongs to branch i.

    rows: the batch row, int64 [n]. nodes, ranks: the outcome that the branch is grown for: the
    number of accepted tokens (in a tree: the node where the accepted path ends), and the rank of
    the bonus token among the candidates there, from 0; int32 [n]. first: the token that the branch
    continues, int32 [n]. tokens: int32 [n, N], of which the first `steps` levels are drafted.
    places: None for a model without a KV cache.
    If tokens are sampled, states has what draws them (oracle.sampled), for each row of the next
    step, q [n, N] the probability with which each token was drawn, float64, and drawn_from, by
    branch, the distribution of each token, None of a certain one. Otherwise states and q are None.
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
        """The tokens that the next step reads, int32 [rows]: the last one of each branch (in a
        tree: the level's tokens that have children)."""
        if not self.steps:
            return self.first
        column = self.shape.reads[self.steps]
        return self.tokens[:, column] if type(column) is int else self.tokens[:, column].reshape(-1)

    def begin(self, first: Ints) -> None:
        """Sets the tokens that the branches continue, which were unknown until now."""
        self.first = first

    def advance(self, levels: int = 1) -> None:
        """Counts levels, whose tokens are in `tokens` already, as drafted."""
        self.steps += levels

    def append(self, level: Ints) -> None:
        """Appends a token to every branch, int32 [n]; for chains whose tokens are certain."""
        self.tokens[:, self.steps] = level
        self.steps += 1

    def take(self, best: Ints) -> None:
        """Appends a level of the likeliest tokens; best: of the step's rows, best first,
        [rows, ≥ the tree's width]."""
        shape = self.shape
        level = self.steps
        columns = slice(shape.ends[level], shape.ends[level + 1])
        ranks = shape.ranks[columns.start + 1 : columns.stop + 1]
        ranked = best.reshape(len(self), -1, best.shape[1])
        self.tokens[:, columns] = ranked[:, shape.lines[level], ranks]
        for distributions in self.drawn_from:  # a token with q = 1 has none
            distributions += [None] * len(ranks)
        self.steps += 1
        if self.states and shape.width > 1 and self.steps < shape.depth:
            firsts = self.states[:: len(shape.inner[level])]  # a state of each branch
            self.states = [state for state in firsts for _ in shape.inner[self.steps]]

    def record(
        self, branch: int, column: int, token: int, q: float, row: Distribution | None
    ) -> None:
        """Stores a token, which was drawn with probability q from the distribution `row`."""
        assert self.q is not None, "branches without draws"
        self.tokens[branch, column] = token
        self.q[branch, column] = q
        self.drawn_from[branch].append(row if q < 1 else None)

    def follow(self, states: list[Any]) -> None:
        """Ends a step whose tokens are stored; states: what draws the tokens of the next one."""
        self.states = states
        self.steps += 1

    def skip(self, branch: int, tokens: list[int]) -> bool:
        """Drops as many first tokens of a branch as a grammar has forced meanwhile; returns whether
        they equal the forced `tokens`."""
        count = len(tokens)
        self.tokens[branch] = np.roll(self.tokens[branch], -count)
        if self.q is not None:
            self.q[branch] = np.roll(self.q[branch], -count)
            self.drawn_from[branch] = self.drawn_from[branch][count:]
        return bool(self.tokens[branch, -count:].tolist() == tokens)

    def keep(self, branches: Sequence[int], rows: Sequence[int]) -> None:
        """Keeps only these branches, which become the drafts of the batch rows `rows`."""
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
        """Gives every branch this many levels without a forward: the missing tokens repeat `first`,
        and are certain."""
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
        """Returns the distributions of uncertain tokens among a branch's first `count` tokens."""
        drawn_from = self.drawn_from[branch][:count] if self.drawn_from else ()
        return [row for row in drawn_from if row is not None]


class SpeculationCache:
    """The branches that were grown for predicted outcomes of a verification.

    A key is (round, request id, epoch, k, t*): the outcome v = (k, t*) of verifying round `round`
    (Kumar, Dao, May 2026, §3); in a tree k is the node where the accepted path ends. The cache has
    the branches of one round only. branches: None if there are none. fan_outs: how many were grown
    after each k.
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
        """Replaces the contents by branches that were grown for outcomes of verifying this
        speculation; identity: Batch.identity."""
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
        """Returns, for each of the `count` live sequences, the branch grown for its outcome; None
        for a miss."""
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
        """Keeps only the branches that were hit, and returns them, or None if none was; found: as
        `lookup` returns it."""
        rows = [row for row, branch in enumerate(found) if branch is not None]
        if not rows or self.branches is None:
            return None
        self.branches.keep([branch for branch in found if branch is not None], rows)
        return self.branches
