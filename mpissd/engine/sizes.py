"""The sizes of a resolved configuration: rows of forwards, lanes and tokens of KV caches, ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from mpissd.common.config import RunConfig
from mpissd.common.presets import ModelShape
from mpissd.common.rounds import Source
from mpissd.common.workloads import class_of
from mpissd.engine.law.acceptance import AcceptanceLaw, HitLaw
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.tree import CHAIN, BranchLayout, Tree, positional
from mpissd.engine.model.shard import ForwardOptions, Shard, StateShard, TransformerShard
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.model.transformer.trees import CHOICES, WIDTH, Size
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
class Sizes:
    """A configuration resolved for T target ranks: model shapes, laws, fan-outs and what follows.

    A lane is the part of a sequence's KV cache that holds one branch, or one path of a tree.
    """

    config: RunConfig
    tp: int
    target: ModelShape
    draft: ModelShape | None  # None in AR
    lookahead: int  # 0 in AR
    fan_out: tuple[int, ...]  # F_0 … F_K after a hit (of a tree: by node); empty unless SSD
    fan_out_miss: tuple[int, ...]  # F_0 … F_K after a trunk that a backup drafted
    acceptance: Mapping[Source, AcceptanceLaw]
    hit_law: HitLaw
    backup_lookahead: int
    target_where: str = ""  # the names that presets.files_of takes
    draft_where: str = ""
    tree: Tree = CHAIN  # the shape of a draft, of K levels
    dynamic: Size | None = None  # of a tree whose shape the device decides in each round
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

    def shard(self, tp: int) -> AnyShard:
        """Returns rank 0's share of the target, over T = tp ranks."""
        return shard_of(self.config, self.target, self.target_where, tp)

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

    @property
    def drafts_by_transformer(self) -> bool:
        """Whether the draft runs a transformer's forwards; prompt lookup has none."""
        return self.config.is_transformer and self.draft is not None and self.draft.head is None

    @property
    def inline(self) -> bool:
        """Whether the draft runs on the lead's device (SD without a draft rank)."""
        return self.draft is not None and self.config.drafts == 0

    @property
    def tokens_a_forward(self) -> int:
        """Tokens of a sequence that one draft forward drafts: several by Medusa heads."""
        if isinstance(self.draft_shard, StateShard):
            return self.draft_shard.num_heads_used
        return 1 + self.masks if self.draft is None or self.masks else self.draft.num_tokens

    @property
    def masks(self) -> int:
        """Mask tokens in a step of a parallel draft, which drafts K levels by K − 1 of them; 0 of
        other drafts."""
        return max(0, self.lookahead - 1) if self.config.parallel_drafting else 0

    @property
    def mask_ids(self) -> range:
        """The token ids of these masks, which follow those of the draft's vocabulary."""
        vocab = 0 if self.draft is None else self.draft.vocab_size
        if isinstance(self.draft_shard, TransformerShard):  # it has its target's vocabulary
            vocab = self.draft_shard.shape.vocab_size
        return range(vocab, vocab + self.masks)

    def num_forwards(self, tokens: int) -> int:
        """Returns the number of draft forwards that draft `tokens` tokens of a sequence."""
        return -(-tokens // self.tokens_a_forward)

    @property
    def window(self) -> int | None:
        """Tokens after which the positions of a sequence without a prompt begin again."""
        config = self.config
        if config.is_text:
            return None
        rounds = config.max_rounds or _LONGEST_WINDOW
        tokens = config.num_tokens or _LONGEST_WINDOW
        return min(_LONGEST_WINDOW, tokens, rounds * (self.lookahead + 1))

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, its context or prompt included."""
        if self.window is not None:
            return self.config.context + self.window
        positions = config_of(self.target_where).max_positions
        return min(self.config.context or _TEXT_CONTEXT, positions)

    @property
    def capacity(self) -> int:
        """Tokens that a slot of the KV cache may hold: a sequence, and a verification's tokens.

        Sequences that warm a text job up end only after warmup_rounds.
        """
        a_round = self.lookahead + 1
        warm = WARM_TOKENS + self.config.warmup_rounds * a_round if self.config.is_text else 0
        return max(self.longest, warm) + a_round

    def placement(self, *, drafts: bool) -> Placement | None:
        """Returns how sequences use the KV cache of the target or the draft; None without one."""
        config, serving, draft = self.config, self.serving, self.draft_shard
        if not (self.drafts_by_transformer if drafts else config.is_transformer):
            return None
        # A draft on hidden states needs the states of every token, which a reused page lacks.
        keeps = serving is not None and serving.prefix_cache and not self.reads_states
        stateless = drafts and isinstance(draft, StateShard) and not draft.kv_layers
        lag = self.lookahead if drafts and self.reads_states else 0
        masks = self.masks if drafts else 0
        return Placement(config.context, self.window, keeps, stateless, lag, masks)

    @property
    def num_nodes(self) -> int:
        """Number N of tokens that are drafted for a sequence: K in a chain."""
        return self.tree.ends[self.lookahead]

    @property
    def verified(self) -> int:
        """The tokens that are verified for a sequence, N also of a dynamic tree."""
        return self.num_nodes if self.dynamic is None else self.dynamic.nodes

    @property
    def verify_rows(self) -> int:
        """Number of rows of a full verification, b(N+1)."""
        return self.config.batch_size * (self.verified + 1)

    def rates(self, source: Source) -> tuple[float, ...]:
        """Returns the rates at which the levels of a source's drafts are accepted, K or fewer."""
        hazards = self.acceptance[source].hazards[: self.lookahead]
        if not self.tree.num_lanes or not hazards:
            return hazards
        return self.tree.rates(positional(hazards, self.hit_law, self.tree.width))

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
        nodes = zip(self.fan_outs.widest_each, self.tree.children, strict=True)
        return max(1, *(fan_out + max(0, len(children) - 1) for fan_out, children in nodes))

    @cached_property
    def layout(self) -> BranchLayout | None:
        """The places of a tree's nodes and of the branches after them; None unless they grow."""
        if not (self.fan_out and self.tree.num_lanes):
            return None
        return BranchLayout(self.tree, self.fan_outs.widest_each, self.masks)

    @property
    def tree_lanes(self) -> int:
        """The lanes in which the side paths of a batch's trees are stored."""
        return self.config.batch_size * (self.verified if self.dynamic else self.tree.num_lanes)

    @property
    def group_lanes(self) -> int:
        """The most branches that the draft grows for a target group, at least one a sequence."""
        return self.config.batch_size * max(1, self.fan_outs.branches)

    @property
    def draft_lanes(self) -> int:
        """The lanes of a target group in the draft's cache: of side paths, and of branches."""
        if self.layout is not None:
            return self.config.batch_size * self.layout.num_lanes
        if self.dynamic is not None:
            return self.config.batch_size * max(1, self.dynamic.draft_lanes)
        return self.group_lanes if self.fan_out else self.tree_lanes * (not self.masks)

    @property
    def draft_sequences(self) -> int:
        """Number of sequences of all target groups, which a draft keeps in its cache."""
        return self.config.groups * self.config.batch_size

    @property
    def grown_rows(self) -> int:
        """The rows of the draft's largest growth step, at least one a sequence."""
        if self.dynamic is not None:
            return self.config.batch_size * WIDTH
        if self.masks:  # an inline draft stores up to K accepted tokens in the same forward
            return self.group_lanes * ((1 if self.fan_out else 2) * self.lookahead)
        return self.group_lanes * (max(map(len, self.tree.inner)) if self.fan_out else 1)

    def target_buckets(self) -> list[int]:
        """Returns the row counts to compile for verifications of up to b(K+1) rows."""
        exact = [n for n in (self.config.batch_size, self.verify_rows, self.prefill_rows) if n]
        return buckets(*exact) if self.serving is None else fine_buckets(*exact)

    def draft_buckets(self) -> list[int]:
        """Returns the row counts to compile for the draft: its first step, growth and backups."""
        batch, groups = self.config.batch_size, self.config.groups
        exact = [n for n in (self.verify_rows, self.grown_rows, self.prefill_rows) if n]
        if groups > 1:  # one forward may carry the rows of all groups
            exact += [groups * rows for rows in (batch, *exact)]
        return buckets(batch, *exact)

    @property
    def options(self) -> ForwardOptions:
        """Options of the target's forward.

        A transformer's `context` is the mean number of tokens of KV cache that a sequence's rows
        read, without its prompt. In a run limited by rounds, a round counts as many tokens as the
        imposed acceptance gives, rounded so that similar runs share programs; one if nothing is
        imposed.
        """
        config = self.config
        if not config.is_transformer:
            return ForwardOptions(config.fuse, config.lm_head, config.context)
        limits = [n for n in (config.token_limit, config.max_rounds) if n is not None]
        is_limited = self.lookahead and config.max_rounds is not None
        if is_limited and class_of(config.workload).is_imposed:
            limits[-1] *= 1 + round(self.acceptance[Source.CACHE].mean_accepted)
        given = 0 if config.is_text else config.context
        return ForwardOptions(
            fuse=True,
            lm_head=True,
            context=given + min([*limits, self.longest - given]) // 2,
            values=True,
            capacity=self.capacity,
            pool=0 if self.serving is None else self.serving.kv_tokens,
            states=self.reads_states,
            lanes=self.tree_lanes,
            steps=self.lookahead if self.tree_lanes else 0,
        )

    @property
    def draft_options(self) -> ForwardOptions:
        """Options of the draft's forward.

        With an LM head it reads out as many candidates as a row may need. A branch also reads the
        KV of its 1 … K own tokens; their mean, rounded up, is counted.
        """
        config = self.config
        has_head = config.lm_head or self.drafts_by_transformer
        top_k = self.widest + 1 if has_head and (self.fan_out or self.tree_lanes) else 1
        grown = self.lookahead // 2 + 1 if self.options.context else 1
        if not self.drafts_by_transformer:
            return ForwardOptions(config.fuse, config.lm_head, config.context, top_k, grown)
        lanes = config.groups * self.draft_lanes
        steps = self.lookahead * (1 + (self.layout is not None)) if lanes else 0
        return replace(self.options, top_k=top_k, own_tokens=grown, lanes=lanes, steps=steps)


def shard_of(config: RunConfig, target: ModelShape, where: str, tp: int) -> AnyShard:
    """Returns rank 0's share of a target over T = tp ranks; where: the target's name.

    Raises ConfigError if T does not divide its heads or FFN; bare products need equal shares.
    """
    if config.is_transformer:
        return TransformerShard(config_of(where), tp)
    return Shard(target, tp)


def fine_buckets(*exact: int) -> list[int]:
    """Returns row counts for batches that change with every request: four in each octave."""
    steps = {n << shift >> 2 for n in (4, 5, 6, 7) for shift in range(max(exact).bit_length())}
    return sorted({*exact, *(n for n in steps if n <= max(exact))})


def buckets(batch: int, *exact: int) -> list[int]:
    """Returns the row counts to compile: full rounds, and powers of two between."""
    largest = max(batch, *exact)
    powers = {1 << n for n in range(largest.bit_length()) if 1 << n < largest}
    return sorted({batch, *exact, *powers})
