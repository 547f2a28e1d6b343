"""The sizes of a resolved configuration: rows of forwards, capacities of KV caches, ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from mpissd.common.config import RunConfig
from mpissd.common.presets import ModelShape
from mpissd.common.rounds import Source
from mpissd.common.workloads import class_of
from mpissd.engine.features.trees import TreeBatch
from mpissd.engine.law.acceptance import AcceptanceLaw, HitLaw
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.tree import CHAIN, BranchLayout, Shape, positional
from mpissd.engine.model.shard import ForwardOptions, Shard, StateShard, TransformerShard
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.model.transformer.trees import CHOICES, WIDTH, Size
from mpissd.engine.round.sequence import Placement

_LONGEST_WINDOW = 8192  # most positions of a sequence without a prompt; then they begin again
WARM_TOKENS = 8  # prompt tokens of the sequences that are decoded only for warm-up in a text job
_TEXT_CONTEXT = 2048  # the default of --context for text: prompt and answer of a sequence


@dataclass(frozen=True)
class Serving:
    """Settings of a server's job, whose requests join and leave, in addition to its configuration.

    kv_tokens: the tokens that the KV caches of all sequences hold together (0: the full context for
    each). samples: whether requests may ask for a temperature above 0. prefix_cache: whether a
    sequence reuses KV pages of others that begin with the same tokens.
    """

    kv_tokens: int = 0
    samples: bool = True
    prefix_cache: bool = True


@dataclass(frozen=True)
class Sizes:
    """A configuration resolved for T target ranks: the models' shapes, the acceptance and hit
    models, the fan-outs, and the sizes that follow from them.

    A lane is scratch memory in a sequence's KV cache for one branch, or one path of a draft tree.
    """

    config: RunConfig
    tp: int
    target: ModelShape
    draft: ModelShape | None  # None in AR
    lookahead: int  # 0 in AR
    fan_out: tuple[int, ...]  # F_0 … F_K after a cache hit (in a tree, by node); empty unless SSD
    fan_out_miss: tuple[int, ...]  # F_0 … F_K after a miss, when a backup drafted the tokens
    acceptance: Mapping[Source, AcceptanceLaw]
    hit_law: HitLaw
    backup_lookahead: int
    target_where: str = ""  # the model's preset name or path, as presets.files_of takes it
    draft_where: str = ""
    shape: Shape = CHAIN  # the shape of a round's drafted tokens, with K levels
    dynamic: Size | None = None  # the size of trees whose shape the device chooses in each round
    prefill_rows: int = 0  # the rows of a forward over a prompt; 0 if sequences have no prompts
    serving: Serving | None = None  # a server's settings; None for a run

    @property
    def world_size(self) -> int:
        """The number of ranks, G·T + D + L: G groups of T targets, D drafts and L learners."""
        return self.config.groups * self.tp + self.config.drafts + self.config.learners

    @cached_property
    def target_shard(self) -> AnyShard:
        """The shard of the target on rank 0."""
        return self.shard(self.tp)

    def shard(self, tp: int) -> AnyShard:
        """Returns rank 0's shard of the target when it is split over `tp` ranks."""
        return shard_of(self.config, self.target, self.target_where, tp)

    @cached_property
    def draft_shard(self) -> AnyShard | None:
        """The shape of the draft, which is never split; None in AR."""
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
        """Whether the draft is a transformer: no bare matrix products, and no prompt lookup."""
        return self.config.is_transformer and self.draft is not None and self.draft.head is None

    @property
    def inline(self) -> bool:
        """Whether the lead's device also runs the draft (SD without a draft rank)."""
        return self.draft is not None and self.config.drafts == 0

    @property
    def tokens_a_forward(self) -> int:
        """Tokens that a draft forward drafts for a sequence: several with Medusa heads or masks."""
        if isinstance(self.draft_shard, StateShard):
            return self.draft_shard.num_heads_used
        return 1 + self.masks if self.draft is None or self.masks else self.draft.num_tokens

    @property
    def masks(self) -> int:
        """The mask tokens in a parallel draft's forward, K − 1 to draft K tokens at once; 0 for
        other drafts."""
        return max(0, self.lookahead - 1) if self.config.parallel_drafting else 0

    @property
    def most_masks(self) -> int:
        """The mask tokens that the draft has; those of random weights are as many as can be."""
        shard = self.draft_shard
        return shard.config.masks if isinstance(shard, TransformerShard) else 0

    @property
    def mask_ids(self) -> range:
        """The token ids of a parallel draft's mask tokens, which follow its vocabulary's ids."""
        vocab = 0 if self.draft is None else self.draft.vocab_size
        if isinstance(self.draft_shard, TransformerShard):  # Its target has the same vocabulary.
            vocab = self.draft_shard.shape.vocab_size
        return range(vocab, vocab + self.masks)

    def num_forwards(self, tokens: int) -> int:
        """Returns how many draft forwards are needed to draft `tokens` tokens for a sequence."""
        return -(-tokens // self.tokens_a_forward)

    @property
    def step_rows(self) -> int:
        """The rows of a branch in a draft step: K of a parallel draft. Bare products have no tokens
        to attend, so that masks are no rows of theirs."""
        return 1 + self.masks if self.drafts_by_transformer else 1

    @property
    def catches_up(self) -> bool:
        """Whether a parallel draft's forward also stores the tokens, up to K a sequence, that were
        accepted since its last one. Where branches are grown, the scoring forward stores them."""
        return self.step_rows > 1 and not self.fan_out

    @property
    def window(self) -> int | None:
        """Tokens after which a sequence without a prompt reuses its positions; None for text."""
        config = self.config
        if config.is_text:
            return None
        rounds = config.max_rounds or _LONGEST_WINDOW
        tokens = config.num_tokens or _LONGEST_WINDOW
        return min(_LONGEST_WINDOW, tokens, rounds * (self.lookahead + 1))

    @property
    def longest(self) -> int:
        """The most tokens of a sequence, its context or prompt included."""
        if self.window is not None:
            return self.config.context + self.window
        positions = config_of(self.target_where).max_positions
        return min(self.config.context or _TEXT_CONTEXT, positions)

    @property
    def capacity(self) -> int:
        """The tokens that a sequence's slot of the KV cache can hold: the longest sequence and the
        tokens of a verification.

        In a text job, sequences decoded for warm-up end only after warmup_rounds.
        """
        a_round = self.lookahead + 1
        warm = WARM_TOKENS + self.config.warmup_rounds * a_round if self.config.is_text else 0
        return max(self.longest, warm) + a_round

    def placement(self, *, drafts: bool) -> Placement | None:
        """Returns how sequences use the KV cache of the draft or the target; None without a
        cache."""
        config, serving, draft = self.config, self.serving, self.draft_shard
        if not (self.drafts_by_transformer if drafts else config.is_transformer):
            return None
        # A draft on hidden states needs the target's states of all tokens, which reused pages lack.
        keeps = serving is not None and serving.prefix_cache and not self.reads_states
        stateless = drafts and isinstance(draft, StateShard) and not draft.kv_layers
        lag = self.lookahead if drafts and self.reads_states else 0
        masks = self.mask_ids if drafts else ()
        layout = self.layout if drafts else None
        trees = None if self.shape.is_chain else partial(TreeBatch, layout=layout)
        return Placement(config.context, self.window, keeps, stateless, lag, masks, trees)

    @property
    def num_nodes(self) -> int:
        """The number N of drafted tokens of a sequence in a round: K in a chain."""
        return self.shape.ends[self.lookahead]

    @property
    def verified(self) -> int:
        """The drafted tokens that are verified for a sequence in a round, also of dynamic trees."""
        return self.num_nodes if self.dynamic is None else self.dynamic.nodes

    @property
    def verify_rows(self) -> int:
        """The rows of a full verification, b(N+1): a sequence's last token and N drafted ones."""
        return self.config.batch_size * (self.verified + 1)

    def rates(self, source: Source) -> tuple[float, ...]:
        """Returns the acceptance rate of each level of the tokens that `source` drafts, given that
        the level before was accepted: at most K rates."""
        law = self.acceptance[source]
        hazards = law.hazards[: self.lookahead]
        if self.shape.is_chain or not hazards:
            return hazards
        return self.shape.rates(positional(hazards, self.hit_law, self.shape.width, law.levels))

    @property
    def fan_outs(self) -> FanOuts:
        """The numbers of bonus candidates after cache hits and after misses."""
        return FanOuts(self.fan_out, self.fan_out_miss)

    @property
    def widest(self) -> int:
        """The most candidates that a draft forward must return for a row beside its first token, at
        least 1: bonus candidates, and in a tree the later children of a node."""
        if self.dynamic is not None:
            return CHOICES - 1
        if self.layout is None:
            return max(1, self.fan_outs.widest, self.shape.width - 1)
        nodes = zip(self.fan_outs.widest_each, self.shape.children, strict=True)
        return max(1, *(fan_out + max(0, len(children) - 1) for fan_out, children in nodes))

    @cached_property
    def layout(self) -> BranchLayout | None:
        """Where the KV cache stores a tree's nodes and the branches after them; None unless
        branches are grown after a tree."""
        if self.shape.is_chain or not self.fan_out:
            return None
        return BranchLayout(self.shape, self.fan_outs.widest_each, self.masks)

    @property
    def tree_lanes(self) -> int:
        """The scratch KV lanes of a batch's trees, one for each leaf off the first-child path."""
        return self.config.batch_size * (self.verified if self.dynamic else self.shape.num_lanes)

    @property
    def group_lanes(self) -> int:
        """The most branches that the draft grows for a target group, at least one a sequence."""
        return self.config.batch_size * max(1, self.fan_outs.branches)

    @property
    def draft_lanes(self) -> int:
        """The scratch KV lanes that a draft has for a target group, one a branch or tree path."""
        if self.layout is not None:
            return self.config.batch_size * self.layout.num_lanes
        if self.masks and not self.fan_out:
            return 0
        if self.dynamic is not None:
            return self.config.batch_size * max(1, self.dynamic.draft_lanes)
        return self.group_lanes if self.fan_out else self.tree_lanes

    @property
    def draft_sequences(self) -> int:
        """The number of sequences in a draft's KV cache: the batches of all target groups."""
        return self.config.groups * self.config.batch_size

    @property
    def grown_rows(self) -> int:
        """The rows of the draft's largest growth step, a forward that extends all branches."""
        if self.masks:  # After a round without branches, misses store up to K tokens each as well.
            missed = self.config.batch_size * min(2, self.step_rows)
            return max(self.group_lanes, missed) * self.step_rows
        if self.dynamic is not None:
            return self.config.batch_size * WIDTH
        return self.group_lanes * (max(map(len, self.shape.inner)) if self.fan_out else 1)

    def target_buckets(self) -> list[int]:
        """Returns the row counts for which the target is compiled, up to a full verification."""
        exact = [n for n in (self.config.batch_size, self.verify_rows, self.prefill_rows) if n]
        return buckets(*exact) if self.serving is None else fine_buckets(*exact)

    def draft_buckets(self) -> list[int]:
        """Returns the row counts for which the draft is compiled, up to its largest forward."""
        batch, groups = self.config.batch_size, self.config.groups
        exact = [n for n in (self.verify_rows, self.grown_rows, self.prefill_rows) if n]
        if groups > 1:  # One forward may serve all target groups.
            exact += [groups * rows for rows in (batch, *exact)]
        return buckets(batch, *exact)

    @property
    def options(self) -> ForwardOptions:
        """The options of the target's forward.

        A transformer's `context` is the mean number of tokens in the KV cache that a sequence's
        rows read, without the prompt. If rounds limit the run, a round counts as many tokens as the
        imposed acceptance gives on average, rounded so that similar runs share compiled forwards;
        or one token if no acceptance is imposed.
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
        """The options of the draft's forward.

        With an LM head it returns as many top candidates as a row may need. A row of a branch also
        reads the KV of the branch's own 1 … K tokens, counted with their mean, rounded up.
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
    """Returns rank 0's shard of a target over T = tp ranks. where: the target's name or path.

    Raises ConfigError if T does not divide the target's heads or FFN, or a bare product's width.
    """
    if config.is_transformer:
        return TransformerShard(config_of(where), tp)
    return Shard(target, tp)


def fine_buckets(*exact: int) -> list[int]:
    """Returns row counts to compile for a server, whose batch changes with every request: four
    between one power of two and the next, and `exact`."""
    steps = {n << shift >> 2 for n in (4, 5, 6, 7) for shift in range(max(exact).bit_length())}
    return sorted({*exact, *(n for n in steps if n <= max(exact))})


def buckets(batch: int, *exact: int) -> list[int]:
    """Returns row counts to compile for a run: the arguments, and smaller powers of two."""
    largest = max(batch, *exact)
    powers = {1 << n for n in range(largest.bit_length()) if 1 << n < largest}
    return sorted({batch, *exact, *powers})
