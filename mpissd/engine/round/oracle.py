"""Oracles: they decide which tokens the target emits and which ones the draft proposes.

There is one target worker and one draft worker (round.rows), which run a model's forwards;
an oracle decides their tokens. Imposed distributions (gemm), a recording (replay), a known language
model (markov) and the forwards' own logits (text) are oracles. Every rank's oracle sees the same
batch, because every rank applies the same outcomes. Oracles send no messages and read no clock.

SampledDraft and SampledTarget sample tokens from two models: they draft, reject and replace tokens.
A subclass provides the models' distributions: `markov` computes them from the context, `text` reads
the logits of its forwards. Draws are keyed by (seed, purpose, sequence, round), so that every
oracle may draw them in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Ints, Logprob, Request, Source, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.comm.learner_messages import Lesson, Sent
from mpissd.engine.law import sampling
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.tree import CHAIN, Branched, Tree
from mpissd.engine.round.sequence import Batch, Index, LanePlaces
from mpissd.engine.round.sequence import Sequence as Live
from mpissd.engine.text.grammar import Grammar, Grammars

Logits = NDArray[np.float32]
Draws = dict[tuple[int, int, int], float]  # by (seed, sequence, draw)
# A token, its probability, and the row that it is drawn from (None if it was certain).
Proposal = tuple[int, float, sampling.Row | None]
Ranked = Callable[[int], Sequence[int]]  # returns the likeliest tokens of a step's row
_NOBODY: Index = np.zeros(0, np.int64)
_NO_LOGPROBS: Mapping[int, list[Logprob]] = {}
# (batch row, i) → float32 [V]: the distribution from which uncertain token i was drawn.
Proposals = Callable[[int, int], NDArray[np.float32]]


# Gathers the T target ranks' shares of the logits [rows, V/T] on the lead: float32 [T, rows, V/T].
LogitsGather = Callable[[NDArray[np.float32], Waiter], NDArray[np.float32]]
OpenGather = Callable[[], LogitsGather]


@dataclass
class Lane:
    """The state from which a lane (a branch slot) draws its next token.

    seed, sequence: of its random draws. first_draw: the index of the first one of the round that
    will verify its tokens. fan_out is of that round: Saguaro sampling damps the tokens that it
    keeps. context, logits: the last tokens that the draft model reads, and its logits, whichever of
    the two the oracle uses. grammar: of its sequence; context is then its answer so far.
    """

    seed: int
    sequence: int
    first_draw: int
    context: tuple[int, ...]
    fan_out: tuple[int, ...]
    temperature: float
    logits: Logits | None = None
    grammar: Grammar | None = None

    def u(self, place: int, drawn: Draws) -> float:
        """Returns the uniform that draws token `place`; lanes of a sequence share it."""
        key = self.seed, self.sequence, self.first_draw + place
        if key not in drawn:
            drawn[key] = uniforms(self.seed, Purpose.DRAFT, *key[1:], 1)[0]
        return drawn[key]


class Rollout:
    """Drafts (lanes) that grow together, by one level of their tree in each step: a chain's token.

    tokens: int32 [lanes, N]; the columns of the first `steps` levels are grown. rows: the batch row
    of each lane; empty while a sequence has several lanes and the outcome has not yet
    chosen one. first: the token from which each lane starts, [lanes]. places: the lanes' places in
    the KV cache of a model that keeps one. Of sampled tokens (else None or empty) lanes: what draws
    them, one for each row of the next step; q: float64 [lanes, N], the probability with which each
    one was drawn; recorded: by lane, the distributions that they were drawn from, None of a certain
    one.
    """

    places: LanePlaces | None = None
    tree: Tree = CHAIN

    def __init__(
        self, rows: Index, first: Ints, tokens: Ints, lanes: list[Lane] | None = None
    ) -> None:
        self.rows, self.first, self.tokens, self.lanes = rows, first, tokens, lanes
        self.steps = 0
        self.q = None if lanes is None else np.ones(tokens.shape)
        self.recorded: list[list[sampling.Row | None]] = [[] for _ in lanes or ()]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def inputs(self) -> Ints:
        """The tokens that the next step reads, int32 [rows]: of each lane the nodes that have
        children."""
        if not self.steps:
            return self.first
        column = self.tree.reads[self.steps]
        return self.tokens[:, column] if type(column) is int else self.tokens[:, column].reshape(-1)

    def take(self, best: Ints) -> None:
        """Takes the likeliest tokens as the next level; best: [rows, ≥ width], of the step."""
        tree, level = self.tree, self.steps
        columns = slice(tree.ends[level], tree.ends[level + 1])
        of = tree.lines[level], tree.ranks[columns.start + 1 : columns.stop + 1]
        self.tokens[:, columns] = best.reshape(len(self), -1, best.shape[1])[:, of[0], of[1]]
        for row in self.recorded:  # a token with q = 1 has no distribution
            row += [None] * len(of[0])
        self.steps += 1
        if self.lanes and tree.width > 1 and self.steps < tree.depth:
            own = self.lanes[:: len(tree.inner[level])]  # a lane of each sequence
            self.lanes = [lane for lane in own for _ in tree.inner[self.steps]]

    def record(self, n: int, column: int, proposal: Proposal) -> None:
        """Records a token of lane n, which was sampled."""
        assert self.q is not None, "a rollout without draws"
        token, q, row = proposal
        self.tokens[n, column], self.q[n, column] = token, q
        self.recorded[n].append(row if q < 1 else None)

    def drop(self, lane: int, tokens: list[int]) -> bool:
        """Drops a lane's first tokens; returns whether they were these, which a grammar forced."""
        count = len(tokens)
        self.tokens[lane] = np.roll(self.tokens[lane], -count)
        if self.q is not None:
            self.q[lane] = np.roll(self.q[lane], -count)
            self.recorded[lane] = self.recorded[lane][count:]
        return bool(self.tokens[lane, -count:].tolist() == tokens)

    def keep(self, lanes: Sequence[int], rows: Sequence[int]) -> None:
        """Keeps only `lanes`, chosen for batch rows `rows`, and drops all other lanes."""
        chosen, each = np.array(lanes, np.int64), len(self.lanes or ()) // max(1, len(self))
        self.rows = np.array(rows, np.int64)
        self.first, self.tokens = self.first.take(chosen), self.tokens.take(chosen, axis=0)
        if self.places is not None:
            self.places = self.places.keep(chosen)
        if self.lanes is not None and self.q is not None:
            self.q = self.q.take(chosen, axis=0)
            self.lanes = [one for n in lanes for one in self.lanes[n * each : (n + 1) * each]]
            self.recorded = [self.recorded[n] for n in lanes]

    def fill(self, count: int) -> None:
        """Gives every lane `count` levels, without a forward: the tokens that it lacks repeat its
        first one, and are certain."""
        if self.steps < count:
            start, end = self.tree.ends[self.steps], self.tree.ends[count]
            if self.q is not None:
                self.q[:, start:end] = 1.0
            for row in self.recorded:
                row[start:] = [None] * (end - start)
            self.tokens[:, start:end] = self.first[:, None]
            self.steps = count

    def proposals(self, lane: int, count: int) -> list[NDArray[np.float32]]:
        """Returns the distributions [V] of the lane's first `count` tokens that were drawn with
        q < 1."""
        recorded = self.recorded[lane][:count] if self.recorded else ()
        return [row for row in recorded if row is not None]


@dataclass(frozen=True)
class Lanes:
    """The outcome for which each lane is grown; all arrays are [lanes].

    rows: the lane's batch row. k: the number of accepted tokens in its outcome; of a tree the node.
    place: the rank of its bonus candidate among the candidates of that k, from 0.
    """

    rows: Index
    k: Ints
    place: Ints


class Branches(NamedTuple):
    """One lane for each bonus candidate, and the rollout that grows these lanes."""

    lanes: Lanes
    rollout: Rollout


class Oracle:
    """Base class of both oracles.

    reads_tokens: whether the batch keeps tokens for it. reads_forwards: whether the forwards'
    results decide. chains: whether the device may decide whole greedy rounds by itself
    (features.device_rounds). grammars: makes what makes sequences' grammars (None: they have none).
    forces: whether tokens that these leave no choice of are committed without a forward. tree:
    the shape of a draft, a chain of any length by default. layout: the places of its nodes and of
    branches after them, if any grow (None: the tree's own).
    """

    tree: Tree = CHAIN
    layout: Branched | None = None
    reads_tokens: ClassVar[bool] = False
    reads_forwards: ClassVar[bool] = False
    chains: bool = False
    grammars: Callable[[], Grammars] | None = None
    forces: bool = False

    def grammar(self, one: Live) -> Grammar | None:
        """Returns the state of a sequence's grammar; None without one."""
        if one.grammar is None and one.request.grammar and self.grammars is not None:
            one.grammar = self.grammars().begin(one.request.grammar)
            one.grammar.forces = self.forces and one.request.logprobs is None
        return one.grammar

    def prompt(self, request: Request) -> Sequence[int]:
        """Returns the tokens of a request up to its first_token, if tokens are read."""
        return request.prompt

    def prepare(self, requests: Iterable[Request]) -> None:
        """Draws the first tokens of these sequences ahead of the rounds that admit them.

        Called while no sequence is live. The default does nothing.
        """

    def begin_round(self, batch: Batch, started: Sequence[Live]) -> None:
        """Prepares the tokens that this round needs; called after an outcome was applied.

        started: the sequences whose first round it is. The default does nothing.
        """


class TargetOracle(Oracle, ABC):
    """Decides which drafted tokens the target accepts, and the token that follows them.

    gather_logits: collects the logits of several target ranks, if the forwards' results decide.
    """

    gather_logits: LogitsGather | None = None

    def gather(self, rows: int, waiter: Waiter) -> None:
        """Collects what judging needs from the other target ranks (collective), when the forward
        over `rows` verified rows is over. The default does nothing."""

    @abstractmethod
    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies the acceptance rule to the finished forward.

        Returns (num_accepted, bonus), both int32 [b], as an Outcome has them. `proposals` is called
        only if the rule rejects a token that was drawn with q < 1.
        """

    def truth(self) -> Ints | None:
        """Returns the target's tokens of this round, int32 [b, K+1]; None: its forwards decide."""
        return None

    def logprobs(self, batch: Batch, accepted: Ints, bonus: Ints) -> Mapping[int, list[Logprob]]:
        """Returns, by batch row, the log-probabilities of the tokens that a judged round emitted.

        Only for sequences that asked for them (Request.logprobs). The default returns none.
        """
        return _NO_LOGPROBS

    def lessons(self, batch: Batch, accepted: Ints, bonus: Ints, sent: Sent) -> list[Lesson]:
        """Returns a judged round's lessons for a learner, by sequence: of all rows up to the bonus.

        sent: how many tokens of a sequence the learner has.
        """
        raise NotImplementedError("lessons of a workload without logits")

    def logits_of(self, row: int) -> NDArray[np.float32]:
        """Returns the target's logits [V] of a row of the finished forward."""
        raise NotImplementedError("logits of a workload without them")


class DraftOracle(Oracle, ABC):
    """Decides which tokens a draft proposes, and which bonus tokens it prepares for.

    lookahead: K. is_sound: whether the last step's logits were finite, if watched, as replaced
    weights are.
    """

    lookahead: int
    is_sound = True

    def grammar(self, one: Live) -> Grammar | None:
        grammar = super().grammar(one)
        if grammar is not None:
            grammar.branch(one.answer)
        return grammar

    @abstractmethod
    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a lane (branch slot) for each bonus candidate t*, after the glue forward.

        The candidates are the rollout's `first`. A sequence whose speculation was a hit keeps
        fan_outs.after_hit[k] candidates at each k, and after_miss[k] after a miss. The token that
        was served after k accepted tokens (in a tree: a child of node k) is never one of them.
        """

    def ahead(
        self, batch: Batch, speculation: Speculation, fan_outs: FanOuts
    ) -> tuple[Branches, Ints | int]:
        """Returns (`branches` before the glue is over, growing.GrowthSheet.picks), of chains.

        Tokens are −1 unless they are imposed; only then `picks` are read.
        """
        return self.branches(batch, speculation, fan_outs), 0

    @abstractmethod
    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Returns new lanes that continue batch rows `rows` from their last committed token.

        source: which backup drafts them (JIT or FAST).
        """

    @abstractmethod
    def collect(self, rollouts: Sequence[Rollout], first_row: int) -> None:
        """Stores the tokens of the finished step in the rollouts, whose lanes follow one another
        from row `first_row` of the forward on.

        Raises DivergedError, and leaves `steps` of unfinished rollouts as they are, if a token is
        sampled from logits that are not finite.
        """

    def forget(self) -> None:
        """Notes that the model's weights have changed. The default does nothing."""
