"""Oracles that sample tokens: a draft oracle from the draft's distributions, and a target oracle by
rejection sampling.

Subclasses provide the distributions: oracle.markov computes them from the context, oracle.logits
reads logits of forwards. A random draw depends only on (seed, purpose, sequence, index of the
draw), so that oracles may draw in any order.
"""

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

Draws = dict[tuple[int, int, int], float]  # {(seed, sequence, index): uniform random number}
Ranked = Callable[[int], Sequence[int]]  # maps a row of a draft forward to its likeliest tokens
MakeGrammars = Callable[[], Grammars]


class Proposal(NamedTuple):
    """A drafted token, its probability q, and the distribution [V] it was drawn from, if q < 1."""

    token: int
    q: float = 1.0
    row: sampling.Row | None = None


@dataclass
class DrawState:
    """What is needed to draw the next token of a branch (a draft that grows).

    seed, sequence: the keys of the random draws. first_draw: the index of the first draw of the
    round that will verify the tokens. context: the last tokens that a `markov` model reads, or,
    with a grammar, the answer with the branch's tokens. fan_out: for each place in the draft, how
    many likeliest tokens Saguaro's sampling makes rarer. settings: the request's sampling options.
    logits: the draft's logits [V] after the branch, if read. grammar: what the answer must match.
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
        """Returns the uniform random number that draws token number `place` of the draft. All
        branches of a sequence share it. drawn: stores the numbers drawn so far."""
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
    prompt: Sequence[int] = (),
) -> sampling.Weights:
    """Returns the distribution of a request's next token, from a model's logits [V]. settings: the
    request's sampling options. answer: the answer's tokens so far, which the target's penalties
    read; None for a draft, which only reads the temperature. top, scale: Saguaro's sampling
    multiplies the probabilities of the `top` likeliest tokens by `scale`. prompt: the tokens before
    the answer, for the repetition penalty."""
    if answer is not None and settings.adjusts:
        logits = settings.adjusted(logits, answer, prompt)
    weights = sampling.weigh(logits, settings.temperature, top, scale)
    if answer is None or not settings.cuts:
        return weights
    cut = sampling.cut(weights.probs, settings.top_p, settings.top_k, settings.min_p)
    return sampling.Weights(cut, 1.0)


class GrammarStates:
    """Gives each sequence the grammar that its answer must match, made at the first use. forces:
    whether a token is committed without a forward if the grammar allows no other."""

    def __init__(self, make: MakeGrammars | None = None, *, forces: bool = False) -> None:
        """make: returns the object that makes the grammars (None: answers are free)."""
        self.forces = forces
        self._make = make

    def of(self, sequence: LiveSequence) -> Grammar | None:
        """Returns the grammar that a sequence's answer must match (None: any answer will do)."""
        settings = sequence.request.sampling
        if sequence.constraint is None and settings.grammar and self._make is not None:
            grammar = self._make().begin(settings.grammar)
            grammar.forces = self.forces and settings.logprobs is None
            sequence.constraint = grammar
        state: Grammar | None = sequence.constraint
        return state


class SampledDraft(DraftOracle):
    """A draft oracle that draws each drafted token from a distribution that a subclass provides."""

    reads_tokens = True
    samples = True  # False: each drafted token is the likeliest one
    # A fast backup's lookup: its kind, the most tokens it compares, the filler (None: last token)
    copies: tuple[str, int, int | None] = ("prompt", LONGEST, None)
    _ids: Ints | None = None  # the token id of each element of q's distributions; None: n

    def __init__(self, seed: int, lookahead: int, fan_outs: FanOuts, shape: Shape = CHAIN) -> None:
        super().__init__(lookahead, shape)
        self._seed = seed
        self._fan_outs = fan_outs  # after k tokens, how many likely ones are made rarer

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a branch for each bonus candidate: after each number of accepted tokens, the
        draft's likeliest tokens, except the drafted token that follows there."""
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
        """Yields the draft's `count` likeliest next tokens, best first. For each sequence: those
        after its last committed token, then those after each drafted token under verification."""

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Branches:
        """Returns new branches that continue the committed tokens of batch rows `rows`. With source
        FAST they have all their tokens, copied from the sequence by a lookup (q = 1). With source
        JIT, the draft model, they have none yet."""
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
        """Returns an object for each branch that draws its tokens; None if all are greedy. rows:
        the batch row of each branch. first: the token that each branch continues. nodes: for
        branches that are drafted ahead, the number of accepted tokens before each (in a tree: the
        node that it follows); None for branches that the next verification reads."""
        if not self.samples:
            return None
        fan_out = self._fan_outs.after_miss if nodes is None else self._fan_outs.after_hit
        if fan_out and not self.shape.is_chain:  # from one number a node to one a token
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
        """Returns the tokens that a model or a grammar reads to draw the token after `ahead`, which
        follows the sequence's committed tokens. The default returns ()."""
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
        """Returns, for each row of a draft forward, (what draws the row's token, the column of this
        token in the branch; in a tree: the column of the first child)."""
        shape = branches.shape
        columns = [shape.children[node][0] - 1 for node in shape.inner[branches.steps].tolist()]
        return list(zip(branches.states or (), columns * len(branches), strict=True))

    def _grow(
        self, branches: Branches, firsts: Sequence[Proposal], drawn: Draws, ranked: Ranked
    ) -> None:
        """Stores the tokens of a draft forward in the branches. firsts: the token that each row has
        drafted. ranked: returns the likeliest tokens of a row. In a tree the node of a row may need
        further children: they are drawn without replacement, or, if the first child was not drawn
        (q = 1), are the next likeliest tokens."""
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
        """Draws the next child of a tree node, without replacement, by the uniform number u.
        proposal: the child of the node that was drawn before, with probability q < 1."""
        token = proposal.token
        assert proposal.row is not None, "a sibling of a certain token"
        left = np.asarray(proposal.row).astype(np.float64)
        left[token if self._ids is None else np.searchsorted(self._ids, token)] = 0.0
        entry, q, row = sampling.propose(left, u)
        return Proposal(self._named(entry), q, row)

    @abstractmethod
    def _propose(self, state: DrawState, place: int, u: float) -> Proposal:
        """Draws token number `place` of a branch by the uniform random number u."""

    def _ranked(self, states: Sequence[DrawState], n: int) -> Sequence[int]:
        """Returns the likeliest tokens after row n, as many as any tree node has children."""
        raise NotImplementedError("a tree of a draft that ranks no tokens")

    def _follow(self, state: DrawState, token: int) -> None:
        """Appends a drafted token to the context of a branch. The default does nothing."""

    def _named(self, entry: int) -> int:
        return entry if self._ids is None else int(self._ids[entry])


@dataclass(frozen=True)
class Case:
    """A sequence whose drafted tokens are verified by rejection sampling.

    row: the sequence's batch row. start: the row of the forward that read its last committed token.
    tokens: the drafted tokens. q: the probability with which the draft drew each. proposal: returns
    the distribution that token i was drawn from. coins: the uniform numbers that accept or reject
    the tokens. u: the uniform number that draws the bonus token.
    """

    row: int
    start: int
    sequence: LiveSequence
    tokens: Sequence[int]
    q: Sequence[float]
    proposal: Callable[[int], sampling.Row]
    coins: Sequence[float]
    u: float


class SampledTarget(TargetOracle):
    """A target oracle that verifies drafted tokens by rejection sampling. At temperature 0, that is
    greedy decoding. A subclass provides the target's distributions."""

    reads_tokens = True
    # the token ids of a draft's distributions, rising (None: element t is token t)
    _draft_ids: Ints | None = None

    def __init__(self, seed: int, shape: Shape = CHAIN) -> None:
        super().__init__(shape)
        self._seed = seed

    @abstractmethod
    def _target_row(self, sequence: LiveSequence, start: int, i: int) -> sampling.Weights:
        """Returns the target's distribution after node i of the draft (node 0: the last committed
        token). start: the row of the forward that read node 0; the row of node i is start + i."""

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Verifies the drafted tokens by rejection sampling. Returns (the number of accepted
        tokens, the bonus token) of each sequence, both int32 [b]. If the distributions of sampled
        tokens are lost, no drafted token is verified, and the target draws the bonus token."""
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
                    q = []  # drops the drafted tokens
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
        drafted = case.tokens, case.q, lambda i: np.asarray(case.proposal(i))  # may copy from a GPU
        return sampling.judge(p, *drafted, case.coins, case.u, self._draft_ids, self.shape)

    def _certain(self, sequence: LiveSequence, start: int) -> tuple[int, int] | None:
        """Returns (number of accepted tokens, bonus token) of a sequence if no random draw decides
        them, else None. start: the row of the forward that read the sequence's last token."""
        return None

    def _draws(self, purpose: Purpose, sequence: LiveSequence, count: int) -> list[float]:
        seed, name = sequence.stream(self._seed)
        drawn: list[float] = uniforms(seed, purpose, name, sequence.first_draw(), count).tolist()
        return drawn


def _proposal(proposals: Proposals, row: int, q: Sequence[float], i: int) -> sampling.Row:
    """Returns the distribution from which drafted token i of batch row `row` was drawn. q: the
    draft's probability of each drafted token of the row."""
    return proposals(row, sum(probability < 1 for probability in q[:i]))


def check_finite(logits: Logits, model: str) -> None:
    """Raises DivergedError, which names `model`, if a logit is not finite."""
    if not np.isfinite(logits).all():
        raise DivergedError(f"{model}: a logit is not finite: its weights are damaged, or overflow")
