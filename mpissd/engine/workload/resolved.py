"""A resolved configuration: the shapes, token models, fan-out and sizes that a workload reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mpissd.common.config import RunConfig
from mpissd.common.presets import ModelShape
from mpissd.common.rounds import Source
from mpissd.engine.model.shard import Shard
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.transformer.shard import StateShard, TransformerShard
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.spec.acceptance import AcceptanceLaw, HitLaw
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.sequence import Placement

_LONGEST_WINDOW = 8192  # tokens of a sequence without a prompt, before its positions begin again
WARM_TOKENS = 8  # of a prompt, in the sequences that only warm a text job up
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
    fan_out: tuple[int, ...]  # F_0 … F_K after a hit; empty unless SSD
    fan_out_miss: tuple[int, ...]  # F_0 … F_K after a trunk that a backup drafted
    acceptance: Mapping[Source, AcceptanceLaw]
    hit_law: HitLaw
    backup_lookahead: int
    target_where: str = ""  # the names that presets.files_of takes
    draft_where: str = ""
    prefill_rows: int = 0  # rows of a forward over a prompt; 0: no sequence has one
    serving: Serving | None = None  # of a job whose requests join and leave, or None

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
        return Placement(config.context, self.window, keeps, stateless)

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
        """Number of rows of a full verification, b(K+1)."""
        return self.config.batch_size * (self.lookahead + 1)

    @property
    def draft_sequences(self) -> int:
        """Number of sequences of all target groups, which a draft keeps in its cache."""
        return self.config.groups * self.config.batch_size

    @property
    def group_lanes(self) -> int:
        """The most branches that the draft grows for a target group, at least one a sequence."""
        return self.config.batch_size * max(1, self.num_lanes)

    @property
    def fan_outs(self) -> FanOuts:
        """The fan-out lists of the job: after hits, and after misses."""
        return FanOuts(self.fan_out, self.fan_out_miss)

    @property
    def num_lanes(self) -> int:
        """The largest number of branches that the draft grows for a sequence."""
        return self.fan_outs.branches

    @property
    def widest(self) -> int:
        """The largest number of candidates that a row may keep, at least 1."""
        return max(1, self.fan_outs.widest)
