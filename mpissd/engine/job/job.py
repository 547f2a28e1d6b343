"""The resolved job: all that a rank computes from its configuration before opening a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpissd.common.config import RunConfig
from mpissd.common.presets import ModelShape
from mpissd.common.rounds import Source
from mpissd.common.schedules import is_tail
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.spec.acceptance import AcceptanceLaw, HitLaw
from mpissd.engine.spec.fanout import FanOuts, adaptive_budget


@dataclass(frozen=True)
class Job:
    """A configuration resolved for T target ranks: model shapes, laws and fan-out lists."""

    config: RunConfig
    tp: int
    target: ModelShape
    full_target: ModelShape  # before --num_layers
    draft: ModelShape | None
    lookahead: int  # 0 in AR
    fan_out: tuple[int, ...]  # F_0 … F_K behind a hit; empty unless SSD
    fan_out_miss: tuple[int, ...]  # F_0 … F_K behind a trunk that a backup drafted
    fan_out_fast: tuple[int, ...] | None  # with backup=auto: behind FAST tokens; else None
    acceptance: Mapping[Source, AcceptanceLaw]
    hit_law: HitLaw
    backup_lookahead: int

    @property
    def world_size(self) -> int:
        """Number of ranks, T + D."""
        return self.tp + self.config.drafts

    @property
    def options(self) -> ForwardOptions:
        """Options of the target's forward."""
        config = self.config
        return ForwardOptions(config.fuse, config.lm_head, config.context)

    @property
    def draft_options(self) -> ForwardOptions:
        """Options of the draft's forward.

        With an LM head it reads out as many candidates as a row may need. A lane also reads the KV
        of the 1 … K tokens that it has grown; their mean, rounded up, is counted.
        """
        config = self.config
        top_k = self.widest + 1 if config.lm_head and self.fan_out else 1
        own = self.lookahead // 2 + 1 if config.context else 1
        return ForwardOptions(config.fuse, config.lm_head, config.context, top_k, own)

    @property
    def inline(self) -> bool:
        """Whether the draft runs on the lead's device (SD without a draft rank)."""
        return self.draft is not None and self.config.drafts == 0

    @property
    def is_tail(self) -> bool:
        """Whether candidates are kept behind the last served token alone (tail:F)."""
        return bool(self.fan_out) and is_tail(self.config.fan_out)

    def num_forwards(self, tokens: int) -> int:
        """Returns the number of draft forwards that draft `tokens` tokens of a sequence."""
        return -(-tokens // (1 if self.draft is None else self.draft.num_tokens))

    @property
    def verify_rows(self) -> int:
        """Number of rows of a full verification, b(K+1)."""
        return self.config.batch_size * (self.lookahead + 1)

    def target_buckets(self) -> list[int]:
        """Returns the row counts to compile for verifications of up to b(K+1) rows."""
        return buckets(self.config.batch_size, self.verify_rows)

    def draft_buckets(self) -> list[int]:
        """Returns the row counts to compile for the draft: glue, growth and backup steps."""
        batch = self.config.batch_size
        return buckets(batch, self.verify_rows, batch * max(1, self.num_lanes))

    @property
    def adaptive_budget(self) -> int | None:
        """Budget B of --fan_out=adaptive:B, or None if the fan-out is fixed."""
        return adaptive_budget(self.config.fan_out) if self.fan_out else None

    @property
    def fan_outs(self) -> FanOuts:
        """The fan-out lists of the job: behind hits, behind misses, and behind FAST tokens."""
        return FanOuts(self.fan_out, self.fan_out_miss, self.fan_out_fast)

    @property
    def num_lanes(self) -> int:
        """Most branches that one draft grows for a sequence."""
        branches = self.adaptive_budget or self.fan_outs.branches
        return -(-branches // max(1, self.config.drafts))

    @property
    def widest(self) -> int:
        """Most candidates that a row may keep, at least 1."""
        return max(1, self.adaptive_budget or self.fan_outs.widest)

    def rank_bytes(self, itemsize: int) -> tuple[int, int]:
        """Returns the weight and KV bytes of a (target rank, draft rank).

        itemsize: bytes of a weight. An inline draft counts for the target rank.
        """
        batch, rows = self.config.batch_size, self.target_buckets()[-1]
        shard = Shard(self.target, self.tp)
        target = shard.num_params(self.options) * itemsize
        target += shard.kv_read(rows, batch, self.options)
        if self.draft is None:
            return target, 0
        alone, rows = Shard(self.draft), self.draft_buckets()[-1]
        draft = alone.num_params(self.draft_options) * itemsize
        draft += alone.kv_read(rows, batch, self.draft_options)
        return (target + draft, 0) if self.inline else (target, draft)


def buckets(batch: int, *exact: int) -> list[int]:
    """Returns the row counts to compile: those of full rounds, and powers of two between."""
    largest = max(batch, *exact)
    powers = {1 << n for n in range(largest.bit_length()) if 1 << n < largest}
    return sorted({batch, *exact, *powers})
