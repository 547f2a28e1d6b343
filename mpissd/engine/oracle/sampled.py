"""Oracles that sample tokens from two models' distributions, for drafting and for verification.

Subclasses provide the distributions: oracle.markov computes them from the context, oracle.logits
reads logits of forwards. A random draw depends only on (seed, purpose, sequence, index of the
draw), so that oracles may draw in any order.
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

Draws = dict[tuple[int, int, int], float]  # uniforms by (seed, sequence, index of the draw)
Ranked = Callable[[int], Sequence[int]]  # returns the likeliest tokens of a row of a draft step
MakeGrammars = Callable[[], Grammars]


class Proposal(NamedTuple):
    """A drafted token, the probability q with which it was drawn, and the distribution [V] from
    which it was drawn (None if q = 1)."""

    token: int
    q: float = 1.0
    row: sampling.Row | None = None


@dataclass
class DrawState:
    """What draws the next token of a drafted branch.

    seed, sequence: the keys of the random draws. first_draw: the index of the first draw in the
    round that will verify the tokens. context: the last tokens that a markov model reads, or, with
    a grammar, the answer up to here. fan_out: by place in the draft, how many of the likeliest
    tokens Saguaro's sampling makes rarer. settings: the sampling of the request. logits: the draft
    model's logits [V] after the branch, set by oracles that read them.
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
        """Returns the uniform that draws token `place` of the draft. All branches of a sequence
        share it. drawn: the uniforms drawn so far, to which a new one is added."""
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
    """Returns the distribution of a request's next token, from a model's logits [V]. answer: the
    tokens of the answer so far, for the penalties of the target; None for a draft, which ignores
    bias, penalties and top_p. top, scale: Saguaro's sampling (law.sampling.weigh)."""
    if answer is not None and settings.adjusts:
        logits = settings.adjusted(logits, answer)
    weights = sampling.weigh(logits, settings.temperature, top, scale)
    if answer is None or settings.top_p >= 1:
        return weights
    return sampling.Weights(sampling.nucleus(weights.probs, settings.top_p), 1.0)


class GrammarStates:
    """Makes the grammars of sequences, and stores each in its sequence. forces: whether a token
    that is the only allowed one is committed without a forward."""

    def __init__(self, make: MakeGrammars | None = None, *, forces: bool = False) -> None:
        """make: returns the maker of grammars (None: no sequence has a grammar)."""
        self.forces = forces
        self._make = make

    def of(self, sequence: LiveSequence) -> Grammar | None:
        """Returns the grammar of a sequence, with the state of its answer, or None."""
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
    # How a fast backup copies tokens: the kind of lookup, the most tokens that it compares, and the
    # token that fills missing places (None: the sequence's last token).
    copies: tuple[str, int, int | None] = ("prompt", LONGEST, None)
    _ids: Ints | None = None  # the token of each entry of the draft's distributions; None: entry n

    def __init__(self, seed: int, lookahead: int, fan_outs: FanOuts, shape: Shape = CHAIN) -> None:
        super().__init__(lookahead, shape)
        self._seed = seed
        self._fan_outs = fan_outs  # how many tokens Saguaro's sampling makes rarer

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a branch for each of the draft's likeliest tokens after each served token, except
        the served token that follows there."""
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
        """Yields the draft's `count` likeliest next tokens, best first, after each sequence's last
        token and after each of its served tokens."""

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
        """Returns the states of branches of batch rows `rows` whose first tokens are `first`, or
        None if no token is drawn.

        nodes: for branches that are drafted ahead, the number of accepted tokens before each one
        (in a tree: the node after which it grows); None for branches that this round verifies.
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
        """Returns DrawState.context of a sequence whose tokens are followed by `ahead`."""
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
        """Returns, for each row of a draft step, the row's state, and the column of the token that
        the row drafts: in a tree, of its first child."""
        shape = branches.shape
        columns = [shape.children[node][0] - 1 for node in shape.inner[branches.steps].tolist()]
        return list(zip(branches.states or (), columns * len(branches), strict=True))

    def _grow(
        self, branches: Branches, firsts: Sequence[Proposal], drawn: Draws, ranked: Ranked
    ) -> None:
        """Stores the tokens of a draft step. firsts: the token that each row has drafted. ranked:
        returns the likeliest tokens of a row.

        In a tree a row's node may have more children. They are drawn without replacement, or are
        the likeliest other tokens if the first child was certain.
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
        """Draws the next sibling of a proposal with q < 1, by the uniform u."""
        token = proposal.token
        assert proposal.row is not None, "a sibling of a certain token"
        entry = token if self._ids is None else int(np.searchsorted(self._ids, token))
        entry, q, row = sampling.propose_other(np.asarray(proposal.row), entry, u)
        return Proposal(self._named(entry), q, row)

    @abstractmethod
    def _propose(self, state: DrawState, place: int, u: float) -> Proposal:
        """Draws token `place` of a branch by the uniform u."""

    def _ranked(self, states: Sequence[DrawState], n: int) -> Sequence[int]:
        """Returns the likeliest tokens after row n, as many as a node has children."""
        raise NotImplementedError("a tree of a draft that ranks no tokens")

    def _follow(self, state: DrawState, token: int) -> None:
        """Appends a token to the state's context. The default does nothing."""

    def _named(self, entry: int) -> int:
        return entry if self._ids is None else int(self._ids[entry])


@dataclass(frozen=True)
class Case:
    """A sequence to verify by law.sampling.judge. row: its batch row. start: the row of the forward
    that read its last token. tokens, q, proposal, coins, u: the arguments of `judge`."""

    row: int
    start: int
    sequence: LiveSequence
    tokens: Sequence[int]
    q: Sequence[float]
    proposal: Callable[[int], sampling.Row]
    coins: Sequence[float]
    u: float


class SampledTarget(TargetOracle):
    """A target oracle that verifies by rejection sampling, which is greedy at temperature 0."""

    reads_tokens = True
    # The token of each entry of the draft's distributions, rising; None: entry t is token t.
    _draft_ids: Ints | None = None

    def __init__(self, seed: int, shape: Shape = CHAIN) -> None:
        super().__init__(shape)
        self._seed = seed

    @abstractmethod
    def _target_row(self, sequence: LiveSequence, start: int, i: int) -> sampling.Weights:
        """Returns the target's distribution after node i of the draft (node 0: the last token), in
        row start + i of the finished forward."""

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies rejection sampling to each sequence, and returns (num_accepted, bonus), both
        int32 [b]. If the distributions of sampled tokens are lost (speculation.is_lost), none of
        the sequence's tokens is verified, and one token is drawn from the target."""
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
        """Returns a sequence's (num_accepted, bonus) if no random draw decides them, or None.
        start: the row of the forward that read the sequence's last token."""
        return None

    def _draws(self, purpose: Purpose, sequence: LiveSequence, count: int) -> list[float]:
        seed, name = sequence.stream(self._seed)
        drawn: list[float] = uniforms(seed, purpose, name, sequence.first_draw(), count).tolist()
        return drawn


def _proposal(proposals: Proposals, row: int, q: Sequence[float], i: int) -> sampling.Row:
    """Returns the distribution of token i of a batch row. q: the q of all tokens of the row."""
    return proposals(row, sum(probability < 1 for probability in q[:i]))


def check_finite(logits: Logits, model: str) -> None:
    """Raises DivergedError, which names `model`, if a logit is not finite."""
    if not np.isfinite(logits).all():
        raise DivergedError(f"{model}: a logit is not finite: its weights are damaged, or overflow")
