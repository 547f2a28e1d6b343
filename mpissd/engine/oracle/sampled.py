"""Oracles that sample tokens from two models: they draft, reject and replace tokens.

A subclass provides the models' distributions: `markov` computes them from the context, `logits`
reads the logits of its forwards. Draws are keyed by (seed, purpose, sequence, round), so that every
oracle may draw them in any order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np

from mpissd.common.errors import DivergedError
from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Ints, Source, Speculation
from mpissd.engine.law import sampling
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.lookup import LONGEST
from mpissd.engine.round.oracle import (
    Branches,
    DraftOracle,
    Draws,
    Lane,
    Lanes,
    Logits,
    Proposal,
    Proposals,
    Ranked,
    Rollout,
    TargetOracle,
)
from mpissd.engine.round.sequence import Batch, Index
from mpissd.engine.round.sequence import Sequence as Live

_NOBODY: Index = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Case:
    """A sequence to verify: sampling.judge's arguments, and its first row.

    row: of the batch; start: of the forward.
    """

    row: int
    start: int
    sequence: Live
    tokens: Sequence[int]
    q: Sequence[float]
    proposal: Callable[[int], sampling.Row]
    coins: Sequence[float]
    u: float


class SampledDraft(DraftOracle):
    """A draft oracle that draws each drafted token; a subclass provides the distribution.

    Saguaro sampling uses the fan-outs of the job until `branches` is given others.
    """

    reads_tokens = True
    samples = True  # whether tokens are drawn, or always the likeliest
    # Kind of lookup of a fast backup, the tokens that it compares, and the token that fills places
    # which the lookup leaves open (None: the sequence's last token).
    copies: tuple[str, int, int | None] = ("prompt", LONGEST, None)
    _ids: Ints | None = None  # the tokens of the entries of a proposal's row, rising; None: all

    def __init__(self, seed: int, lookahead: int, fan_outs: FanOuts) -> None:
        self._seed, self.lookahead, self._fan_outs = seed, lookahead, fan_outs

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a lane for each of the draft's likeliest tokens after each row of the trunk."""
        self._fan_outs = fan_outs
        entries: list[tuple[int, int, int, int]] = []  # batch row, k, place, token
        tree = self.tree
        best = self._likeliest(batch, fan_outs.widest + tree.width)
        for row, source in enumerate(speculation.source.tolist()):
            one, fan_out = batch.sequences[row], fan_outs.behind(source)
            served, is_drafted = one.served, one.request.lookahead != 0
            for k in range(len(served) + 1):
                drafted = [served[child - 1] for child in tree.children[k] if child <= len(served)]
                others = [candidate for candidate in next(best) if candidate not in drafted]
                kept = others[: fan_out[k] * is_drafted]
                entries += [(row, k, place, token) for place, token in enumerate(kept)]
        table = np.array(entries, np.int64).reshape(-1, 4)
        rows, k_of = table[:, 0], table[:, 1].astype(np.int32)
        lanes = Lanes(rows, k_of, table[:, 2].astype(np.int32))
        return Branches(lanes, self._rollout(batch, _NOBODY, table[:, 3], rows, k_of.tolist()))

    @abstractmethod
    def _likeliest(self, batch: Batch, count: int) -> Iterator[list[int]]:
        """Yields at least `count` of the draft's likeliest tokens for each row of the trunks, best
        first."""

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Returns new lanes that continue batch rows `rows` from their last committed token.

        FAST lanes get all K tokens at once, with q = 1: copied from the sequence by a lookup. JIT
        lanes are grown step by step.
        """
        chosen = np.asarray(rows, np.int64)
        rollout = self._rollout(batch, chosen, batch.last_tokens[chosen], chosen)
        if source == Source.FAST:
            for lane, row in enumerate(rows):
                rollout.tokens[lane] = batch.sequences[row].copied(self.lookahead, *self.copies)
        return rollout

    def _rollout(
        self,
        batch: Batch,
        chosen: Index,
        first: Index | Ints,
        rows: Index,
        k: Sequence[int] | None = None,
    ) -> Rollout:
        """Returns lanes after the tokens `first` of batch rows `rows`, not grown yet.

        chosen: the batch rows that the lanes answer. k: by lane, the served tokens before its first
        token (in a tree the node), of branches that are verified in the next round; None: lanes of
        this round.
        """
        first = first.astype(np.int32)
        tokens = np.zeros((len(first), self.tree.ends[self.lookahead]), np.int32)
        if not self.samples:
            return Rollout(chosen, first, tokens)
        fan_out = self._fan_outs.after_miss if k is None else self._fan_outs.after_hit
        if fan_out and self.tree.num_lanes:  # by token, of the node that it follows
            fan_out = tuple(fan_out[parent] for parent in self.tree.parents)
        lanes, paths = [], self.tree.paths
        for n, row in enumerate(rows.tolist()):
            one = batch.sequences[row]
            ahead = [] if k is None else [*map(one.served.__getitem__, paths[k[n]]), int(first[n])]
            draw, context = one.first_draw(k is not None), self._context(one, ahead)
            seed, name = one.stream(self._seed)
            lane = Lane(seed, name, draw, context, fan_out, one.request.temperature)
            lane.grammar = self.grammar(one)
            lanes.append(lane)
        return Rollout(chosen, first, tokens, lanes)

    def _context(self, one: Live, ahead: list[int]) -> tuple[int, ...]:
        """Returns the context of a lane after a sequence's tokens and the tokens `ahead` of it."""
        return ()

    def collect(self, rollouts: Sequence[Rollout], first_row: int) -> None:
        drawn: Draws = {}
        for rollout in rollouts:
            lanes, pairs = rollout.lanes or [], self._pairs(rollout)
            firsts = [self._propose(lane, at, lane.u(at, drawn)) for lane, at in pairs]
            self._grow(rollout, firsts, drawn, partial(self._ranked, lanes))

    def _pairs(self, rollout: Rollout) -> list[tuple[Lane, int]]:
        """Returns the lane of each row of a step, and the column of its first child."""
        tree = rollout.tree
        columns = [tree.children[node][0] - 1 for node in tree.inner[rollout.steps].tolist()]
        return list(zip(rollout.lanes or (), columns * len(rollout), strict=True))

    def _grow(
        self, rollout: Rollout, firsts: Sequence[Proposal], drawn: Draws, ranked: Ranked
    ) -> None:
        """Stores the next level: each row's first child, and others without replacement, or the
        likeliest of the others where nothing is left to draw."""
        tree, lanes = rollout.tree, rollout.lanes or []
        nodes, rollout.lanes = tree.inner[rollout.steps].tolist(), []
        for n, (lane, proposal) in enumerate(zip(lanes, firsts, strict=True)):
            children, taken = tree.children[nodes[n % len(nodes)]], list[int]()
            for child in children:
                if taken and proposal[2] is not None and proposal[1] < 1:
                    proposal = self._other(proposal, lane.u(child - 1, drawn))
                elif taken:
                    proposal = next(t for t in ranked(n) if t not in taken), 1.0, None
                rollout.record(n // len(nodes), child - 1, proposal)
                taken.append(proposal[0])
                if tree.children[child]:
                    rollout.lanes.append(lane if len(children) == 1 else copy(lane))
                    self._follow(rollout.lanes[-1], proposal[0])
        rollout.steps += 1

    def _other(self, proposal: Proposal, u: float) -> Proposal:
        """Draws the next sibling of an uncertain proposal with u."""
        token, _, row = proposal
        assert row is not None, "a sibling of a certain token"
        entry = token if self._ids is None else int(np.searchsorted(self._ids, token))
        entry, q, row = sampling.propose_other(np.asarray(row), entry, u)
        return self._named(entry), q, row

    @abstractmethod
    def _propose(self, lane: Lane, place: int, u: float) -> Proposal:
        """Draws token `place` of a lane's draft with u."""

    def _ranked(self, lanes: Sequence[Lane], n: int) -> Sequence[int]:
        """Returns as many of lane n's likeliest tokens as a node may have children."""
        raise NotImplementedError("a tree of a draft that ranks no tokens")

    def _follow(self, lane: Lane, token: int) -> None:
        """Moves a lane's context to a token. The default has none."""

    def _named(self, entry: int) -> int:
        return entry if self._ids is None else int(self._ids[entry])


class SampledTarget(TargetOracle):
    """A target oracle that verifies by rejection sampling (greedily at temperature 0)."""

    reads_tokens = True
    # The token of each entry of a proposal's row, rising; None: entry t is token t.
    _draft_ids: Ints | None = None

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @abstractmethod
    def _target_row(self, sequence: Live, start: int, i: int) -> sampling.Floats | sampling.Weights:
        """Returns the distribution [V] of row start + i of the finished forward, after node i."""

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies rejection sampling (spec.sampling.judge) to each sequence.

        Returns (num_accepted, bonus), both int32 [b]. Draws are keyed by (sequence, round). Sampled
        tokens are not judged if their distributions are lost.
        """
        accepted, bonus = np.zeros((2, len(batch)), np.int32)
        start, cases = 0, list[Case]()
        for row, one in enumerate(batch.sequences):
            count = len(one.served)
            if (sure := self._certain(one, start)) is not None:
                accepted[row], bonus[row] = sure
            else:
                q = speculation.q[row, :count].tolist() if speculation.sampled else [1.0] * count
                if speculation.is_lost and min(q, default=1.0) < 1:
                    q = []  # drafts are not judged; only the next token is drawn
                coins = self._draws(Purpose.ACCEPT, one, len(q))
                (u,) = self._draws(Purpose.BONUS, one, 1)
                proposal, served = partial(_proposal, proposals, row, q), one.served[: len(q)]
                cases.append(Case(row, start, one, served, q, proposal, coins, u))
            start += count + 1
        for case, verdict in zip(cases, self._judge_all(cases), strict=True):
            accepted[case.row], bonus[case.row] = verdict
        return accepted, bonus

    def _judge_all(self, cases: Sequence[Case]) -> list[tuple[int, int]]:
        return [self._judge_one(case) for case in cases]

    def _judge_one(self, case: Case) -> tuple[int, int]:
        p = partial(self._target_row, case.sequence, case.start)
        drafted = case.tokens, case.q, lambda i: np.asarray(case.proposal(i))  # from a device
        return sampling.judge(p, *drafted, case.coins, case.u, self._draft_ids, self.tree)

    def _certain(self, sequence: Live, start: int) -> tuple[int, int] | None:
        """Returns (k, t*) from the rows after row `start` if no draw decides them, or None."""
        return None

    def _draws(self, purpose: Purpose, one: Live, count: int) -> list[float]:
        seed, sequence = one.stream(self._seed)
        drawn: list[float] = uniforms(seed, purpose, sequence, one.first_draw(), count).tolist()
        return drawn


def _proposal(proposals: Proposals, row: int, q: Sequence[float], i: int) -> sampling.Row:
    """Returns the distribution that drafted token i was drawn from; certain tokens have none."""
    return proposals(row, sum(one < 1 for one in q[:i]))


def check_finite(logits: Logits, model: str) -> None:
    """Raises DivergedError if a logit is not finite, which would decide a token silently."""
    if not np.isfinite(logits).all():
        raise DivergedError(f"{model}: a logit is not finite: its weights are damaged, or overflow")
