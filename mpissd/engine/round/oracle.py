"""The interfaces of the objects that decide tokens: a TargetOracle decides which tokens the target
emits, a DraftOracle which tokens the draft proposes.

Workers (round.rows) run a model's forwards; an oracle decides tokens from their logits, or ignores
them and reads given acceptance rates, a recording or a synthetic language model (engine.oracle).
The oracles of all ranks see equal sequences, because every rank applies the same results of
verifications, so that they decide alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints, Logprob, Request, Scored, Source, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.tree import CHAIN, Shape
from mpissd.engine.round.branches import Branches
from mpissd.engine.round.sequence import Batch, LiveSequence, Part

Logits = NDArray[np.float32]
# (batch row, i) → the distribution, float32 [V], of the row's i-th token with probability q < 1
Proposals = Callable[[int, int], NDArray[np.float32]]
# Each of T target ranks passes its logits [rows, V/T]; rank 0 gets all, float32 [T, rows, V/T].
LogitsGather = Callable[[Logits, Waiter], Logits]
OpenGather = Callable[[], LogitsGather]


class Oracle:
    """Base class of TargetOracle and DraftOracle, which decide tokens.

    shape: the shape of a draft, by default a chain of any length. reads_tokens: whether the oracle
    needs the sequences' tokens, which the batch then keeps. reads_forwards: whether it needs the
    results (logits) of forwards. chains: whether the GPU may decide whole rounds in its place.
    """

    reads_tokens: ClassVar[bool] = False
    reads_forwards: ClassVar[bool] = False
    chains: bool = False

    def __init__(self, shape: Shape = CHAIN) -> None:
        self.shape = shape

    def prompt(self, request: Request) -> Sequence[int]:
        """Returns the prompt's tokens. The last one is the request's first_token."""
        return request.prompt

    def prepare(self, requests: Iterable[Request]) -> None:
        """Computes the first tokens of these requests' sequences before any round, so that no round
        takes longer for it. The default does nothing."""

    def begin_round(self, batch: Batch, started: Sequence[LiveSequence]) -> None:
        """Prepares the coming round, after the outcome of the last one was applied to the batch.
        started: the sequences whose first round it is. The default does nothing."""


class TargetOracle(Oracle, ABC):
    """Decides which drafted tokens the target accepts, and the token that follows them. scores:
    whether the coming forward stores parts of prompts whose log-probabilities are asked for."""

    scores = False

    def gather(self, rows: int, waiter: Waiter) -> None:
        """Collects what `judge` needs from the other target ranks, such as logits, after a forward
        of `rows` rows. All target ranks call it together. The default does nothing."""

    @abstractmethod
    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Decides after the target's forward which drafted tokens are accepted. Returns
        (num_accepted, bonus), both int32 [b]: of each sequence, the number of accepted tokens and
        the token that the target emits after them. proposals: returns the distribution from which a
        token was drafted; called only for a rejected token that has q < 1."""

    def truth(self) -> Ints | None:
        """Returns the next K + 1 tokens that the target emits for each sequence, int32 [b, K + 1],
        if they are known before its forward; else None."""
        return None

    def forced(self, batch: Batch, accepted: Ints, bonus: Ints) -> Mapping[int, list[int]]:
        """Returns, by batch row, the tokens after the bonus token at places where a grammar allows
        only one token. These are committed with no forward. accepted, bonus: the result of `judge`.
        The default returns none."""
        return {}

    def logprobs(self, batch: Batch, accepted: Ints, bonus: Ints) -> Mapping[int, list[Logprob]]:
        """Returns, by batch row, the log-probabilities of a round's emitted tokens, for requests
        that ask for them. accepted, bonus: the result of `judge`. The default returns none."""
        return {}

    def scored(self, parts: Sequence[Part]) -> Sequence[Scored]:
        """Returns the log-probabilities of the prompts' tokens that follow `parts`, which
        the last forward stored. The default returns none."""
        return ()

    def logits_of(self, row: int) -> Logits:
        """Returns the target's logits in row `row` of the last forward, [V] for V tokens."""
        raise NotImplementedError("logits of a workload without them")


class DraftOracle(Oracle, ABC):
    """Decides which tokens a draft proposes, and for which bonus tokens it drafts ahead.

    lookahead: K, the number of tokens drafted in a round. is_sound: False if the last forward gave
    logits that are not finite, after newer weights were loaded.
    """

    is_sound = True

    def __init__(self, lookahead: int, shape: Shape = CHAIN) -> None:
        super().__init__(shape)
        self.lookahead = lookahead

    @abstractmethod
    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Chooses candidates for the next bonus token t*, and returns a branch (draft) after each.

        Called after the draft's forward over the drafted tokens that the target now verifies
        (`speculation`). For each possible number k of accepted tokens there are
        fan_outs.after_hit[k] candidates if the drafted tokens were a cache hit, else after_miss[k].
        The drafted token after the k accepted ones (in a tree: a child of node k) is no candidate:
        t* is emitted only if it is rejected.
        """

    @abstractmethod
    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Branches:
        """Returns new branches that continue the committed tokens of batch rows `rows`, after cache
        misses. source: what drafts, JIT (the draft model) or FAST (the fast backup)."""

    @abstractmethod
    def collect(self, grown: Sequence[Branches], first_row: int) -> None:
        """Reads the tokens that the finished draft forward has drafted, and appends them to the
        branches `grown`. Their rows in the forward follow one another from row `first_row` on.
        Raises DivergedError if a token is sampled from logits that are not finite; other branches
        may then lack their token."""

    def is_decided(self, branches: Branches, levels: int) -> bool:
        """Returns whether grammars allow only one token at each of the next `levels` places of all
        branches, so that drafting them is useless. The default returns False."""
        return False

    def forget(self) -> None:
        """Called after the model's weights were replaced. The default does nothing."""
