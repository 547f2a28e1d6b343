"""The interface of a workload, which makes a job's requests and the oracles of their tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from mpissd.common.config import WorkloadFlags
from mpissd.common.rounds import Request
from mpissd.engine.law.acceptance import load_laws
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.round.oracle import DraftOracle, OpenGather, TargetOracle
from mpissd.engine.round.rows import DraftWorker, TargetWorker
from mpissd.engine.round.scheduler import UNLIMITED, Capacity, Endings, Scheduler, Task
from mpissd.engine.sizes import Sizes

# The keys of a result row that workloads fill, in their order; a workload leaves others null.
ROW_FIELDS = (
    "acceptance acceptance_fast hit_law laws temperature vocab order divergence saguaro_c "
    "prompt_tokens top_p stop grammar num_prompts prompts_sha256 recording lookup"
).split()


def laws_label(flags: WorkloadFlags) -> str | None:
    """Returns the name and digest of the file that --laws names; None without that flag."""
    return None if flags.laws is None else load_laws(flags.laws).label


class Workload(ABC):
    """Base class of workloads. A new workload is a subclass, and one call of
    common.workloads.register. job: the resolved sizes, acceptance rates and fan-outs."""

    is_imposed: ClassVar[bool] = False  # only job.acceptance and job.hit_law decide the outcomes
    drafts_in_parallel: ClassVar[bool] = False  # allows drafts of several tokens a forward (Medusa)
    is_text: ClassVar[bool] = False  # the models' own logits answer prompts, as those of `text`
    reports_outcomes: ClassVar[bool] = False  # rows count the ranks of bonus tokens

    def __init__(self, job: Sizes) -> None:
        self.job = job

    def check(self) -> None:  # noqa: B027
        """Raises ConfigError if this workload cannot decode the job."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """The size V of the vocabulary; token ids are 0 … V − 1."""

    @property
    def proposal_width(self) -> int:
        """The number of tokens that the draft knows, which is the length of its distributions."""
        return self.vocab

    @property
    def prompt_tokens(self) -> int:
        """The most tokens of a prompt that the lead sends to other ranks; 0 if none is sent."""
        return 0 if self.job.serving is None else self.job.longest

    @property
    def samples(self) -> bool:
        """Whether drafted tokens are sampled, so that their distributions are sent as well."""
        return False

    @property
    @abstractmethod
    def law(self) -> str:
        """What decides the outcomes, as a line of a run's printed summary."""

    @abstractmethod
    def target_oracle(self, stepper: Forwards) -> TargetOracle:
        """Returns the oracle of one target rank; stepper: its forwards."""

    @abstractmethod
    def draft_oracle(self, stepper: Forwards) -> DraftOracle:
        """Returns the oracle of a draft; stepper: the draft's forwards."""

    def target_worker(
        self, stepper: Forwards, open_gather: OpenGather | None = None
    ) -> TargetWorker:
        """Returns the worker of one target rank, over its share of the target model (stepper).

        open_gather: makes the function that collects the logits of T > 1 ranks, for oracles that
        read them. Collective over the target ranks.
        """
        return TargetWorker(stepper, self.target_oracle(stepper), self.job.placement(drafts=False))

    def draft_worker(self, stepper: Forwards) -> DraftWorker:
        """Returns the worker of a draft; stepper: the draft model."""
        placement = self.job.placement(drafts=True)
        return DraftWorker(stepper, self.draft_oracle(stepper), placement)

    @abstractmethod
    def requests(self, first_id: int, count: int) -> list[Request]:
        """Returns `count` sequences to decode, numbered from first_id."""

    def tabulated(self, group: int = 0) -> list[Request]:
        """Returns a target group's first requests, if all ranks know them, for Oracle.prepare."""
        return self.requests(self.share(group).start, self.job.config.batch_size)

    @property
    def num_sequences(self) -> int:
        """The number of sequences that a run decodes, batch_size at a time in each target group."""
        return self.job.config.groups * self.job.config.batch_size

    def share(self, group: int) -> range:
        """Returns the ids of the sequences that a target group decodes. All groups have equal
        shares, so that G groups emit the same tokens as one group with G times the batch."""
        count = self.num_sequences
        groups = self.job.config.groups
        return range(count * group // groups, count * (group + 1) // groups)

    def keep(self, start: int, count: int) -> None:
        """Keeps only `count` prompts from number `start` on; number 0 follows the last one."""
        raise NotImplementedError

    def longest_answer(self, request_id: int) -> int | None:
        """Returns the most tokens that a sequence may emit, or None if that is unknown."""
        return self.job.config.token_limit

    def endings(self) -> Endings | None:
        """Returns a new rule that ends sequences, by default at --stop_token, or None."""
        stop = self.job.config.stop_token
        return None if stop is None else Endings(stop)

    def scheduler(self, group: int = 0) -> Scheduler:
        """Returns the schedule of a target group's sequences, batch_size of them at a time. One
        ends when `endings` end it, or with as many tokens as its limit."""
        config = self.job.config
        share = self.share(group)
        scheduler = Scheduler(Capacity(config.batch_size), self.endings())
        for request in self.requests(share.start, len(share)):
            scheduler.queue(Task(request, config.token_limit or UNLIMITED))
        return scheduler

    def row_fields(self) -> dict[str, Any]:
        """Returns the values of those keys of ROW_FIELDS that this workload fills."""
        return {}
