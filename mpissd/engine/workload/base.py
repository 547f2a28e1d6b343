"""A workload and its two workers; the loops in `decode` know nothing else of a model.

Workers start forwards and say when they are over; they never send, wait for a peer or look at a
clock. Every rank's worker sees the same batch, kept by applying the same outcomes.
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

if TYPE_CHECKING:
    from mpissd.engine.job.job import Job

W = TypeVar("W", bound="Worker")
Admissions = Sequence[tuple[int, Request]]
# (batch row, i) → float32 [V]: the distribution that drafted token i was drawn from.
Proposals = Callable[[int, int], NDArray[np.float32]]


class LogitsGather(Protocol):
    """T ranks' shares of the logits → the lead."""

    def start(self, local: NDArray[np.float32]) -> None:
        """Starts to gather `local` [rows, V/T] (collective)."""

    def done(self) -> bool:
        """Returns whether the gather is over (never blocks)."""

    def result(self) -> NDArray[np.float32]:
        """Returns [T, rows, V/T], on the lead."""


OpenGather = Callable[[], LogitsGather]


class Worker(ABC):
    """What both sides have in common: sequences come and go, forwards run and end."""

    stepper: Forwards

    @abstractmethod
    def twin(self: W, stepper: Forwards) -> W:
        """The same laws over other forwards (calibration)."""

    def prepare(self, requests: Iterable[Request]) -> None:  # noqa: B027
        """Draws what these sequences will need first, while none is live."""

    @abstractmethod
    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        """Follows an applied outcome: takes new sequences into their slots (a slot taken again
        forgets its last tenant) and makes what the round will need available."""

    def done(self) -> bool:
        """Whether the launched forward is over (never blocks)."""
        return self.stepper.done()

    def wait(self, waiter: Waiter) -> None:
        """Returns when the launched forward is over."""
        self.stepper.wait(waiter)

    def elapsed_s(self) -> float:
        """Device time of the last finished forward."""
        return self.stepper.elapsed_s()

    def close(self) -> None:
        """Frees the forwards; before the group's communicator."""
        self.stepper.close()


class TargetWorker(Worker):
    """One target rank's share of the target model."""

    def upload(self, batch: Batch, speculation: Speculation) -> None:
        """Hands the tokens of Σ(num_draft+1) rows to the device, for the next launch."""
        tokens = verify_rows(batch.last_tokens, speculation)
        self.stepper.upload(len(tokens), tokens)

    def launch(self) -> None:
        """Starts the forward over the uploaded rows (collective over the target ranks)."""
        self.stepper.launch()

    @abstractmethod
    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies the acceptance rule to the finished forward: (num_accepted, bonus), both [b].

        proposals: asked only where a token is rejected that was not certain (q < 1).
        """


class Rollout:
    """Lanes that a draft grows together, one token a lane a step.

    tokens: int32 [lanes, K], columns up to `steps` are grown. rows: the batch row of each lane;
    empty while several lanes grow for one sequence and nobody knows which will win.
    q: float64 [lanes, K] where tokens are sampled, the probability that each was drawn with.
    """

    q: NDArray[np.float64] | None = None

    def __init__(self, rows: NDArray[np.int64], first: Ints, tokens: Ints) -> None:
        self.rows = rows
        self.first = first  # [lanes] the token that each lane starts from
        self.tokens = tokens
        self.steps = 0

    def __len__(self) -> int:
        return len(self.first)

    @property
    def inputs(self) -> Ints:
        """The token that each lane's next step reads."""
        return self.tokens[:, self.steps - 1] if self.steps else self.first

    def keep(self, lanes: Sequence[int], rows: Sequence[int]) -> None:
        """Prunes to `lanes`, which won for batch rows `rows`; what the others grew is given up."""
        chosen = np.array(lanes, np.int64)
        self.rows = np.array(rows, np.int64)
        self.first, self.tokens = self.first.take(chosen), self.tokens.take(chosen, axis=0)

    def proposals(self, lane: int) -> list[NDArray[np.float32]]:
        """The distributions [V] that the lane's tokens were drawn from, of those with q < 1."""
        return []


@dataclass(frozen=True)
class Lanes:
    """What each lane of a growth stands for, [lanes]: its batch row, the k of its outcome, and the
    place of its candidate among k's."""

    rows: NDArray[np.int64]
    k: Ints
    place: Ints

    @cached_property
    def lists(self) -> tuple[list[int], list[int]]:
        """(rows, k) as lists: lanes that stay the same are read once."""
        return self.rows.tolist(), self.k.tolist()


class Branches(NamedTuple):
    """A lane for each bonus candidate, and the rollout that grows from it."""

    lanes: Lanes
    rollout: Rollout


class DraftWorker(Worker):
    """The draft model of one draft rank (or inline, on the lead)."""

    lookahead: int

    def launch_glue(self, batch: Batch, speculation: Speculation) -> None:
        """Starts the (K+1)-row forward a sequence that scores the trunk just served."""
        tokens = verify_rows(batch.last_tokens, speculation)
        self.stepper.upload(len(batch) * (self.lookahead + 1), tokens)
        self.stepper.launch()

    def served(self, batch: Batch, speculation: Speculation) -> None:
        """Hears what was served, of all drafts; before the glue, and where there is none."""

    @abstractmethod
    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """After the glue: a lane for each bonus candidate t*, the `first` of its rollout.

        A sequence whose speculation was a hit keeps fan_outs.after_hit candidates at each k, else
        after_miss; never the token that was served there.
        """

    @abstractmethod
    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Lanes that continue batch rows `rows` from their newest committed token."""

    def launch_step(self, rollouts: Sequence[Rollout]) -> None:
        """Starts one forward that grows every lane of every rollout by one token."""
        inputs = [rollout.inputs for rollout in rollouts]
        tokens = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        self.stepper.upload(len(tokens), tokens)
        self.stepper.launch()

    @abstractmethod
    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        """Takes the tokens of the finished step into the rollouts."""


@dataclass(frozen=True)
class RowFields:
    """The keys of a result row that a workload fills; None is null in the row."""

    acceptance: str | None = None
    acceptance_fast: str | None = None
    hit_law: str | None = None
    temperature: float | None = None
    vocab: int | None = None
    order: int | None = None
    divergence: float | None = None
    saguaro_c: float | None = None
    prompt_tokens: int | None = None


class Workload(ABC):
    """What a job decodes: its sequences, and the workers that verify and draft their tokens.

    A new workload is a subclass in a folder of its own and one call of common.workloads.register.
    """

    is_imposed: ClassVar[bool] = False  # outcomes follow job.acceptance and job.hit_law alone
    drafts_in_parallel: ClassVar[bool] = False  # takes drafts of several tokens a forward (Medusa)
    reports_outcomes: ClassVar[bool] = False  # rows report fitted laws though nothing adapts

    def __init__(self, job: Job) -> None:
        self.job = job

    def check(self) -> None:
        """Raises ConfigError where the job asks for what this workload cannot decode."""
        draft = self.job.draft
        if draft is not None and draft.num_tokens > 1 and not self.drafts_in_parallel:
            name = self.job.config.workload
            raise ConfigError(f"draft={draft.name} with workload={name}: allowed: gemm")

    @property
    def stacks(self) -> Stacks:
        """Makes the two models; the stack of products, where a workload says no other."""
        return GemmStacks()

    @property
    @abstractmethod
    def vocab(self) -> int:
        """V: token ids are below it."""

    @property
    def samples(self) -> bool:
        """Whether drafted tokens are random, so that their distributions travel with them."""
        return False

    @property
    @abstractmethod
    def law(self) -> str:
        """Describes what decides the outcomes, in one line for the card."""

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

    def row_fields(self) -> RowFields:
        """Returns what a result row says of this workload."""
        return RowFields()
