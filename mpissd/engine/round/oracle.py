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

    tree: the shape of a draft, a chain of any length by default. reads_tokens: whether the batch
    keeps tokens for it. reads_forwards: whether it decides by the results of forwards. chains:
    whether a device may decide greedy rounds in its place (features.device_rounds).
    """

    reads_tokens: ClassVar[bool] = False
    reads_forwards: ClassVar[bool] = False
    chains: bool = False

    def __init__(self, shape: Shape = CHAIN) -> None:
        self.shape = shape

    def prompt(self, request: Request) -> Sequence[int]:
        """Returns the tokens of a request up to its first_token, if tokens are read."""
        return request.prompt

    def prepare(self, requests: Iterable[Request]) -> None:
        """Draws the first tokens of sequences before the rounds that admit them. Called while no
        sequence is live. The default does nothing."""

    def begin_round(self, batch: Batch, started: Sequence[LiveSequence]) -> None:
        """Prepares the tokens that this round needs; called after an outcome was applied. started:
        the sequences whose first round it is. The default does nothing."""


class TargetOracle(Oracle, ABC):
    """Decides which drafted tokens the target accepts, and the token that follows them."""

    def gather(self, rows: int, waiter: Waiter) -> None:
        """Collects from the other target ranks what `judge` needs of the finished forward over
        `rows` rows. Collective over them. The default does nothing."""

    @abstractmethod
    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies the acceptance rule to the finished forward.

        Returns (num_accepted, bonus), both int32 [b], as an Outcome has them. `proposals` is called
        only if the rule rejects a token that was drawn with q < 1.
        """

    def truth(self) -> Ints | None:
        """Returns the target's tokens of this round, int32 [b, K + 1], if they are known before its
        forward, or None."""
        return None

    def forced(self, batch: Batch, accepted: Ints, bonus: Ints) -> Mapping[int, list[int]]:
        """Returns, by batch row, the tokens that must follow a judged round's bonus token. They are
        committed without a forward. The default returns none."""
        return _NO_TOKENS

    def logprobs(self, batch: Batch, accepted: Ints, bonus: Ints) -> Mapping[int, list[Logprob]]:
        """Returns, by batch row, the log-probabilities of the tokens that a judged round emitted.
        Only for sequences that asked for them (Sampling.logprobs). The default returns none."""
        return _NO_LOGPROBS

    def logits_of(self, row: int) -> Logits:
        """Returns the target's logits [V] of a row of the finished forward."""
        raise NotImplementedError("logits of a workload without them")


class DraftOracle(Oracle, ABC):
    """Decides which tokens a draft proposes, and which bonus tokens it prepares for. lookahead: K.
    is_sound: whether the last step's logits were finite, if watched, as replaced weights are."""

    is_sound = True

    def __init__(self, lookahead: int, shape: Shape = CHAIN) -> None:
        super().__init__(shape)
        self.lookahead = lookahead

    @abstractmethod
    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a branch for each bonus candidate, which is its `first` token, once the draft's
        forward over the served tokens is over.

        After k accepted tokens there are fan_outs.after_hit[k] candidates if the served tokens were
        a hit, and after_miss[k] if they were a miss. The token that is served there (in a tree: a
        child of node k) is never a candidate.
        """

    @abstractmethod
    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Branches:
        """Returns new branches that continue batch rows `rows` from their last committed token;
        source: the backup that drafts them, JIT or FAST."""

    @abstractmethod
    def collect(self, grown: Sequence[Branches], first_row: int) -> None:
        """Stores the tokens of the finished step in branches, whose rows follow one another from
        row `first_row` of the forward on. Raises DivergedError if a token is sampled from logits
        that are not finite; branches without new tokens then keep their `steps`."""

    def is_decided(self, branches: Branches, levels: int) -> bool:
        """Returns whether grammars leave no choice of the next `levels` tokens of all branches, so
        that drafting them is useless. The default returns False."""
        return False

    def forget(self) -> None:
        """Notes that the model's weights have changed. The default does nothing."""
