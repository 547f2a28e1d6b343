"""The interfaces of a workload's target and draft workers.

The decoding loops in `decode` use a model through these classes alone. Workers start forwards and
report when they are over; they never send messages, wait for a peer or read a clock. Every rank's
worker sees the same batch, because every rank applies the same outcomes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Batch, Ints, Request, Source, Speculation, verify_rows
from mpissd.common.wait import Waiter
from mpissd.engine.comm.logit_stream import Lesson, Sent
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.placed import PlacedWorker
from mpissd.engine.workload.rollout import Branches, Rollout

W = TypeVar("W", bound="Worker")
# (batch row, i) → float32 [V]: the distribution from which drafted token i was drawn.
_NO_LOGPROBS: Mapping[int, list[float]] = {}
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


class Worker(PlacedWorker):
    """Base class of target and draft workers: follows the batch and runs forwards."""

    # Whether the device may decide whole greedy rounds by itself (decode.chained).
    chains: bool = False
    reads_forwards: ClassVar[bool] = False  # whether the forwards decide its tokens

    @abstractmethod
    def twin(self: W, stepper: Forwards) -> W:
        """Returns a worker with the same laws that runs its forwards on `stepper`."""

    def prepare(self, requests: Iterable[Request]) -> None:
        """Draws the first tokens of these sequences ahead of the rounds that admit them.

        Called while no sequence is live. The default does nothing.
        """

    def done(self) -> bool:
        """Returns whether the launched forward is over; never blocks."""
        return self.stepper.done()

    def wait(self, waiter: Waiter) -> None:
        """Waits until the launched forward is over."""
        self.stepper.wait(waiter)

    def elapsed_s(self) -> float:
        """Returns the device time of the last finished forward, in seconds."""
        return self.stepper.elapsed_s()

    def close(self) -> None:
        """Frees the forwards; must be called before the group's communicator is freed."""
        self.stepper.close()


class TargetWorker(Worker):
    """Runs one target rank's share of the target model, and applies the acceptance rule."""

    def upload(self, batch: Batch, speculation: Speculation, fill: int = 0) -> None:
        """Hands the tokens that the next launch verifies to the device.

        A sequence has num_draft + 1 rows: its last committed token and its drafted tokens. Behind
        them, up to `fill` tokens of opened prompts are stored.
        """
        tokens = verify_rows(batch.last_tokens, speculation)
        self._upload_trunk(len(tokens), tokens, batch, speculation, fill)

    def launch(self) -> None:
        """Starts the forward over the uploaded rows (collective over the target ranks)."""
        self.stepper.launch()

    def served(self, batch: Batch, speculation: Speculation) -> None:
        """Records the speculation that is verified. The default does nothing."""

    def truth(self) -> Ints | None:
        """Returns the target's tokens of this round, int32 [b, K+1]; None: its forwards say."""
        return None

    @abstractmethod
    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies the acceptance rule to the finished forward.

        Returns (num_accepted, bonus), both int32 [b]. `proposals` is called only where the rule
        rejects a token that was drawn with q < 1.
        """

    def logprobs(
        self, batch: Batch, speculation: Speculation, accepted: Ints, bonus: Ints
    ) -> Mapping[int, list[float]]:
        """Returns, by batch row, the log-probabilities of the tokens that a judged round emitted.

        Of the sequences that asked for them (Request.logprobs); by default of none.
        """
        return _NO_LOGPROBS

    def lessons(
        self, batch: Batch, accepted: Ints, bonus: Ints, sent: Sent, *, everywhere: bool
    ) -> list[Lesson]:
        """Returns what a judged round shows a learner, of each sequence.

        sent: how many tokens of a sequence the learner has. everywhere: of all rows up to the
        bonus, or of those alone that rejected a drafted token.
        """
        raise NotImplementedError("lessons of a workload without logits")

    def logits_of(self, row: int) -> NDArray[np.float32]:
        """Returns the target's logits [V] of a row of the finished forward."""
        raise NotImplementedError("logits of a workload without them")


class DraftWorker(Worker):
    """Runs the whole draft model on a draft rank, or on the lead where the draft is inline."""

    lookahead: int
    first_row: int = 0  # the row of the first lane in the last step's forward

    def launch_glue(self, batch: Batch, speculation: Speculation) -> None:
        """Starts the forward that scores the served trunk, K+1 rows a sequence."""
        tokens = verify_rows(batch.last_tokens, speculation)
        rows = len(batch) * (self.lookahead + 1)
        self._upload_trunk(rows, tokens, batch, speculation, lists=True)
        self.stepper.launch()

    def served(self, batch: Batch, speculation: Speculation) -> None:
        """Records the speculation that was served.

        Called before the glue forward, and also in rounds that have none. The default does nothing.
        """

    @abstractmethod
    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a lane for each bonus candidate t*, after the glue forward.

        The candidates are the rollout's `first`. A sequence whose speculation was a hit keeps
        fan_outs.after_hit[k] candidates at each k, and after_miss[k] after a miss. The token that
        was served behind k accepted tokens is never one of them.
        """

    @abstractmethod
    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Returns new lanes that continue batch rows `rows` from their last committed token.

        source: which backup drafts them (JIT or FAST).
        """

    def settle(self, batch: Batch, rollout: Rollout, rows: NDArray[np.int64], k: Ints) -> None:
        """Gives new branches, behind k accepted tokens of batch rows `rows`, their places."""
        if self.placement is not None:
            rollout.places = self.placement.lanes(batch, rows, k)

    def resume(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Returns the lanes of `restart`, with their places in the KV cache."""
        rollout = self.restart(batch, rows, source)
        if self.placement is not None:
            rollout.places = self.placement.restart(batch, np.asarray(rows, np.int64))
        return rollout

    def launch_step(self, rollouts: Sequence[Rollout]) -> None:
        """Starts one forward that grows every lane of every rollout by one token."""
        inputs = [rollout.inputs for rollout in rollouts]
        if self.placement is not None:
            self.first_row = self._upload_lanes(self.placement, rollouts, inputs)
        else:
            tokens = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
            self.stepper.upload(len(tokens), tokens)
        self.stepper.launch()

    @abstractmethod
    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        """Stores the tokens of the finished step in the rollouts.

        Raises DivergedError, and leaves `steps` of those rollouts that it did not finish as they
        are, where a token is sampled from logits that are not finite.
        """

    def is_sound(self) -> bool:
        """Returns whether the last step's logits were finite, as far as that is watched: of
        weights that were replaced."""
        return True
