"""The interfaces of a workload and of its target and draft workers.

The decoding loops in `decode` use a model through these classes alone. Workers start forwards and
report when they are over; they never send messages, wait for a peer or read a clock. Every rank's
worker sees the same batch, because every rank applies the same outcomes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Batch, Ints, Request, Source, Speculation, verify_rows
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.model.gemm_stack import GemmStacks
from mpissd.engine.model.stacks import Stacks
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.endings import Endings
from mpissd.engine.workload.row_fields import RowFields

if TYPE_CHECKING:
    from mpissd.engine.job.job import Job

W = TypeVar("W", bound="Worker")
Admissions = Sequence[tuple[int, Request]]
# (batch row, i) → float32 [V]: the distribution from which drafted token i was drawn.
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


class Worker(ABC):
    """Base class of target and draft workers: follows the batch and runs forwards."""

    stepper: Forwards

    @abstractmethod
    def twin(self: W, stepper: Forwards) -> W:
        """Returns a worker with the same laws that runs its forwards on `stepper`."""

    def prepare(self, requests: Iterable[Request]) -> None:  # noqa: B027
        """Draws the first tokens of these sequences ahead of the rounds that admit them.

        Called while no sequence is live. The default does nothing.
        """

    @abstractmethod
    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        """Admits new sequences to their slots and prepares the tokens that this round needs.

        Called after an outcome was applied to `batch`. A slot that is used again forgets its
        previous sequence.
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

    def upload(self, batch: Batch, speculation: Speculation) -> None:
        """Hands the tokens that the next launch verifies to the device.

        A sequence has num_draft + 1 rows: its last committed token and its drafted tokens.
        """
        tokens = verify_rows(batch.last_tokens, speculation)
        self.stepper.upload(len(tokens), tokens)

    def launch(self) -> None:
        """Starts the forward over the uploaded rows (collective over the target ranks)."""
        self.stepper.launch()

    @abstractmethod
    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies the acceptance rule to the finished forward.

        Returns (num_accepted, bonus), both int32 [b]. `proposals` is called only where the rule
        rejects a token that was drawn with q < 1.
        """


class Rollout:
    """Token sequences (lanes) that a draft grows together, one token a lane in each step.

    tokens: int32 [lanes, K]; the first `steps` columns are grown. rows: the batch row of each lane;
    empty while a sequence has several lanes and the outcome has not yet chosen one.
    q: float64 [lanes, K], the probability with which each token was drawn; None where tokens are
    not sampled.
    """

    q: NDArray[np.float64] | None = None

    def __init__(self, rows: NDArray[np.int64], first: Ints, tokens: Ints) -> None:
        self.rows = rows
        self.first = first  # [lanes], the token from which each lane starts
        self.tokens = tokens
        self.steps = 0

    def __len__(self) -> int:
        return len(self.first)

    @property
    def inputs(self) -> Ints:
        """Token that each lane's next step reads, int32 [lanes]."""
        return self.tokens[:, self.steps - 1] if self.steps else self.first

    def keep(self, lanes: Sequence[int], rows: Sequence[int]) -> None:
        """Keeps only `lanes`, chosen for batch rows `rows`, and drops all other lanes."""
        chosen = np.array(lanes, np.int64)
        self.rows = np.array(rows, np.int64)
        self.first, self.tokens = self.first.take(chosen), self.tokens.take(chosen, axis=0)

    def proposals(self, lane: int) -> list[NDArray[np.float32]]:
        """Returns the distributions [V] of the lane's tokens that were drawn with q < 1."""
        return []


@dataclass(frozen=True)
class Lanes:
    """The outcome for which each lane is grown; all arrays are [lanes].

    rows: the lane's batch row. k: the number of accepted tokens in its outcome. place: the rank of
    its bonus candidate among the candidates of that k, from 0.
    """

    rows: NDArray[np.int64]
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


class DraftWorker(Worker):
    """Runs the whole draft model on a draft rank, or on the lead where the draft is inline."""

    lookahead: int

    def launch_glue(self, batch: Batch, speculation: Speculation) -> None:
        """Starts the forward that scores the served trunk, K+1 rows a sequence."""
        tokens = verify_rows(batch.last_tokens, speculation)
        self.stepper.upload(len(batch) * (self.lookahead + 1), tokens)
        self.stepper.launch()

    def served(self, batch: Batch, speculation: Speculation) -> None:
        """Records the speculation that was served, whichever draft made it.

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

    def launch_step(self, rollouts: Sequence[Rollout]) -> None:
        """Starts one forward that grows every lane of every rollout by one token."""
        inputs = [rollout.inputs for rollout in rollouts]
        tokens = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        self.stepper.upload(len(tokens), tokens)
        self.stepper.launch()

    @abstractmethod
    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        """Stores the tokens of the finished step in the rollouts."""


class Workload(ABC):
    """Base class of workloads: makes the sequences of a job and the workers that decode them.

    A new workload is a subclass in a folder of its own and one call of common.workloads.register.
    """

    is_imposed: ClassVar[bool] = False  # only job.acceptance and job.hit_law decide the outcomes
    drafts_in_parallel: ClassVar[bool] = False  # allows drafts of several tokens a forward (Medusa)
    reports_outcomes: ClassVar[bool] = False  # rows report fitted laws though nothing adapts

    def __init__(self, job: Job) -> None:
        self.job = job

    def check(self) -> None:
        """Raises ConfigError if this workload cannot decode the job."""
        draft = self.job.draft
        if draft is not None and draft.num_tokens > 1 and not self.drafts_in_parallel:
            name = self.job.config.workload
            raise ConfigError(f"draft={draft.name} with workload={name}: allowed: gemm")

    @property
    def stacks(self) -> Stacks:
        """Factory of the two models' stacks; by default stacks of matrix products."""
        return GemmStacks()

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Size V of the vocabulary; token ids are 0 … V − 1."""

    @property
    def samples(self) -> bool:
        """Whether drafted tokens are sampled, so that a speculation carries their distributions."""
        return False

    @property
    @abstractmethod
    def law(self) -> str:
        """One line for the printed card that describes what decides the outcomes."""

    @abstractmethod
    def target_worker(
        self, stepper: Forwards, rank: int = 0, open_gather: OpenGather | None = None
    ) -> TargetWorker:
        """Returns the worker of target rank `rank`, over its share of the target model.

        open_gather: makes the gather of T > 1 ranks' logits; collective over the target ranks.
        """

    @abstractmethod
    def draft_worker(self, stepper: Forwards) -> DraftWorker:
        """Returns the worker of one draft, over the whole draft model."""

    @abstractmethod
    def requests(self, first_id: int, count: int) -> list[Request]:
        """Returns `count` sequences to decode, numbered from first_id."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences that a run decodes, batch_size at a time."""
        return self.job.config.batch_size

    def endings(self) -> Endings | None:
        """Returns what ends the sequences of one pass (None: nothing); by default a stop token."""
        stop = self.job.config.stop_token
        return None if stop is None else Endings(stop)

    def row_fields(self) -> RowFields:
        """Returns the values of this workload's keys in the result row."""
        return RowFields()
