"""A run, resolved: shapes, laws, fan-out and bytes for a given T. Pure; needs no MPI and no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpissd.config import DEFAULT_VOCAB, RunConfig
from mpissd.errors import ConfigError
from mpissd.heads import check_draft
from mpissd.model.shard import ForwardOptions, Shard
from mpissd.presets import LOOKUP, ModelShape, resolve_model, resolve_pair
from mpissd.rounds import Source
from mpissd.schedules import is_tail, tail_list
from mpissd.spec.acceptance import (
    AcceptanceLaw,
    HitLaw,
    resolve_acceptance,
    resolve_hit_law,
)
from mpissd.spec.fanout import FanOuts, adaptive_budget, resolve_fan_out
from mpissd.workload.markov_laws import MarkovLaws
from mpissd.workload.markov_model import MarkovModel

# Tried in this order: the largest pair whose shards fit is the default.
_DEFAULT_PAIRS = ("70b/1b", "8b/1b", "toy")
PRIOR_ALPHA = 0.8  # of an acceptance that nobody told
_MOST_ROW_BYTES = 1 << 30
_SPARE_BYTES = 1 << 30  # of device memory, for activations, graphs and libraries


@dataclass(frozen=True)
class Job:
    """Everything a rank needs to know before it touches its device."""

    config: RunConfig
    tp: int
    target: ModelShape
    full_target: ModelShape  # before --num_layers
    draft: ModelShape | None
    lookahead: int  # 0 in AR
    fan_out: tuple[int, ...]  # empty unless SSD; behind a hit
    fan_out_miss: tuple[int, ...]  # behind a trunk that a backup drafted
    fan_out_fast: tuple[int, ...] | None  # backup=auto: behind FAST tokens; else None
    acceptance: Mapping[Source, AcceptanceLaw]
    hit_law: HitLaw
    backup_lookahead: int

    @property
    def world_size(self) -> int:
        """T + D."""
        return self.tp + self.config.drafts

    @property
    def options(self) -> ForwardOptions:
        """Of the target's forward."""
        config = self.config
        return ForwardOptions(config.fuse, config.lm_head, config.context)

    @property
    def draft_options(self) -> ForwardOptions:
        """Of the draft's forward: with an LM head it keeps as many candidates as a row may need."""
        top_k = self.widest + 1 if self.config.lm_head and self.fan_out else 1
        return ForwardOptions(self.config.fuse, self.config.lm_head, self.config.context, top_k)

    @property
    def inline(self) -> bool:
        """SD with the draft on the lead's device."""
        return self.draft is not None and self.config.drafts == 0

    @property
    def is_tail(self) -> bool:
        """Whether candidates are kept behind the last served token alone (tail:F)."""
        return bool(self.fan_out) and is_tail(self.config.fan_out)

    def num_forwards(self, tokens: int) -> int:
        """Draft forwards that so many tokens of a sequence take."""
        return -(-tokens // (1 if self.draft is None else self.draft.num_tokens))

    @property
    def verify_rows(self) -> int:
        """b(K+1)."""
        return self.config.batch_size * (self.lookahead + 1)

    def target_buckets(self) -> list[int]:
        """Row counts that a verification may need: every batch size up to b, times 1 … K+1."""
        return buckets(self.config.batch_size, self.verify_rows)

    def draft_buckets(self) -> list[int]:
        """Row counts of glue, growth and just-in-time steps."""
        batch = self.config.batch_size
        return buckets(batch, self.verify_rows, batch * max(1, self.num_lanes))

    @property
    def adaptive_budget(self) -> int | None:
        """B of --fan_out=adaptive:B: lists that follow what is committed; None: they are fixed."""
        return adaptive_budget(self.config.fan_out) if self.fan_out else None

    @property
    def fan_outs(self) -> FanOuts:
        """Both lists."""
        return FanOuts(self.fan_out, self.fan_out_miss, self.fan_out_fast)

    @property
    def num_lanes(self) -> int:
        """Branches that one draft grows for a sequence, at most."""
        branches = self.adaptive_budget or self.fan_outs.branches
        return -(-branches // max(1, self.config.drafts))

    @property
    def widest(self) -> int:
        """The most candidates that a row may ever keep."""
        return max(1, self.adaptive_budget or self.fan_outs.widest)

    @property
    def laws(self) -> MarkovLaws | None:
        """The language models of a markov job."""
        config = self.config
        if config.workload != "markov":
            return None
        vocab, order = config.vocab or DEFAULT_VOCAB, config.order or 2
        divergence = 0.2 if config.divergence is None else config.divergence
        return MarkovLaws(
            target=MarkovModel(vocab, order, config.seed),
            draft=MarkovModel(vocab, order, config.seed, divergence),
            temperature=config.temperature,
            seed=config.seed,
            saguaro_c=1.0 if config.saguaro_c is None else config.saguaro_c,
            prompt_tokens=config.prompt_tokens or 1,
        )

    def rank_bytes(self, itemsize: int) -> tuple[int, int]:
        """Weight and KV bytes of a (target rank, draft rank); inline, the lead holds both."""
        batch, context = self.config.batch_size, self.config.context
        shard = Shard(self.target, self.tp)
        target = shard.num_params(self.options) * itemsize + shard.kv_bytes(context, batch)
        if self.draft is None:
            return target, 0
        alone = Shard(self.draft)
        draft = alone.num_params(self.draft_options) * itemsize + alone.kv_bytes(context, batch)
        return (target + draft, 0) if self.inline else (target, draft)


def buckets(batch: int, *exact: int) -> list[int]:
    """The row counts that occur in full rounds, and powers of two for what lies between."""
    largest = max(batch, *exact)
    powers = {1 << n for n in range(largest.bit_length()) if 1 << n < largest}
    return sorted({batch, *exact, *powers})


def resolve(
    config: RunConfig,
    tp: int,
    *,
    backend: str,
    memory_bytes: int | None,
    draft_memory_bytes: int | None = None,
) -> Job:
    """The job of a configuration on T target ranks.

    memory_bytes: free on the smallest target device (None: unknown, nothing is refused).
    Raises ConfigError: T that doesn't divide, a law or list that doesn't fit K, too little memory.
    """
    itemsize = 4 if backend == "numpy" else 2
    draft_memory = memory_bytes if draft_memory_bytes is None else draft_memory_bytes
    if config.pair is None and config.target is None:
        return _default_pair(config, tp, backend, itemsize, memory_bytes, draft_memory)
    target, draft = _shapes(config)
    job = _job(config, tp, target, draft)
    _check_memory(job, itemsize, memory_bytes, draft_memory)
    return job


def _default_pair(
    config: RunConfig,
    tp: int,
    backend: str,
    itemsize: int,
    memory_bytes: int | None,
    draft_memory: int | None,
) -> Job:
    names = ("toy",) if backend == "numpy" else _DEFAULT_PAIRS
    reason: ConfigError | None = None
    for name in names:
        try:
            job = _job(config, tp, *resolve_pair(name))
            _check_memory(job, itemsize, memory_bytes, draft_memory)
        except ConfigError as error:
            reason = reason or error
            continue
        return job
    assert reason is not None
    raise reason


def _shapes(config: RunConfig) -> tuple[ModelShape, ModelShape | None]:
    if config.pair is not None:
        return resolve_pair(config.pair)
    assert config.target is not None
    target = resolve_model(config.target)
    return target, None if config.draft is None else resolve_model(config.draft)


def _job(config: RunConfig, tp: int, target: ModelShape, draft: ModelShape | None) -> Job:
    draft = LOOKUP if config.is_lookup else draft  # a draft that is never stepped is not loaded
    check_draft(config, target, draft)
    full = target
    if config.num_layers is not None:
        target = target.scaled(config.num_layers)
    Shard(target, tp)  # refuses a T that doesn't divide
    if config.lm_head and target.vocab_size % tp:
        raise ConfigError(f"{target.name}: vocab_size={target.vocab_size} % tp={tp} is not 0")
    lookahead = 0 if config.mode == "ar" else config.lookahead
    primary = resolve_acceptance(config.acceptance_text, lookahead)
    acceptance = {
        Source.CACHE: primary,
        Source.JIT: primary,
        Source.FAST: resolve_acceptance(config.acceptance_fast, lookahead),
    }
    hit_law = resolve_hit_law(config.p_hit, config.hit_a, config.hit_r)
    backup_lookahead = lookahead if config.backup_lookahead is None else config.backup_lookahead
    fan_out: tuple[int, ...] = ()
    fan_out_miss: tuple[int, ...] = ()
    fan_out_fast: tuple[int, ...] | None = None
    if config.mode == "sd":  # nothing is grown, but what was said has to make sense
        text = tail_list(config.fan_out, lookahead, lookahead)
        _fan_out(config, text, lookahead, primary.hazards, hit_law)
    if config.mode == "ssd":
        text = tail_list(config.fan_out, lookahead, lookahead)
        fan_out = _fan_out(config, text, lookahead, primary.hazards, hit_law)
        source = Source.FAST if config.backup == "fast" else Source.JIT
        backup = acceptance[source].hazards[:backup_lookahead]
        cut = (*backup, *(0.0,) * (lookahead - backup_lookahead))
        text = tail_list(config.fan_out_miss or config.fan_out, lookahead, backup_lookahead)
        fan_out_miss = _fan_out(config, text, lookahead, cut, hit_law)
        if config.backup == "auto":
            hazards = acceptance[Source.FAST].hazards
            fast = tuple(rate * (rank < backup_lookahead) for rank, rate in enumerate(hazards))
            fan_out_fast = _fan_out(config, text, lookahead, fast, hit_law)
        budget = adaptive_budget(config.fan_out)
        for listed in (fan_out, fan_out_miss, fan_out_fast or fan_out):
            _check_fan_out(config, max(budget or 0, *listed), target, draft)
    return Job(
        config=config,
        tp=tp,
        target=target,
        full_target=full,
        draft=None if config.mode == "ar" else draft,
        lookahead=lookahead,
        fan_out=fan_out,
        fan_out_miss=fan_out_miss,
        fan_out_fast=fan_out_fast,
        acceptance=acceptance,
        hit_law=hit_law,
        backup_lookahead=backup_lookahead,
    )


def _fan_out(
    config: RunConfig, text: str, lookahead: int, hazards: Sequence[float], hit_law: HitLaw
) -> tuple[int, ...]:
    law = hit_law
    if adaptive_budget(text) is not None:  # what it begins with is believed, not known
        hazards, law = (PRIOR_ALPHA,) * lookahead, HitLaw("")
    minimum = 1 if config.p_hit else 0
    found = resolve_fan_out(text, lookahead, hazards, law.hit_a, law.hit_r, minimum=minimum)
    hit_law.check_fan_out(found)
    return found


def _check_fan_out(
    config: RunConfig, widest: int, target: ModelShape, draft: ModelShape | None
) -> None:
    """ConfigError where a row can't have so many candidates."""
    if config.lm_head and draft and widest + 1 > min(64, draft.vocab_size):
        most = min(64, draft.vocab_size) - 1
        raise ConfigError(
            f"fan_out {config.fan_out} with lm_head: {widest} a row: allowed: at most {most}"
        )
    if config.workload == "markov":  # a small vocabulary has fewer, and grows fewer
        return
    if widest + 2 > target.vocab_size:
        raise ConfigError(
            f"fan_out {config.fan_out}: {widest} a row: allowed: at most vocab_size - 2 = "
            f"{target.vocab_size - 2}"
        )


def _check_rows(job: Job) -> None:
    """ConfigError where the rows of a round's proposals don't fit one message."""
    laws, config = job.laws, job.config
    if laws is None or laws.temperature == 0:
        return
    size = 4 * config.batch_size * job.lookahead * laws.vocab
    if size > _MOST_ROW_BYTES:
        raise ConfigError(
            f"batch_size={config.batch_size}, lookahead={job.lookahead}, vocab={laws.vocab}: "
            f"{size / 1e9:.1f} GB of sampled rows a round: allowed: {_MOST_ROW_BYTES / 1e9:.1f} GB"
        )


def _check_memory(
    job: Job, itemsize: int, memory_bytes: int | None, draft_memory: int | None
) -> None:
    _check_rows(job)
    target, draft = job.rank_bytes(itemsize)
    for name, need, have in (
        (job.target.name, target, memory_bytes),
        (job.draft.name if job.draft else "", draft, draft_memory),
    ):
        if have is not None and need and need + _SPARE_BYTES > have:
            raise ConfigError(
                f"{name} at tp={job.tp} needs {need / 1e9:.1f} GB a rank and 1.1 GB to spare; "
                f"the device has {have / 1e9:.1f} GB: use a larger TP, --num_layers or "
                "another pair"
            )
