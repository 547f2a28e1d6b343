"""The interface of a workload: how it completes a job, and which oracles decide its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

from mpissd.common.config import WorkloadFlags
from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Request
from mpissd.common.workloads import known
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.model.stepper import ModelSource
from mpissd.engine.model.transformer.shard import StateShard
from mpissd.engine.spec.acceptance import load_laws
from mpissd.engine.workload.oracle import DraftOracle, OpenGather, TargetOracle
from mpissd.engine.workload.resolved import Resolved
from mpissd.engine.workload.workers import DraftWorker, TargetWorker


class Endings:
    """Ends sequences at their stop token; base class of further rules.

    The lead holds one object a pass. A rule may remember each sequence's emitted tokens.
    """

    def __init__(self, *stop_tokens: int) -> None:
        self._stop = frozenset(stop_tokens)

    def kept(self, request_id: int, before: int, tokens: Sequence[int]) -> int | None:
        """Returns how many of a round's tokens count if the sequence ends with them, or None.

        before: the number of tokens that the sequence had emitted before this round.
        """
        for n, token in enumerate(tokens, 1):
            if token in self._stop:
                return n
        return None


def laws_label(flags: WorkloadFlags) -> str | None:
    """Returns the name and digest of the --laws file; None without one."""
    return None if flags.laws is None else load_laws(flags.laws).label


@dataclass(frozen=True)
class RowFields:
    """Values of the result-row keys that a workload fills; None is written as null."""

    acceptance: str | None = None
    acceptance_fast: str | None = None
    hit_law: str | None = None
    laws: str | None = None
    temperature: float | None = None
    vocab: int | None = None
    order: int | None = None
    divergence: float | None = None
    saguaro_c: float | None = None
    prompt_tokens: int | None = None
    top_p: float | None = None
    stop: list[str] | None = None
    num_prompts: int | None = None
    prompts_sha256: str | None = None
    recording: str | None = None
    lookup: str | None = None


class Workload(ABC):
    """Base class of workloads: makes a job's sequences, and the oracles of their tokens.

    A new workload is a subclass in a folder of its own and one call of common.workloads.register.
    """

    is_imposed: ClassVar[bool] = False  # only job.acceptance and job.hit_law decide the outcomes
    drafts_in_parallel: ClassVar[bool] = False  # allows drafts of several tokens a forward (Medusa)
    reports_outcomes: ClassVar[bool] = False  # rows count the ranks of bonus tokens

    def __init__(self, job: Resolved) -> None:
        self.job = job

    def check(self) -> None:
        """Raises ConfigError if this workload cannot decode the job."""
        draft = self.job.draft
        if draft is not None and draft.num_tokens > 1 and not self.drafts_in_parallel:
            name = self.job.config.workload
            raise ConfigError(f"draft={draft.name} with workload={name}: allowed: gemm")

    @property
    def target_model(self) -> ModelSource:
        """Where the target's weights come from, chosen by --forward."""
        is_transformer = self.job.config.is_transformer
        return ModelSource(self.job.target_where) if is_transformer else ModelSource()

    @property
    def draft_model(self) -> ModelSource:
        """Where the draft's weights come from."""
        if not self.job.drafts_by_transformer:
            return ModelSource()
        shard = self.job.draft_shard
        heads = shard.num_heads_used if isinstance(shard, StateShard) else 1
        return ModelSource(self.job.draft_where, self.job.target_where, heads=heads)

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Size V of the vocabulary; token ids are 0 … V − 1."""

    @property
    def proposal_width(self) -> int:
        """Number of tokens that the draft knows: entries of a proposal's distribution."""
        return self.vocab

    @property
    def prompt_tokens(self) -> int:
        """Most tokens of a prompt that the lead sends; 0: the workers read none."""
        return 0 if self.job.serving is None else self.job.longest

    @property
    def samples(self) -> bool:
        """Whether drafted tokens are sampled, so that a speculation carries their distributions."""
        return False

    @property
    @abstractmethod
    def law(self) -> str:
        """One line for the printed card that describes the source of the outcomes."""

    @abstractmethod
    def target_oracle(
        self, stepper: Forwards, open_gather: OpenGather | None = None
    ) -> TargetOracle:
        """Returns what decides the target's tokens on one target rank; stepper: its forwards.

        open_gather: makes the gather of T > 1 ranks' logits; collective over the target ranks.
        """

    @abstractmethod
    def draft_oracle(self, stepper: Forwards) -> DraftOracle:
        """Returns what decides a draft's tokens; stepper: the draft's forwards."""

    def target_worker(
        self, stepper: Forwards, open_gather: OpenGather | None = None
    ) -> TargetWorker:
        """Returns the worker of one target rank, over its share of the target model."""
        oracle = self.target_oracle(stepper, open_gather)
        return TargetWorker(stepper, oracle, self.job.placement(drafts=False))

    def draft_worker(self, stepper: Forwards) -> DraftWorker:
        """Returns the worker of one draft, over the whole draft model."""
        oracle, placement = self.draft_oracle(stepper), self.job.placement(drafts=True)
        return DraftWorker(stepper, oracle, placement, reads_states=self.job.reads_states)

    @abstractmethod
    def requests(self, first_id: int, count: int) -> list[Request]:
        """Returns `count` sequences to decode, numbered from first_id."""

    def tabulated(self, group: int = 0) -> list[Request]:
        """Returns the first requests of a target group, for which workers may prepare on any rank
        (Worker.prepare)."""
        return self.requests(self.share(group).start, self.job.config.batch_size)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that a run decodes, batch_size at a time in each target group."""
        return self.job.config.groups * self.job.config.batch_size

    def share(self, group: int) -> range:
        """Returns the ids of the sequences that a target group decodes: as many as each other one.

        A job of G groups so emits the tokens of one group with G times the batch.
        """
        count, groups = self.num_sequences, self.job.config.groups
        return range(count * group // groups, count * (group + 1) // groups)

    def longest_answer(self, request_id: int) -> int | None:
        """Returns the tokens with which a sequence ends at the latest; None: unknown."""
        return self.job.config.token_limit

    def endings(self) -> Endings | None:
        """Returns the rule that ends a pass's sequences, by default a stop token; None: no rule."""
        stop = self.job.config.stop_token
        return None if stop is None else Endings(stop)

    def row_fields(self) -> RowFields:
        """Returns the values of this workload's keys in the result row."""
        return RowFields()


def workload_kind(name: str) -> type[Workload]:
    """Imports and returns the workload class `name`; raises ConfigError if it is not registered."""
    module, _, kind = known(name).where.partition(":")
    workload: type[Workload] = getattr(import_module(module), kind)
    return workload
