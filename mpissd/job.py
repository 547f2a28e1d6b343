"""A run, resolved: shapes, laws, fan-out and bytes for a given T. Pure; needs no MPI and no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpissd.config import RunConfig
from mpissd.errors import ConfigError
from mpissd.model.shard import ForwardOptions, Shard
from mpissd.presets import ModelShape, resolve_model, resolve_pair
from mpissd.rounds import Source
from mpissd.spec.acceptance import (
    AcceptanceLaw,
    HitLaw,
    resolve_acceptance,
    resolve_hit_law,
)
from mpissd.spec.fanout import resolve_fan_out

# Tried in this order: the largest pair whose shards fit is the default.
_DEFAULT_PAIRS = ("70b/1b", "8b/1b", "toy")
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
    fan_out: tuple[int, ...]  # empty unless SSD
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
        top_k = max((*self.fan_out, 0)) + 1 if self.config.lm_head else 1
        return ForwardOptions(self.config.fuse, self.config.lm_head, self.config.context, top_k)

    @property
    def inline(self) -> bool:
        """SD with the draft on the lead's device."""
        return self.draft is not None and self.config.drafts == 0

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
        return buckets(batch, self.verify_rows, batch * max(1, sum(self.fan_out)))

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
    fan_out: tuple[int, ...] = ()
    if config.mode == "ssd":
        fan_out = resolve_fan_out(
            config.fan_out,
            lookahead,
            primary.hazards,
            hit_law.hit_a,
            hit_law.hit_r,
            minimum=1 if config.p_hit else 0,
        )
        hit_law.check_fan_out(fan_out)
        if config.lm_head and draft and max(fan_out) + 1 > min(64, draft.vocab_size):
            most = min(64, draft.vocab_size) - 1
            raise ConfigError(f"fan_out {fan_out} with lm_head: allowed: at most {most} a row")
        if max(fan_out) + 2 > target.vocab_size:
            raise ConfigError(
                f"fan_out {fan_out}: allowed: at most vocab_size - 2 = {target.vocab_size - 2}"
            )
    return Job(
        config=config,
        tp=tp,
        target=target,
        full_target=full,
        draft=None if config.mode == "ar" else draft,
        lookahead=lookahead,
        fan_out=fan_out,
        acceptance=acceptance,
        hit_law=hit_law,
        backup_lookahead=config.backup_lookahead or lookahead,
    )


def _check_memory(
    job: Job, itemsize: int, memory_bytes: int | None, draft_memory: int | None
) -> None:
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
