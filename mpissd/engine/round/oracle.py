"""The two protocols that decide tokens: TargetOracle, which ones the target emits, and DraftOracle,
which ones the draft proposes.

Workers (round.rows) run a model's forwards; an oracle decides their tokens. Imposed distributions,
a recording, a known language model and the forwards' own logits are oracles (engine.oracle). Every
rank's oracle sees the same batch, because every rank applies the same outcomes. Oracles send no
messages and read no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints, Logprob, Request, Source, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.tree import CHAIN, Shape
from mpissd.engine.round.branches import Branches
from mpissd.engine.round.sequence import Batch, LiveSequence

Logits = NDArray[np.float32]
# (batch row, i) → float32 [V]: the distribution from which uncertain token i was drawn.
Proposals = Callable[[int, int], NDArray[np.float32]]
# Gathers the T target ranks' shares of the logits [rows, V/T] on the lead: float32 [T, rows, V/T].
LogitsGather = Callable[[Logits, Waiter], Logits]
OpenGather = Callable[[], LogitsGather]
_NO_LOGPROBS: Mapping[int, list[Logprob]] = {}
_NO_TOKENS: Mapping[int, list[int]] = {}


class Oracle:
    """Base class of both oracles.

    shape: the shape of a draft, a chain of any length by default. reads_tokens: whether the oracle
    needs the batch to keep tokens. reads_forwards: whether it decides by the results of forwards.
    chains: whether a device may decide rounds in place of the oracle (features.device_rounds).
    """

    reads_tokens: ClassVar[bool] = False
    reads_forwards: ClassVar[bool] = False
    chains: bool = False

    def __init__(self, shape: Shape = CHAIN) -> None:
        self.shape = shape

    def prompt(self, request: Request) -> Sequence[int]:
        """Returns the tokens of a request's prompt, up to its first_token."""
        return request.prompt

    def prepare(self, requests: Iterable[Request]) -> None:
        """Computes the first tokens of sequences before the rounds that admit them, while no
        sequence is live. The default does nothing."""

    def begin_round(self, batch: Batch, started: Sequence[LiveSequence]) -> None:
        """Prepares what the coming round needs, after an outcome was applied to the batch. started:
        the sequences whose first round comes. The default does nothing."""


class TargetOracle(Oracle, ABC):
    """Decides which drafted tokens the target accepts, and the token that follows them."""

    def gather(self, rows: int, waiter: Waiter) -> None:
        """Collects what `judge` needs from the other target ranks, after a forward of `rows` rows.
        Collective over the target ranks. The default does nothing."""

    @abstractmethod
    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies the acceptance rule to the finished forward.

        Returns (num_accepted, bonus), the columns of an Outcome, both int32 [b]. proposals: returns
        the distribution of a drafted token; called only for a rejected token that has q < 1.
        """

    def truth(self) -> Ints | None:
        """Returns the tokens that the target emits from now on, int32 [b, K + 1], if they are known
        before its forward, or None."""
        return None

    def forced(self, batch: Batch, accepted: Ints, bonus: Ints) -> Mapping[int, list[int]]:
        """Returns, by batch row, the only tokens that a grammar allows after a judged round's bonus
        token. They are committed without a forward. The default returns none."""
        return _NO_TOKENS

    def logprobs(self, batch: Batch, accepted: Ints, bonus: Ints) -> Mapping[int, list[Logprob]]:
        """Returns, by batch row, the log-probabilities of the tokens that a judged round emitted,
        for sequences that asked for them (Sampling.logprobs). The default returns none."""
        return _NO_LOGPROBS

    def logits_of(self, row: int) -> Logits:
        """Returns the target's logits [V] in a row of the finished forward."""
        raise NotImplementedError("logits of a workload without them")


class DraftOracle(Oracle, ABC):
    """Decides which tokens a draft proposes, and for which bonus tokens it drafts ahead. lookahead:
    K. is_sound: False if replaced weights gave logits that are not finite in the last step."""

    is_sound = True

    def __init__(self, lookahead: int, shape: Shape = CHAIN) -> None:
        super().__init__(shape)
        self.lookahead = lookahead

    @abstractmethod
    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a branch for each candidate of the bonus token t*, which is the branch's `first`.
        Called after the draft's forward over the served tokens.

        After k accepted tokens there are fan_outs.after_hit[k] candidates if the served tokens were
        a cache hit, else after_miss[k]. The served token that follows the k accepted ones (in a
        tree: a child of node k) is no candidate.
        """

    @abstractmethod
    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Branches:
        """Returns new branches that continue the last committed tokens of batch rows `rows`.
        source: what drafts them after a cache miss, JIT or FAST."""

    @abstractmethod
    def collect(self, grown: Sequence[Branches], first_row: int) -> None:
        """Stores the tokens of the finished step in the branches. Their rows follow one another in
        the forward, from row `first_row` on. Raises DivergedError if a token is sampled from logits
        that are not finite; branches that got no tokens then keep their `steps`."""

    def is_decided(self, branches: Branches, levels: int) -> bool:
        """Returns whether grammars allow only one token at each of the next `levels` places of all
        branches, so that a draft of them is useless. The default returns False."""
        return False

    def forget(self) -> None:
        """Called after the model's weights were replaced. The default does nothing."""
