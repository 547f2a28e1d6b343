"""The interface of a workload, which makes a job's sequences and the oracles that decide tokens."""

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

# the keys of a result row that workloads fill; a workload leaves other workloads' keys null
ROW_FIELDS = (
    "acceptance acceptance_fast hit_law laws temperature vocab order divergence saguaro_c "
    "prompt_tokens top_p stop grammar num_prompts prompts_sha256 recording lookup"
).split()


def laws_label(flags: WorkloadFlags) -> str | None:
    """Returns the name and digest of the file that the flag --laws names; None without the flag."""
    return None if flags.laws is None else load_laws(flags.laws).label


class Workload(ABC):
    """Base class of workloads. A workload makes the sequences that a job decodes, and the oracles
    that decide the tokens of these sequences. To add a workload, write a subclass and call
    common.workloads.register. job: the resolved sizes, acceptance rates and fan-outs."""

    is_imposed: ClassVar[bool] = False  # whether tokens are drawn or recorded, not a model's
    drafts_in_parallel: ClassVar[bool] = False  # whether one draft forward may draft several tokens
    is_text: ClassVar[bool] = False  # whether transformers answer prompts by their logits
    reports_outcomes: ClassVar[bool] = False  # whether result rows count the bonus tokens' ranks

    def __init__(self, job: Sizes) -> None:
        self.job = job

    def check(self) -> None:  # noqa: B027
        """Raises ConfigError if this workload cannot decode the job. The default raises nothing."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """The size V of the vocabulary; token ids are 0 … V − 1."""

    @property
    def proposal_width(self) -> int:
        """The number of tokens that the draft knows: the length of its distributions."""
        return self.vocab

    @property
    def prompt_tokens(self) -> int:
        """The most tokens of a prompt that rank 0 sends to other ranks; 0 if it sends none."""
        return 0 if self.job.serving is None else self.job.longest

    @property
    def samples(self) -> bool:
        """Whether drafted tokens are sampled. The draft then also sends their distributions."""
        return False

    @property
    @abstractmethod
    def law(self) -> str:
        """A text for a run's printed summary, which says how drafted tokens are accepted."""

    @abstractmethod
    def target_oracle(self, stepper: Forwards) -> TargetOracle:
        """Returns the oracle that decides tokens on a target rank. stepper: runs its forwards."""

    @abstractmethod
    def draft_oracle(self, stepper: Forwards) -> DraftOracle:
        """Returns the oracle that decides a draft's tokens. stepper: runs the draft's forwards."""

    def target_worker(
        self, stepper: Forwards, open_gather: OpenGather | None = None
    ) -> TargetWorker:
        """Returns the worker that runs verifications on a target rank. stepper: runs the forwards
        of the rank's part of the target. open_gather: called by all target ranks together; makes
        the function that collects their logits."""
        return TargetWorker(stepper, self.target_oracle(stepper), self.job.placement(drafts=False))

    def draft_worker(self, stepper: Forwards) -> DraftWorker:
        """Returns the worker that runs a draft's forwards by `stepper`."""
        placement = self.job.placement(drafts=True)
        return DraftWorker(stepper, self.draft_oracle(stepper), placement, self.job.mask_ids)

    @abstractmethod
    def requests(self, first_id: int, count: int) -> list[Request]:
        """Returns `count` sequences to decode, with request ids from first_id on."""

    def tabulated(self, group: int = 0) -> list[Request]:
        """Returns a target group's first requests; oracles may compute their tokens in advance."""
        return self.requests(self.share(group).start, self.job.config.batch_size)

    @property
    def num_sequences(self) -> int:
        """The number of sequences that a run decodes in all target groups together."""
        return self.job.config.groups * self.job.config.batch_size

    def share(self, group: int) -> range:
        """Returns the ids of the sequences that target group `group` decodes. All groups have equal
        shares, so that G groups emit the same tokens as one group with G times the batch."""
        count = self.num_sequences
        groups = self.job.config.groups
        return range(count * group // groups, count * (group + 1) // groups)

    def keep(self, start: int, count: int) -> None:
        """Drops all prompts except `count` ones from number `start` on, cyclically."""
        raise NotImplementedError

    def longest_answer(self, request_id: int) -> int | None:
        """Returns the most tokens that a sequence may emit, or None if that is not known."""
        return self.job.config.token_limit

    def endings(self) -> Endings | None:
        """Returns a new object that ends sequences at --stop_token; None without this flag."""
        stop = self.job.config.stop_token
        return None if stop is None else Endings(stop)

    def scheduler(self, group: int = 0) -> Scheduler:
        """Returns a scheduler with the sequences of target group `group`, which decodes batch_size
        of them at a time. A sequence ends where `endings` decides, or at its limit of tokens."""
        config = self.job.config
        share = self.share(group)
        scheduler = Scheduler(Capacity(config.batch_size), self.endings())
        for request in self.requests(share.start, len(share)):
            scheduler.queue(Task(request, config.token_limit or UNLIMITED))
        return scheduler

    def row_fields(self) -> dict[str, Any]:
        """Returns the values of this workload in a result row, by key (ROW_FIELDS)."""
        return {}
