"""Oracles: they decide which tokens the target emits and which ones the draft proposes.

There is one target worker and one draft worker (workload.workers), which run a model's forwards;
an oracle decides their tokens. Imposed distributions (gemm), a recording (replay), a known language
model (markov) and the forwards' own logits (text) are oracles. Every rank's oracle sees the same
batch, because every rank applies the same outcomes. Oracles send no messages and read no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints, Request, Source, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.comm.learner_messages import Lesson, Sent
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.sequence import Batch, Index, LanePlaces
from mpissd.engine.workload.sequence import Sequence as Live

_NO_LOGPROBS: Mapping[int, list[float]] = {}
# (batch row, i) → float32 [V]: the distribution from which uncertain token i was drawn.
Proposals = Callable[[int, int], NDArray[np.float32]]


class LogitsGather(Protocol):
    """Gathers the T target ranks' shares of the logits on the lead."""

    def start(self, local: NDArray[np.float32]) -> None:
        """Starts to gather `local` [rows, V/T] (collective)."""

    def done(self) -> bool:
        """Returns whether the gather is over (never blocks)."""

    def result(self) -> NDArray[np.float32]:
        """Returns the gathered logits on the lead: float32 [T, rows, V/T]."""


OpenGather = Callable[[], LogitsGather]


class Rollout:
    """Token sequences (lanes) that a draft grows together, one token a lane in each step.

    tokens: int32 [lanes, K]; the first `steps` columns are grown. rows: the batch row of each lane;
    empty while a sequence has several lanes and the outcome has not yet chosen one. places: the
    lanes' places in the KV cache of a model that keeps one. q: float64 [lanes, K], the probability
    with which each token was drawn; None if all are certain.
    """

    q: NDArray[np.float64] | None = None
    places: LanePlaces | None = None

    def __init__(self, rows: Index, first: Ints, tokens: Ints) -> None:
        self.rows = rows
        self.first = first  # [lanes], the token from which each lane starts
        self.tokens = tokens
        self.steps = 0

    def __len__(self) -> int:
        return len(self.first)

    @property
    def inputs(self) -> Ints:
        """The token of each lane that the next step reads, int32 [lanes]."""
        return self.tokens[:, self.steps - 1] if self.steps else self.first

    def keep(self, lanes: Sequence[int], rows: Sequence[int]) -> None:
        """Keeps only `lanes`, chosen for batch rows `rows`, and drops all other lanes."""
        chosen = np.array(lanes, np.int64)
        self.rows = np.array(rows, np.int64)
        self.first, self.tokens = self.first.take(chosen), self.tokens.take(chosen, axis=0)
        if self.places is not None:
            self.places = self.places.keep(chosen)

    def fill(self, count: int) -> None:
        """Gives every lane `count` tokens, without a forward: those that it lacks repeat its first
        one, and are certain."""
        if self.steps < count:
            self.tokens[:, self.steps : count] = self.first[:, None]
            self.steps = count

    def proposals(self, lane: int, steps: int) -> list[NDArray[np.float32]]:
        """Returns the distributions [V] of the lane's first `steps` tokens that were drawn with
        q < 1."""
        return []


@dataclass(frozen=True)
class Lanes:
    """The outcome for which each lane is grown; all arrays are [lanes].

    rows: the lane's batch row. k: the number of accepted tokens in its outcome. place: the rank of
    its bonus candidate among the candidates of that k, from 0.
    """

    rows: Index
    k: Ints
    place: Ints

    @cached_property
    def lists(self) -> tuple[list[int], list[int]]:
        """Pair (rows, k) as lists, cached because the same lanes serve many rounds."""
        return self.rows.tolist(), self.k.tolist()


class Branches(NamedTuple):
    """One lane for each bonus candidate, and the rollout that grows these lanes."""

    lanes: Lanes
    rollout: Rollout


class Oracle:
    """Base class of both oracles.

    reads_tokens: whether the batch keeps tokens for it. reads_forwards: whether the forwards'
    results decide. chains: whether the device may decide whole greedy rounds by itself
    (decode.chained).
    """

    reads_tokens: ClassVar[bool] = False
    reads_forwards: ClassVar[bool] = False
    chains: bool = False

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
    """Decides which drafted tokens the target accepts, and the token that follows them."""

    def gather(self, rows: int, waiter: Waiter) -> None:
        """Collects what judging needs from the other target ranks (collective), when the forward
        over `rows` verified rows is over. The default does nothing."""

    @abstractmethod
    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies the acceptance rule to the finished forward.

        Returns (num_accepted, bonus), both int32 [b]. `proposals` is called only if the rule
        rejects a token that was drawn with q < 1.
        """

    def truth(self) -> Ints | None:
        """Returns the target's tokens of this round, int32 [b, K+1]; None: its forwards decide."""
        return None

    def logprobs(self, batch: Batch, accepted: Ints, bonus: Ints) -> Mapping[int, list[float]]:
        """Returns, by batch row, the log-probabilities of the tokens that a judged round emitted.

        Of the sequences that asked for them (Request.logprobs); by default of none.
        """
        return _NO_LOGPROBS

    def lessons(
        self, batch: Batch, accepted: Ints, bonus: Ints, sent: Sent, *, everywhere: bool
    ) -> list[Lesson]:
        """Returns a judged round's lessons for a learner, by sequence.

        sent: how many tokens of a sequence the learner has. everywhere: of all rows up to the
        bonus, or only of rows that rejected a drafted token.
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

    @abstractmethod
    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a lane (branch slot) for each bonus candidate t*, after the glue forward.

        The candidates are the rollout's `first`. A sequence whose speculation was a hit keeps
        fan_outs.after_hit[k] candidates at each k, and after_miss[k] after a miss. The token that
        was served after k accepted tokens is never one of them.
        """

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
