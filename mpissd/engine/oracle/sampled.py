"""Oracles that sample tokens from two models: they draft, reject and replace tokens.

A subclass provides the models' distributions: `markov` computes them from the context, `logits`
reads the logits of its forwards. A draw depends only on (seed, purpose, sequence, position in its
draws), so that oracles may draw in any order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from mpissd.common.errors import DivergedError
from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Ints, Sampling, Source, Speculation
from mpissd.engine.law import sampling
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.lookup import LONGEST
from mpissd.engine.law.tree import CHAIN, Shape
from mpissd.engine.round.branches import Branches
from mpissd.engine.round.oracle import DraftOracle, Logits, Proposals, TargetOracle
from mpissd.engine.round.sequence import Batch, Index, LiveSequence
from mpissd.engine.text.grammar import Grammar, Grammars

Draws = dict[tuple[int, int, int], float]  # by (seed, sequence, draw)
Ranked = Callable[[int], Sequence[int]]  # returns the likeliest tokens of a row of a draft step
MakeGrammars = Callable[[], Grammars]


class Proposal(NamedTuple):
    """A drafted token, its probability, and the distribution it was drawn from (None: certain)."""

    token: int
    q: float = 1.0
    row: sampling.Row | None = None


@dataclass
class DrawState:
    """The state from which the next token of a drafted branch is drawn.

    seed, sequence: key its random draws. first_draw: the index of the first draw of the round that
    will verify its tokens. fan_out: of that round, whose likeliest tokens Saguaro's sampling makes
    rarer. settings: of its request. context: the last tokens that the draft model reads, or, with a
    grammar, the answer up to here. logits: the draft model's. An oracle sets the context or the
    logits.
    """

    seed: int
    sequence: int
    first_draw: int
    context: tuple[int, ...]
    fan_out: tuple[int, ...]
    settings: Sampling
    logits: Logits | None = None
    grammar: Grammar | None = None

    def u(self, place: int, drawn: Draws) -> float:
        """Returns the uniform that draws token `place` of the draft, which all branches of a
        sequence share; drawn: uniforms that were drawn before, to which it is added."""
        key = self.seed, self.sequence, self.first_draw + place
        if key not in drawn:
            drawn[key] = uniforms(self.seed, Purpose.DRAFT, *key[1:], 1)[0]
        return drawn[key]


def weigh(
    logits: Logits | sampling.Floats,
    settings: Sampling,
    answer: Sequence[int] | None,
    top: int = 0,
    scale: float = 1.0,
) -> sampling.Weights:
    """Returns the distribution [V] of a request's next token after the tokens of its `answer`, from
    a model's logits [V]. answer=None: for a draft, which ignores bias, penalties and top_p. top,
    scale: of Saguaro's sampling (law.sampling.weigh)."""
    if answer is not None and settings.adjusts:
        logits = settings.adjusted(logits, answer)
    weights = sampling.weigh(logits, settings.temperature, top, scale)
    if answer is None or settings.top_p >= 1:
        return weights
    return sampling.Weights(sampling.nucleus(weights.probs, settings.top_p), 1.0)


class GrammarStates:
    """Makes the grammars of sequences, and stores each in its sequence. forces: whether tokens that
    are the only allowed ones are committed without a forward."""

    def __init__(self, make: MakeGrammars | None = None, *, forces: bool = False) -> None:
        """make: returns the maker of grammars (None: sequences have none)."""
        self.forces = forces
        self._make = make

    def of(self, sequence: LiveSequence) -> Grammar | None:
        """Returns the grammar of a sequence with its state, or None."""
        settings = sequence.request.sampling
        if sequence.constraint is None and settings.grammar and self._make is not None:
            grammar = self._make().begin(settings.grammar)
            grammar.forces = self.forces and settings.logprobs is None
            sequence.constraint = grammar
        state: Grammar | None = sequence.constraint
        return state


class SampledDraft(DraftOracle):
    """A draft oracle that draws each drafted token; a subclass provides the distribution."""

    reads_tokens = True
    samples = True  # whether tokens are drawn, or always the likeliest
    # Of a fast backup: the kind of its lookup, the most tokens that the lookup compares, and the
    # token that fills places for which it has none (None: the sequence's last token).
    copies: tuple[str, int, int | None] = ("prompt", LONGEST, None)
    _ids: Ints | None = None  # the tokens of the entries of a proposal's row, rising; None: all

    def __init__(self, seed: int, lookahead: int, fan_outs: FanOuts, shape: Shape = CHAIN) -> None:
        super().__init__(lookahead, shape)
        self._seed = seed
        self._fan_outs = fan_outs  # those that Saguaro's sampling reads

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a branch for each of the draft's likeliest tokens after each served token."""
        self._fan_outs = fan_outs
        entries: list[tuple[int, int, int, int]] = []  # batch row, k, rank, token
        shape = self.shape
        likeliest = self._likeliest(batch, fan_outs.widest + shape.width)
        for row, source in enumerate(speculation.source.tolist()):
            sequence = batch.sequences[row]
            fan_out = fan_outs.behind(source)
            served = sequence.served
            is_drafted = sequence.request.sampling.lookahead != 0
            for k in range(len(served) + 1):
                drafted = [served[child - 1] for child in shape.children[k] if child <= len(served)]
                others = [token for token in next(likeliest) if token not in drafted]
                kept = others[: fan_out[k] * is_drafted]
                entries += [(row, k, rank, token) for rank, token in enumerate(kept)]
        table = np.array(entries, np.int64).reshape(-1, 4)
        rows = table[:, 0]
        nodes, ranks, first = table[:, 1:].T.astype(np.int32)
        states = self._states(batch, rows, first, nodes.tolist())
        return batch.grown_ahead(rows, nodes, ranks, first, self._no_tokens(len(rows)), states)

    @abstractmethod
    def _likeliest(self, batch: Batch, count: int) -> Iterator[list[int]]:
        """Yields, for each sequence's last token and each of its served tokens, the draft's `count`
        likeliest next tokens, best first."""

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Branches:
        """Returns new branches that continue batch rows `rows` from their last committed token.

        A FAST branch gets all K tokens at once, which a lookup copies from the sequence, and which
        are certain (q = 1). A JIT branch gets them step by step.
        """
        chosen = np.asarray(rows, np.int64)
        tokens = self._no_tokens(len(rows))
        if source == Source.FAST:
            for branch, row in enumerate(rows):
                tokens[branch] = batch.sequences[row].looked_up(self.lookahead, *self.copies)
        states = self._states(batch, chosen, batch.last_tokens[chosen])
        return batch.restarted(chosen, tokens, states)

    def _no_tokens(self, count: int) -> Ints:
        return np.zeros((count, self.shape.ends[self.lookahead]), np.int32)

    def _states(
        self, batch: Batch, rows: Index, first: Ints, nodes: Sequence[int] | None = None
    ) -> list[DrawState] | None:
        """Returns the states of branches that begin with the tokens `first` of batch rows `rows`;
        None if no token is drawn.

        nodes: by branch, the number of served tokens before its first one (in a tree the node), if
        the next round verifies the branches; None: this round does.
        """
        if not self.samples:
            return None
        fan_out = self._fan_outs.after_miss if nodes is None else self._fan_outs.after_hit
        if fan_out and not self.shape.is_chain:  # by token, of the node that it follows
            fan_out = tuple(fan_out[parent] for parent in self.shape.parents)
        states = []
        for branch, row in enumerate(rows.tolist()):
            sequence = batch.sequences[row]
            ahead = list[int]()
            if nodes is not None:
                ahead = [*sequence.path(self.shape.paths[nodes[branch]]), int(first[branch])]
            seed, name = sequence.stream(self._seed)
            state = DrawState(
                seed,
                name,
                sequence.first_draw(nodes is not None),
                self._context(sequence, ahead),
                fan_out,
                sequence.request.sampling,
                grammar=self._grammar(sequence),
            )
            states.append(state)
        return states

    def _grammar(self, sequence: LiveSequence) -> Grammar | None:
        return None

    def _context(self, sequence: LiveSequence, ahead: list[int]) -> tuple[int, ...]:
        """Returns the part of a sequence's tokens, followed by `ahead`, that a DrawState keeps."""
        return ()

    def is_decided(self, branches: Branches, levels: int) -> bool:
        return bool(branches.states) and all(
            state.grammar is not None and state.grammar.decides(state.context, levels)
            for state in branches.states or ()
        )

    def collect(self, grown: Sequence[Branches], first_row: int) -> None:
        drawn: Draws = {}
        for branches in grown:
            states = branches.states or []
            pairs = self._pairs(branches)
            firsts = [self._propose(state, at, state.u(at, drawn)) for state, at in pairs]
            self._grow(branches, firsts, drawn, partial(self._ranked, states))

    def _pairs(self, branches: Branches) -> list[tuple[DrawState, int]]:
        """Returns, for each row of a draft step, (its state, the column of the token that it
        drafts: in a tree, of the first child)."""
        shape = branches.shape
        columns = [shape.children[node][0] - 1 for node in shape.inner[branches.steps].tolist()]
        return list(zip(branches.states or (), columns * len(branches), strict=True))

    def _grow(
        self, branches: Branches, firsts: Sequence[Proposal], drawn: Draws, ranked: Ranked
    ) -> None:
        """Stores the tokens of a draft step, one a row (firsts).

        In a tree a row's node may have more children. They are drawn without replacement, or, where
        nothing is left to draw, are the likeliest of the other tokens.
        """
        shape = branches.shape
        nodes = shape.inner[branches.steps].tolist()
        following = list[DrawState]()
        rows = zip(branches.states or (), firsts, strict=True)
        for n, (state, proposal) in enumerate(rows):
            children = shape.children[nodes[n % len(nodes)]]
            taken = list[int]()
            for child in children:
                if taken and proposal.row is not None and proposal.q < 1:
                    proposal = self._other(proposal, state.u(child - 1, drawn))
                elif taken:
                    proposal = Proposal(next(t for t in ranked(n) if t not in taken))
                branches.record(n // len(nodes), child - 1, *proposal)
                taken.append(proposal.token)
                if shape.children[child]:
                    following.append(state if len(children) == 1 else copy(state))
                    self._follow(following[-1], proposal.token)
        branches.follow(following)

    def _other(self, proposal: Proposal, u: float) -> Proposal:
        """Draws the next sibling of an uncertain proposal with the uniform u."""
        token = proposal.token
        assert proposal.row is not None, "a sibling of a certain token"
        entry = token if self._ids is None else int(np.searchsorted(self._ids, token))
        entry, q, row = sampling.propose_other(np.asarray(proposal.row), entry, u)
        return Proposal(self._named(entry), q, row)

    @abstractmethod
    def _propose(self, state: DrawState, place: int, u: float) -> Proposal:
        """Draws token `place` of a branch with the uniform u."""

    def _ranked(self, states: Sequence[DrawState], n: int) -> Sequence[int]:
        """Returns the likeliest tokens of row n, as many as a node of the tree has children."""
        raise NotImplementedError("a tree of a draft that ranks no tokens")

    def _follow(self, state: DrawState, token: int) -> None:
        """Appends a token to DrawState.context. The default does nothing."""

    def _named(self, entry: int) -> int:
        return entry if self._ids is None else int(self._ids[entry])


@dataclass(frozen=True)
class Case:
    """A sequence to verify: arguments of sampling.judge, its row of the batch, and the first row
    (start) that it has in the forward."""

    row: int
    start: int
    sequence: LiveSequence
    tokens: Sequence[int]
    q: Sequence[float]
    proposal: Callable[[int], sampling.Row]
    coins: Sequence[float]
    u: float


class SampledTarget(TargetOracle):
    """A target oracle that verifies by rejection sampling (greedily at temperature 0)."""

    reads_tokens = True
    # The token of each entry of a proposal's row, rising; None: entry t is token t.
    _draft_ids: Ints | None = None

    def __init__(self, seed: int, shape: Shape = CHAIN) -> None:
        super().__init__(shape)
        self._seed = seed

    @abstractmethod
    def _target_row(self, sequence: LiveSequence, start: int, i: int) -> sampling.Weights:
        """Returns the distribution [V] of row start + i of the finished forward, after node i."""

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies rejection sampling (law.sampling.judge) to each sequence; returns (num_accepted,
        bonus), both int32 [b]. Without the distributions of sampled tokens (speculation.is_lost) it
        verifies none of a sequence's tokens, and draws one."""
        accepted, bonus = np.zeros((2, len(batch)), np.int32)
        start = 0
        cases = list[Case]()
        for row, sequence in enumerate(batch.sequences):
            count = len(sequence.served)
            if (certain := self._certain(sequence, start)) is not None:
                accepted[row], bonus[row] = certain
            else:
                q = speculation.q[row, :count].tolist() if speculation.sampled else [1.0] * count
                if speculation.is_lost and min(q, default=1.0) < 1:
                    q = []  # drafts are not judged; only the next token is drawn
                coins = self._draws(Purpose.ACCEPT, sequence, len(q))
                (u,) = self._draws(Purpose.BONUS, sequence, 1)
                proposal = partial(_proposal, proposals, row, q)
                served = sequence.served[: len(q)]
                cases.append(Case(row, start, sequence, served, q, proposal, coins, u))
            start += count + 1
        for case, verdict in zip(cases, self._judge_all(cases), strict=True):
            accepted[case.row], bonus[case.row] = verdict
        return accepted, bonus

    def _judge_all(self, cases: Sequence[Case]) -> list[tuple[int, int]]:
        return [self._judge_one(case) for case in cases]

    def _judge_one(self, case: Case) -> tuple[int, int]:
        p = partial(self._target_row, case.sequence, case.start)
        drafted = case.tokens, case.q, lambda i: np.asarray(case.proposal(i))  # from a device
        return sampling.judge(p, *drafted, case.coins, case.u, self._draft_ids, self.shape)

    def _certain(self, sequence: LiveSequence, start: int) -> tuple[int, int] | None:
        """Returns a sequence's (num_accepted, bonus) if no draw decides them, or None; start: its
        first row of the forward."""
        return None

    def _draws(self, purpose: Purpose, sequence: LiveSequence, count: int) -> list[float]:
        seed, name = sequence.stream(self._seed)
        drawn: list[float] = uniforms(seed, purpose, name, sequence.first_draw(), count).tolist()
        return drawn


def _proposal(proposals: Proposals, row: int, q: Sequence[float], i: int) -> sampling.Row:
    """Returns the distribution of uncertain token i of a batch row; q: of all tokens of the row."""
    return proposals(row, sum(probability < 1 for probability in q[:i]))


def check_finite(logits: Logits, model: str) -> None:
    """Raises DivergedError, which names `model`, if a logit is not finite."""
    if not np.isfinite(logits).all():
        raise DivergedError(f"{model}: a logit is not finite: its weights are damaged, or overflow")
