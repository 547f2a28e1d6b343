"""The interface of a workload: how it completes a job, and which oracles decide its tokens.

It reads a `Resolved`: the job's shapes, token models, fan-out lists and sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from mpissd.common.config import RunConfig, WorkloadFlags
from mpissd.common.errors import ConfigError
from mpissd.common.presets import ModelShape
from mpissd.common.rounds import Request, Source
from mpissd.engine.law.acceptance import AcceptanceLaw, HitLaw, load_laws
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.tree import CHAIN, BranchLayout, Tree, positional
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.model.shard import Shard, StateShard, TransformerShard
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.stepper import ModelSource
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.model.transformer.trees import CHOICES, Size
from mpissd.engine.round.oracle import DraftOracle, OpenGather, TargetOracle
from mpissd.engine.round.rows import DraftWorker, TargetWorker
from mpissd.engine.round.scheduler import UNLIMITED, Capacity, Endings, Scheduler, Task
from mpissd.engine.round.sequence import Placement

_LONGEST_WINDOW = 8192  # tokens of a sequence without a prompt, before its positions begin again
WARM_TOKENS = 8  # prompt tokens of the sequences that only warm a text job up
_TEXT_CONTEXT = 2048  # tokens of a sequence of text, its prompt included, without --context


@dataclass(frozen=True)
class Serving:
    """Settings of a job whose requests join and leave, in addition to its configuration.

    kv_tokens: tokens of all sequences' caches together (0: each may be as long as the context).
    samples: whether requests may ask for a temperature above 0. prefix_cache: whether a sequence
    takes over the pages of others that begin with the same tokens.
    """

    kv_tokens: int = 0
    samples: bool = True
    prefix_cache: bool = True


@dataclass(frozen=True)
class Resolved:
    """A configuration resolved for T target ranks: model shapes, token models and fan-out lists."""

    config: RunConfig
    tp: int
    target: ModelShape
    draft: ModelShape | None
    lookahead: int  # 0 in AR
    fan_out: tuple[int, ...]  # F_0 … F_K after a hit (of a tree: by node); empty unless SSD
    fan_out_miss: tuple[int, ...]  # F_0 … F_K after a trunk that a backup drafted
    acceptance: Mapping[Source, AcceptanceLaw]
    hit_law: HitLaw
    backup_lookahead: int
    target_where: str = ""  # the names that presets.files_of takes
    draft_where: str = ""
    tree: Tree = CHAIN  # the shape of a draft, of K levels
    dynamic: Size | None = None  # of a tree whose shape each chained round decides
    prefill_rows: int = 0  # rows of a forward over a prompt; 0: no sequence has one
    serving: Serving | None = None  # settings of a server's job, or None

    @property
    def world_size(self) -> int:
        """Number of ranks, G·T + D + L."""
        return self.config.groups * self.tp + self.config.drafts + self.config.learners

    @cached_property
    def target_shard(self) -> AnyShard:
        """Rank 0's share of the target."""
        return self.shard(self.tp)

    @cached_property
    def draft_shard(self) -> AnyShard | None:
        """The whole draft; None in AR."""
        if self.draft is None or not self.drafts_by_transformer:
            return None if self.draft is None else Shard(self.draft)
        config = config_of(self.draft_where, self.target_where)
        if config.kind:
            return StateShard(config, heads_used=self.backup_lookahead or 1)
        return TransformerShard(config)

    @property
    def reads_states(self) -> bool:
        """Whether the draft reads the target's hidden states."""
        return isinstance(self.draft_shard, StateShard)

    def shard(self, tp: int) -> AnyShard:
        """Returns rank 0's share of the target, over T = tp ranks."""
        if not self.config.is_transformer:
            return Shard(self.target, tp)
        return TransformerShard(config_of(self.target_where), tp)

    @property
    def drafts_by_transformer(self) -> bool:
        """Whether the draft runs a transformer's forwards; prompt lookup has none."""
        return self.config.is_transformer and self.draft is not None and self.draft.head is None

    @property
    def window(self) -> int | None:
        """Tokens after which the positions of a sequence without a prompt begin again."""
        config, most = self.config, [_LONGEST_WINDOW]
        if config.is_text:
            return None
        if config.num_tokens is not None:
            most.append(config.num_tokens)
        if config.max_rounds is not None:
            most.append(config.max_rounds * (self.lookahead + 1))
        return max(1, min(most))

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, its context or prompt included."""
        config = self.config
        if self.window is not None:
            return config.context + self.window
        most = config_of(self.target_where).max_positions
        return min(config.context or _TEXT_CONTEXT, most)

    @property
    def capacity(self) -> int:
        """Tokens that a slot of the KV cache may hold: a sequence, and a verification's tokens.

        Sequences that warm a text job up end only after warmup_rounds.
        """
        each, warm = self.lookahead + 1, 0
        if self.config.is_text:
            warm = WARM_TOKENS + self.config.warmup_rounds * each
        return max(self.longest, warm) + each

    def placement(self, *, drafts: bool) -> Placement | None:
        """Returns how sequences use the KV cache of the target or the draft; None without one."""
        config = self.config
        if not (self.drafts_by_transformer if drafts else config.is_transformer):
            return None
        serving, draft = self.serving, self.draft_shard
        # A draft on hidden states needs the states of every token, which a reused page lacks.
        keeps = serving is not None and serving.prefix_cache and not self.reads_states
        stateless = drafts and isinstance(draft, StateShard) and not draft.kv_layers
        lag = self.lookahead if drafts and self.reads_states else 0
        return Placement(config.context, self.window, keeps, stateless, lag)

    @property
    def inline(self) -> bool:
        """Whether the draft runs on the lead's device (SD without a draft rank)."""
        return self.draft is not None and self.config.drafts == 0

    def num_forwards(self, tokens: int) -> int:
        """Returns the number of draft forwards that draft `tokens` tokens of a sequence."""
        return -(-tokens // self.tokens_a_forward)

    @property
    def tokens_a_forward(self) -> int:
        """Tokens of a sequence that one draft forward drafts: several by Medusa heads."""
        if isinstance(self.draft_shard, StateShard):
            return self.draft_shard.num_heads_used
        return 1 if self.draft is None else self.draft.num_tokens

    @property
    def verify_rows(self) -> int:
        """Number of rows of a full verification, b(N+1)."""
        return self.config.batch_size * (self.verified + 1)

    @property
    def num_nodes(self) -> int:
        """Number N of tokens that are drafted for a sequence: K in a chain."""
        return self.tree.ends[self.lookahead]

    @property
    def verified(self) -> int:
        """The tokens that are verified for a sequence, N also of a dynamic tree."""
        return self.num_nodes if self.dynamic is None else self.dynamic.nodes

    def rates(self, source: Source) -> tuple[float, ...]:
        """Returns the rates at which the levels of a source's drafts are accepted, K or fewer."""
        hazards = self.acceptance[source].hazards[: self.lookahead]
        if not self.tree.num_lanes or not hazards:
            return hazards
        return self.tree.rates(positional(hazards, self.hit_law, self.tree.width))

    @property
    def tree_lanes(self) -> int:
        """The lanes in which the side paths of a batch's trees are stored."""
        each = self.tree.num_lanes if self.dynamic is None else self.verified
        return self.config.batch_size * each

    @cached_property
    def layout(self) -> BranchLayout | None:
        """The places of a tree's nodes and of the branches after them; None unless they grow."""
        if not (self.fan_out and self.tree.num_lanes):
            return None
        return BranchLayout(self.tree, self.fan_outs.widest_each)

    @property
    def draft_lanes(self) -> int:
        """The lanes of a target group in the draft's cache: of side paths, and of branches."""
        if self.layout is not None:
            return self.config.batch_size * self.layout.num_lanes
        if self.dynamic is not None:
            return self.config.batch_size * max(1, self.dynamic.draft_lanes)
        return self.group_lanes if self.fan_out else self.tree_lanes

    @property
    def draft_sequences(self) -> int:
        """Number of sequences of all target groups, which a draft keeps in its cache."""
        return self.config.groups * self.config.batch_size

    @property
    def group_lanes(self) -> int:
        """The most branches that the draft grows for a target group, at least one a sequence."""
        return self.config.batch_size * max(1, self.fan_outs.branches)

    @property
    def fan_outs(self) -> FanOuts:
        """The fan-out lists of the job: after hits, and after misses."""
        return FanOuts(self.fan_out, self.fan_out_miss)

    @property
    def widest(self) -> int:
        """The largest number of candidates that a row may keep, at least 1; in a tree, with the
        siblings of a node's first child."""
        if self.dynamic is not None:
            return CHOICES - 1
        if self.layout is None:
            return max(1, self.fan_outs.widest, self.tree.width - 1)
        each = zip(self.fan_outs.widest_each, self.tree.children, strict=True)
        return max(1, *(most + max(0, len(children) - 1) for most, children in each))


# The keys of a result row that a workload fills, in their order; null if it does not.
ROW_FIELDS = (
    "acceptance acceptance_fast hit_law laws temperature vocab order divergence saguaro_c "
    "prompt_tokens top_p stop grammar num_prompts prompts_sha256 recording lookup"
).split()


def laws_label(flags: WorkloadFlags) -> str | None:
    """Returns the name and digest of the --laws file; None without one."""
    return None if flags.laws is None else load_laws(flags.laws).label


class Workload(ABC):
    """Base class of workloads: makes a job's sequences, and the oracles of their tokens.

    A new workload is a subclass in a module of its own and one call of common.workloads.register.
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
    def target_oracle(self, stepper: Forwards) -> TargetOracle:
        """Returns what decides the target's tokens on one target rank; stepper: its forwards."""

    @abstractmethod
    def draft_oracle(self, stepper: Forwards) -> DraftOracle:
        """Returns what decides a draft's tokens; stepper: the draft's forwards."""

    def target_worker(
        self, stepper: Forwards, open_gather: OpenGather | None = None
    ) -> TargetWorker:
        """Returns the worker of one target rank, over its share of the target model.

        open_gather: makes the gather of T > 1 ranks' logits, for oracles that read them; collective
        over the target ranks.
        """
        return TargetWorker(stepper, self.target_oracle(stepper), self.job.placement(drafts=False))

    def draft_worker(self, stepper: Forwards) -> DraftWorker:
        """Returns the worker of one draft, over the whole draft model."""
        placement = self.job.placement(drafts=True)
        return DraftWorker(stepper, self.draft_oracle(stepper), placement, self.job.layout)

    @abstractmethod
    def requests(self, first_id: int, count: int) -> list[Request]:
        """Returns `count` sequences to decode, numbered from first_id."""

    def tabulated(self, group: int = 0) -> list[Request]:
        """Returns the first requests of a target group, for which oracles may prepare on any rank
        (Oracle.prepare)."""
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

    def keep(self, start: int, count: int) -> None:
        """Keeps only `count` prompts from number `start` on, around the end, of several."""
        raise NotImplementedError

    def longest_answer(self, request_id: int) -> int | None:
        """Returns the most tokens that a sequence may emit; None: unknown."""
        return self.job.config.token_limit

    def endings(self) -> Endings | None:
        """Returns the rule that ends a pass's sequences, by default a stop token; None: no rule."""
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
        """Returns the values of this workload's keys in the result row, some of ROW_FIELDS."""
        return {}
