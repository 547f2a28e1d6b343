"""The sizes that follow from a configuration: rows of forwards, capacities of KV caches, ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from mpissd.common.config import RunConfig
from mpissd.common.presets import ModelShape
from mpissd.common.rounds import Source
from mpissd.common.shapes import MOST_MASKS
from mpissd.common.workloads import class_of
from mpissd.engine.law.acceptance import AcceptanceLaw, HitLaw
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.tree import CHAIN, BranchLayout, Shape, positional
from mpissd.engine.model.shard import ForwardOptions, Shard, StateShard, TransformerShard
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.model.transformer.trees import CHOICES, WIDTH, Size
from mpissd.engine.round.sequence import Placement
from mpissd.engine.trees import TreeBatch

_LONGEST_WINDOW = 8192  # the KV positions that a sequence without a prompt uses cyclically
WARM_TOKENS = 8  # the length in tokens of the prompts that are decoded only for warm-up
_TEXT_CONTEXT = 2048  # tokens of a prompt and its answer together: --context's default for text


@dataclass(frozen=True)
class Serving:
    """The settings that a server's job has in addition to its configuration.

    kv_tokens: the number of tokens that the KV cache holds for all sequences together (0: the full
    context for each sequence). samples: whether requests may ask for a temperature above 0.
    prefix_cache: whether a sequence reuses KV pages of sequences that begin with the same tokens.
    """

    kv_tokens: int = 0
    samples: bool = True
    prefix_cache: bool = True


@dataclass(frozen=True)
class Sizes:
    """A configuration resolved for T target ranks: the shapes of target and draft, the
    probabilities of acceptance and of cache hits, the fan-outs, and the sizes that follow.

    A lane is scratch memory in a sequence's KV cache for one branch, or one path of a draft tree.
    """

    config: RunConfig
    tp: int
    target: ModelShape
    draft: ModelShape | None  # None in AR
    lookahead: int  # 0 in AR
    fan_out: tuple[int, ...]  # bonus candidates after k = 0 … K accepted tokens; () unless SSD
    fan_out_miss: tuple[int, ...]  # the same if the verified tokens were a cache miss
    acceptance: Mapping[Source, AcceptanceLaw]
    hit_law: HitLaw
    backup_lookahead: int
    target_where: str = ""  # the name of the target's preset, or the path of its files
    draft_where: str = ""
    shape: Shape = CHAIN  # a chain or a tree of K levels, in which tokens are drafted
    dynamic: Size | None = None  # the size of trees that the GPU shapes in each round
    prefill_rows: int = 0  # the rows of a forward over a prompt; 0 if sequences have no prompts
    serving: Serving | None = None  # a server's settings; None for a run

    @property
    def world_size(self) -> int:
        """The number of ranks: G groups of T target ranks, D draft and L learner ranks."""
        return self.config.groups * self.tp + self.config.drafts + self.config.learners

    @cached_property
    def target_shard(self) -> AnyShard:
        """The part of the target model that rank 0 holds."""
        return shard_of(self.config, self.target, self.target_where, self.tp)

    @cached_property
    def draft_shard(self) -> AnyShard | None:
        """The part of the draft that rank 0 holds: all, unless the target ranks share it; None in
        AR."""
        if self.draft is None or not self.drafts_by_transformer:
            return None if self.draft is None else Shard(self.draft)
        config = config_of(self.draft_where, self.target_where)
        if config.kind:
            return StateShard(config, heads_used=self.backup_lookahead or 1)
        return TransformerShard(config, self.tp if self.config.shard_draft else 1)

    @property
    def reads_states(self) -> bool:
        """Whether the draft reads the target's hidden states."""
        return isinstance(self.draft_shard, StateShard)

    @property
    def drafts_by_transformer(self) -> bool:
        """Whether the draft is a transformer, and not bare matrix products or a prompt lookup."""
        return self.config.is_transformer and self.draft is not None and self.draft.head is None

    @property
    def inline(self) -> bool:
        """Whether the target's rank 0 also runs the draft (SD without a draft rank)."""
        return self.draft is not None and self.config.drafts == 0

    @property
    def tokens_a_forward(self) -> int:
        """The number of tokens that one draft forward drafts for a sequence: 1, or more with Medusa
        heads or with the mask tokens of a parallel draft."""
        if isinstance(self.draft_shard, StateShard):
            return self.draft_shard.num_heads_used
        return 1 + self.masks if self.draft is None or self.masks else self.draft.num_tokens

    @property
    def masks(self) -> int:
        """The number of mask tokens in a draft forward: K − 1 if one forward drafts K, else 0."""
        return max(0, self.lookahead - 1) if self.config.parallel_drafting else 0

    @property
    def most_masks(self) -> int:
        """The number of mask tokens that the draft model has; 0 if it is no parallel draft. Bare
        matrix products are taken to have as many as any draft may have."""
        shard = self.draft_shard
        return shard.config.masks if isinstance(shard, TransformerShard) else MOST_MASKS

    @property
    def mask_ids(self) -> range:
        """The ids of a parallel draft's mask tokens, which come after those of its vocabulary."""
        vocab = 0 if self.draft is None else self.draft.vocab_size
        if isinstance(self.draft_shard, TransformerShard):  # It has the target's vocabulary.
            vocab = self.draft_shard.shape.vocab_size
        return range(vocab, vocab + self.masks)

    def num_forwards(self, tokens: int) -> int:
        """Returns how many draft forwards are needed to draft `tokens` tokens for a sequence."""
        return -(-tokens // self.tokens_a_forward)

    @property
    def step_rows(self) -> int:
        """The rows that one draft forward computes for a branch: 1, or K with a parallel draft, for
        its last token and K − 1 mask tokens."""
        return 1 + self.masks

    @property
    def catches_up(self) -> bool:
        """Whether a parallel draft's forward also stores the K and V of the tokens, up to K a
        sequence, that were accepted since its last forward. In SSD the scoring forward does so."""
        return self.masks > 0 and self.drafts_by_transformer and not self.fan_out

    @property
    def window(self) -> int | None:
        """The number of tokens after which a sequence without a prompt reuses its KV positions, so
        that any length fits; None for text, whose sequences have prompts."""
        config = self.config
        if config.is_text:
            return None
        rounds = config.max_rounds or _LONGEST_WINDOW
        tokens = config.num_tokens or _LONGEST_WINDOW
        return min(_LONGEST_WINDOW, tokens, rounds * (self.lookahead + 1))

    @property
    def longest(self) -> int:
        """The most tokens that a sequence may have, its context or prompt included."""
        if self.window is not None:
            return self.config.context + self.window
        positions = config_of(self.target_where).max_positions
        return min(self.config.context or _TEXT_CONTEXT, positions)

    @property
    def capacity(self) -> int:
        """The number of tokens that one sequence's slot of the KV cache holds: the longest sequence
        (in a text job also one that warms up), and the tokens of a verification."""
        a_round = self.lookahead + 1
        warm = WARM_TOKENS + self.config.warmup_rounds * a_round if self.config.is_text else 0
        return max(self.longest, warm) + a_round

    def placement(self, *, drafts: bool) -> Placement | None:
        """Returns how sequences use the draft's or the target's KV cache (None: it has none)."""
        config, serving, draft = self.config, self.serving, self.draft_shard
        if not (self.drafts_by_transformer if drafts else config.is_transformer):
            return None
        # Reused KV pages come without the hidden states of their tokens, which some drafts read.
        keeps = serving is not None and serving.prefix_cache and not self.reads_states
        stateless = drafts and isinstance(draft, StateShard) and not draft.kv_layers
        lag = self.lookahead if drafts and self.reads_states else 0
        masks = self.mask_ids if drafts else ()
        layout = self.layout if drafts else None
        trees = None if self.shape.is_chain else partial(TreeBatch, layout=layout)
        return Placement(config.context, self.window, keeps, stateless, lag, masks, trees)

    @property
    def num_nodes(self) -> int:
        """The number N of tokens that a round drafts for a sequence: K, or all nodes of a tree."""
        return self.shape.ends[self.lookahead]

    @property
    def verified(self) -> int:
        """The most drafted tokens that a round verifies for a sequence: K, or a tree's nodes."""
        return self.num_nodes if self.dynamic is None else self.dynamic.nodes

    @property
    def verify_rows(self) -> int:
        """The rows of a full verification: for each sequence its last token and N drafted ones."""
        return self.config.batch_size * (self.verified + 1)

    def rates(self, source: Source) -> tuple[float, ...]:
        """Returns the acceptance rates of the tokens that `source` drafts, one for each of at most
        K levels of the chain or tree, given that a token of the level before was accepted."""
        law = self.acceptance[source]
        hazards = law.hazards[: self.lookahead]
        if self.shape.is_chain or not hazards:
            return hazards
        return self.shape.rates(positional(hazards, self.hit_law, self.shape.width, law.levels))

    @property
    def fan_outs(self) -> FanOuts:
        """How many bonus candidates get a branch, after cache hits and after cache misses."""
        return FanOuts(self.fan_out, self.fan_out_miss)

    @property
    def widest(self) -> int:
        """How many of a row's likeliest tokens a draft forward must return besides the first
        one, at least 1: bonus candidates, and in a tree the second and later children of a node."""
        if self.dynamic is not None:
            return CHOICES - 1
        if self.layout is None:
            return max(1, self.fan_outs.widest, self.shape.width - 1)
        nodes = zip(self.fan_outs.widest_each, self.shape.children, strict=True)
        return max(1, *(fan_out + max(0, len(children) - 1) for fan_out, children in nodes))

    @cached_property
    def layout(self) -> BranchLayout | None:
        """Where the KV cache stores the draft tree that is verified and the branches grown after
        its nodes. None for chains, and if no branches are grown (SD)."""
        if self.shape.is_chain or not self.fan_out:
            return None
        return BranchLayout(self.shape, self.fan_outs.widest_each, self.masks)

    @property
    def tree_lanes(self) -> int:
        """The number of lanes (scratch KV memory of one tree path) for the draft trees of a batch,
        one for each leaf except that of the path of first children."""
        return self.config.batch_size * (self.verified if self.dynamic else self.shape.num_lanes)

    @property
    def group_lanes(self) -> int:
        """The most branches that the draft grows at once for the sequences of a target group."""
        return self.config.batch_size * max(1, self.fan_outs.branches)

    @property
    def draft_lanes(self) -> int:
        """The number of lanes of a branch, or of a tree's path, that a draft has for a group."""
        if self.layout is not None:
            return self.config.batch_size * self.layout.num_lanes
        if self.masks and not self.fan_out:
            return 0
        if self.dynamic is not None:
            return self.config.batch_size * max(1, self.dynamic.draft_lanes)
        return self.group_lanes if self.fan_out else self.tree_lanes

    @property
    def draft_sequences(self) -> int:
        """The number of sequences in a draft's KV cache, for the batches of all target groups."""
        return self.config.groups * self.config.batch_size

    @property
    def grown_rows(self) -> int:
        """The rows of the draft's largest forward that extends all branches of a target group."""
        if self.masks:  # If a round grew no branches, each miss also stores up to K tokens.
            missed = self.config.batch_size * min(2, self.step_rows)
            return max(self.group_lanes, missed) * self.step_rows
        if self.dynamic is not None:
            return self.config.batch_size * WIDTH
        return self.group_lanes * (max(map(len, self.shape.inner)) if self.fan_out else 1)

    def target_buckets(self) -> list[int]:
        """Returns the row counts for which target forwards are compiled, up to the largest one."""
        exact = [n for n in (self.config.batch_size, self.verify_rows, self.prefill_rows) if n]
        return buckets(*exact) if self.serving is None else fine_buckets(*exact)

    def draft_buckets(self) -> list[int]:
        """Returns the row counts for which draft forwards are compiled, up to the largest one."""
        batch, groups = self.config.batch_size, self.config.groups
        exact = [n for n in (self.verify_rows, self.grown_rows, self.prefill_rows) if n]
        if groups > 1:  # One forward may serve all target groups.
            exact += [groups * rows for rows in (batch, *exact)]
        return buckets(batch, *exact)

    @property
    def options(self) -> ForwardOptions:
        """The options with which the target's forwards are compiled.

        A transformer's `context` is the mean number of KV positions that a row attends to during
        the run, without the prompt. If max_rounds limits the run, a round counts as the mean number
        of tokens of the imposed acceptance model, rounded so that similar runs share compiled
        forwards, or as one token without such a model.
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
        """The options with which the draft's forwards are compiled. With an LM head, a forward
        returns as many of each row's likeliest tokens as drafting may need. A branch's row also
        attends to the branch's own 1 … K tokens; `own_tokens` is their mean number, rounded up."""
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
    """Returns the part of a target that rank 0 holds if tp ranks share the model. where: the
    target's name or path. Raises ConfigError if tp does not divide the number of heads, the width
    of the FFN, or a width of bare matrix products."""
    if config.is_transformer:
        return TransformerShard(config_of(where), tp)
    return Shard(target, tp)


def fine_buckets(*exact: int) -> list[int]:
    """Returns the row counts to compile for a server, whose batch size changes with every request:
    `exact`, and up to its largest number four counts for each power of two."""
    steps = {n << shift >> 2 for n in (4, 5, 6, 7) for shift in range(max(exact).bit_length())}
    return sorted({*exact, *(n for n in steps if n <= max(exact))})


def buckets(batch: int, *exact: int) -> list[int]:
    """Returns the row counts to compile for a run: the arguments, and smaller powers of two."""
    largest = max(batch, *exact)
    powers = {1 << n for n in range(largest.bit_length()) if 1 << n < largest}
    return sorted({batch, *exact, *powers})
