"""Resolves a configuration for T target ranks to a job: the shapes of target and draft, the
probabilities of acceptance and cache hits, the fan-outs and the bytes of memory. Needs no MPI."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mpissd.common import exclusions
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.exclusions import refuse
from mpissd.common.presets import LOOKUP, files_of, resolve_model, split_pair, target_of
from mpissd.common.rounds import Source
from mpissd.common.shapes import ModelShape
from mpissd.common.workloads import class_of
from mpissd.engine.backend.numpy_backend import available_memory_bytes
from mpissd.engine.backend.profile import role_profiles
from mpissd.engine.backend.registry import itemsize_of, unopened
from mpissd.engine.law.acceptance import PARALLEL, hit_law_of, resolve_acceptance
from mpissd.engine.law.fanout import MOST_CANDIDATES, FanOuts, resolve_fan_out, tree_fan_out
from mpissd.engine.law.tree import best_shape
from mpissd.engine.model.forwards import MOST_SPAN, SPAN
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.stepper import ModelSource
from mpissd.engine.model.transformer.sources import check_vocabularies, config_of, fetch_missing
from mpissd.engine.model.transformer.trees import MOST_LEVELS, MOST_NODES, Size
from mpissd.engine.oracle.workload import Workload
from mpissd.engine.sizes import Serving, Sizes, shard_of

__all__ = ["Job", "Serving", "resolve", "resolve_unopened"]

# The default pair is the first of these (target/draft) whose shards fit into memory.
_DEFAULT_PAIRS = ("70b/1b", "8b/1b", "toy")
_FLOAT32 = 4  # bytes of a float32: of a probability, and of a weight on the NumPy backend
_SPARE_BYTES = 1 << 30  # bytes of device memory left free for activations, graphs and libraries
TARGET, DRAFT = 0, 1
_LEAST_CONTEXT = 256  # the fewest tokens to which the default context is shortened to fit memory


@dataclass(frozen=True)
class Need:
    """One model that a rank of the job must load: its weights, compiled forwards and KV cache.

    which: TARGET or DRAFT. model: where the weights come from. shard: the rank's part of the model.
    buckets: the row counts to compile forwards for, rising. num_sequences: the KV cache's slots.
    """

    which: int
    model: ModelSource
    shard: AnyShard
    options: ForwardOptions
    buckets: tuple[int, ...]
    num_sequences: int
    source: Need | None = None  # the target, if this draft reads the target's hidden states

    def num_bytes(self, itemsize: int) -> tuple[int, int]:
        """Returns (bytes of weights, bytes of KV cache) on a rank; itemsize: bytes of a weight."""
        sizes = self.buckets[-1], self.num_sequences, self.options, itemsize
        return self.shard.weight_bytes(self.options, itemsize), self.shard.cache_bytes(*sizes)


@dataclass(frozen=True)
class Job(Sizes):
    """A configuration resolved for T target ranks, with its workload and the models to load."""

    @cached_property
    def workload(self) -> Workload:
        """The workload, which defines the sequences and how their tokens are decided."""
        workload: Workload = class_of(self.config.workload)(self)
        return workload

    @property
    def needs(self) -> list[Need]:
        """The models that the job must load: the target, then the draft if there is one."""
        where = self.target_where
        model = ModelSource(where) if self.config.is_transformer else ModelSource()
        rows = tuple(self.target_buckets())
        batch = self.config.batch_size
        target = Need(TARGET, model, self.target_shard, self.options, rows, batch)
        if self.draft_shard is None:
            return [target]
        model = ModelSource()
        if self.drafts_by_transformer:
            model = ModelSource(self.draft_where, where, heads=self.tokens_a_forward)
        rows = tuple(self.draft_buckets())
        sizes = self.draft_shard, self.draft_options, rows, self.draft_sequences
        return [target, Need(DRAFT, model, *sizes, target if self.reads_states else None)]

    def rank_bytes(self, itemsize: int) -> tuple[int, int]:
        """Returns (bytes on a target rank, bytes on a draft rank) of weights, KV cache and scratch.
        itemsize: bytes of a weight on a target rank, and on a draft rank without a backend of its
        own. A draft on a target rank counts there. A GPU that samples tokens also keeps float32
        distributions over the vocabulary: the target one for each sequence, the draft one for each
        token of its last drafts and of its growing branches."""
        kept = 0, 0
        if self.config.is_text and self.workload.samples:
            lanes = self.config.groups * self.group_lanes if self.fan_out else 0
            kept = self.config.batch_size, (self.draft_sequences + lanes) * self.num_nodes
        own = self.config.draft_backend
        itemsizes = itemsize, itemsize_of(own) if own else itemsize
        needed = [
            sum(need.num_bytes(size))
            + need.shard.scratch_bytes(need.buckets[-1], need.options, size)
            + count * self.workload.proposal_width * _FLOAT32 * (size < _FLOAT32)
            for need, count, size in zip(self.needs, kept, itemsizes, strict=False)
        ]
        target, draft = [*needed, 0][:2]
        return (target + draft, 0) if self.inline else (target, draft)


@dataclass(frozen=True)
class DeviceMemory:
    """The free memory of the devices that a job runs on.

    target, draft: the free bytes on a target rank's and on a draft rank's device (None: unknown).
    itemsize: the bytes of a weight on these devices.
    """

    itemsize: int
    target: int | None
    draft: int | None

    def fits(self, job: Job) -> bool:
        """Returns whether a job fits into the memory. Memory of unknown size fits any job."""
        rooms = zip(job.rank_bytes(self.itemsize), (self.target, self.draft), strict=True)
        return all(have is None or not need or need + _SPARE_BYTES <= have for need, have in rooms)

    def fitted(self, job: Job) -> Job:
        """Returns the job if it fits into the memory; else the job with a shorter context. Only the
        default context of a text job may be shortened: not one that --context gives, nor that of a
        server, whose KV pages are shared. If the job still does not fit, raises ConfigError, whose
        text names the largest batch_size and the largest context that would fit."""
        if self.fits(job):
            return job
        context = self._most_that_fits(job, "context")
        has_default = job.config.is_text and not job.config.context and job.serving is None
        if has_default and context >= _LEAST_CONTEXT:
            return replace(job, config=replace(job.config, context=context))
        target, draft = job.rank_bytes(self.itemsize)
        name, need, have = f"{job.target.name} at tp={job.tp}", target, self.target
        is_target = have is not None and need + _SPARE_BYTES > have
        if not is_target:
            name, need, have = job.draft.name if job.draft else "", draft, self.draft
        values = {"batch_size": self._most_that_fits(job, "batch_size"), "context": context}
        fixes = [f"--{field}={value}" for field, value in values.items() if value]
        # CPU ranks share their host's memory, so that more target ranks do not help.
        fixes += ["a larger TP"] * (is_target and self.itemsize != _FLOAT32)
        fixes += ["fewer layers (70b@8L)"] * is_target + ["another pair"]
        fixes += ["--backend=emulated"] * (self.itemsize == _FLOAT32 and not job.config.is_text)
        *others, last = fixes
        raise ConfigError(
            f"{name} needs {need / 1e9:.1f} GB a rank and 1.1 GB to spare; the device has "
            f"{(have or 0) / 1e9:.1f} GB: use {', '.join(others)}{' or ' * bool(others)}{last}"
        )

    def _most_that_fits(self, job: Job, field: str) -> int:
        """Returns the largest value of `field` (batch_size or context) with which the job fits,
        found by bisection; 0 if there is none."""
        context = job.longest if job.config.is_text else job.config.context
        largest = job.config.batch_size if field == "batch_size" else context

        def is_full(value: int) -> bool:
            changes: dict[str, Any] = {field: value}
            return not self.fits(replace(job, config=replace(job.config, **changes)))

        return bisect_left(range(1, largest + 1), True, key=is_full)


def resolve(
    config: RunConfig,
    tp: int,
    *,
    backend: str,
    memory_bytes: int | None,
    draft_memory_bytes: int | None = None,
    serving: Serving | None = None,
) -> Job:
    """Resolves a configuration to a job on T = tp target ranks in a group.

    backend: the name of the backend. memory_bytes: the free bytes of the smallest target device
    (None: unknown; then any job fits). draft_memory_bytes: the free bytes of a draft device (None:
    the same number, and with --draft_backend unknown). serving: a server's settings (None: no
    server). Raises ConfigError if T does not divide the target's shape, if acceptance rates or a
    list of fan-outs do not fit the number of drafted tokens, if memory does not suffice, or if
    features exclude each other.
    """
    refuse(exclusions.DEVICES, config=config, backend=backend)
    is_alike = draft_memory_bytes is None and not config.draft_backend
    draft_memory = memory_bytes if is_alike else draft_memory_bytes
    memory = DeviceMemory(itemsize_of(backend), memory_bytes, draft_memory)
    refusals: list[ConfigError] = []
    for target, draft in _pairs(config, tp, backend):
        try:
            return memory.fitted(replace(_job(config, tp, target, draft, backend), serving=serving))
        except ConfigError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def resolve_unopened(config: RunConfig, tp: int, sharing: int | None = None) -> Job:
    """Resolves a configuration to a job on tp target ranks before any device is open.

    Only the memory of emulated devices and of this host's CPUs is known then. sharing: how many
    ranks share this host's memory, if the whole job runs on this host (None: unknown). Raises
    ConfigError for an impossible job, and if the profile of an emulated device lacks the time of an
    all-reduce over T ranks.
    """
    if config.mode == "ar":
        fetch_missing(None, *filter(None, (config.pair and target_of(config.pair), config.target)))
    else:
        fetch_missing(config.pair, config.target, config.draft)
    backend = unopened(config.backend)
    there = available_memory_bytes() if sharing else None
    known = {"numpy": there and there // (sharing or 1)}
    memory = draft_memory = known.get(backend)
    if "emulated" in (backend, config.draft_backend):
        profile, drafts = role_profiles(config.device, config.draft_device)
        known["emulated"] = drafts.memory_bytes
        draft_memory = drafts.memory_bytes
        if backend == "emulated":
            profile.all_reduce_s(tp, 1)
            memory = profile.memory_bytes
    if config.draft_backend:
        draft_memory = known.get(config.draft_backend)
    return resolve(
        config, tp, backend=backend, memory_bytes=memory, draft_memory_bytes=draft_memory
    )


def _pairs(config: RunConfig, tp: int, backend: str) -> list[tuple[str, str | None]]:
    """Returns the pairs (target's name, draft's name) to try in turn: the configured pair, or the
    built-in pairs whose target can be split over tp ranks."""
    if config.pair is not None:  # In AR the pair's draft is not used.
        is_ar = config.mode == "ar"
        return [(target_of(config.pair), None) if is_ar else split_pair(config.pair)]
    if config.target is not None:
        return [(config.target, config.draft)]
    pairs = list[tuple[str, str | None]]()
    names = ("toy",) if backend == "numpy" else _DEFAULT_PAIRS
    for target, draft in map(split_pair, names):
        with suppress(ConfigError):
            shard_of(config, resolve_model(target), target, tp)
            pairs.append((target, draft))
    if not pairs:
        tried = ", ".join(names)
        raise ConfigError(f"tp={tp}: no built-in pair divides by {tp} (tried {tried}): another TP")
    return pairs


def _job(config: RunConfig, tp: int, where: str, draft_where: str | None, backend: str) -> Job:
    """Resolves the job of a target and a draft by name or path (where); checks no memory."""
    target, draft = _models(config, tp, where, draft_where, backend)
    lookahead = 0 if config.mode == "ar" else config.lookahead
    primary_text = config.acceptance_text
    if config.parallel_drafting and primary_text.startswith("laws:"):
        primary_text = primary_text.replace("laws", PARALLEL, 1)
    primary = resolve_acceptance(primary_text, lookahead)
    fast = resolve_acceptance(config.acceptance_fast_text, lookahead)
    job = Job(
        config=config,
        tp=tp,
        target=target,
        draft=None if config.mode == "ar" else draft,
        lookahead=lookahead,
        fan_out=(),
        fan_out_miss=(),
        acceptance={Source.CACHE: primary, Source.JIT: primary, Source.FAST: fast},
        hit_law=hit_law_of(config, lookahead),
        backup_lookahead=config.backup_lookahead or lookahead,
        target_where=where,
        draft_where=draft_where or "",
        prefill_rows=(32 if backend == "numpy" else 128) if config.is_text else 0,
    )
    if job.lookahead:
        job = _with_tree(_with_fan_outs(job))
    _check_sizes(job)
    refuse(exclusions.DRAFTS, config=config, job=job)
    job.workload.check()
    return job


def _models(
    config: RunConfig, tp: int, where: str, draft_where: str | None, backend: str
) -> tuple[ModelShape, ModelShape | None]:
    """Returns the shapes of target and draft; raises ConfigError if the flags forbid them."""
    target = resolve_model(where)
    draft = None if draft_where is None else resolve_model(draft_where)
    # Prompt lookup needs no draft model, so that LOOKUP replaces the pair's draft.
    draft = LOOKUP if config.is_lookup else draft
    if target.head is not None:
        raise ConfigError(f"target={target.name}: a draft's shape: allowed: a whole model")
    refuse(exclusions.FORWARDS, config=config, backend=backend)
    shard_of(config, target, where, tp)
    if config.lm_head and not config.is_transformer and target.vocab_size % tp:
        raise ConfigError(f"{target.name}: vocab_size={target.vocab_size} % tp={tp} is not 0")
    if draft is not None and draft.head is not None:
        if config.mode != "ar":
            refuse(exclusions.HEADS, config=config, draft=draft)
    elif draft is not None and draft_where is not None:
        if config.is_text and config.mode != "ar":
            check_vocabularies(where, draft_where)
        # Only the file of a draft that reads the target's hidden states states a `kind`.
        kind = "" if files_of(draft_where) is None else config_of(draft_where, where).kind
        if kind:
            refuse(exclusions.STATES, config=config, tp=tp, draft=draft, kind=kind)
    if config.parallel_drafting and draft is not None:
        has_masks = config.is_transformer and draft.head is None and draft_where is not None
        masks = config_of(draft_where or "", where).masks if has_masks else None
        refuse(exclusions.PARALLEL, config=config, draft=draft, masks=masks)
    return target, draft


def _with_fan_outs(job: Job) -> Job:
    """Returns the job with its fan-outs, the numbers of bonus candidates after k accepted tokens.
    In SD, which drafts nothing ahead, this only checks the flag --fan_out."""
    config, laws = job.config, job.acceptance
    text, _, text_after_miss = config.fan_out.partition("/")
    after_hit = _fan_out(job, text, job.lookahead, laws[Source.CACHE].hazards)
    if config.mode == "sd":
        return job
    hazards = laws[Source.FAST if config.backup == "fast" else Source.JIT].hazards
    cut = [rate * (n < job.backup_lookahead) for n, rate in enumerate(hazards)]
    after_miss = _fan_out(job, text_after_miss or text, job.backup_lookahead, cut)
    return replace(job, fan_out=after_hit, fan_out_miss=after_miss)


def _fan_out(job: Job, text: str, served: int, hazards: Sequence[float]) -> tuple[int, ...]:
    """Resolves `text`, a value of --fan_out, as resolve_fan_out does. served: the number of drafted
    tokens that a round verifies. hazards: the acceptance rates of the K tokens."""
    powers = job.hit_law.powers(job.lookahead, served)
    minimum = 1 if job.hit_law.p_hit else 0
    fan_out = resolve_fan_out(text, job.lookahead, hazards, *powers, minimum=minimum)
    refuse(exclusions.FAN_OUTS, job=job, fan_out=fan_out)
    return fan_out


def _with_tree(job: Job) -> Job:
    """Returns the job with the draft tree of --tree: one optimal tree of up to K levels for all
    rounds, or, with tree_shape=dynamic, only the size of trees whose shape each round decides."""
    config, law = job.config, job.hit_law
    if config.tree is None:
        return job
    refuse(exclusions.TREES, config=config, job=job)
    if config.tree_shape == "dynamic":
        levels = min(job.lookahead, config.tree)
        size = Size(config.tree, levels)
        return replace(job, lookahead=levels, backup_lookahead=levels, dynamic=size)
    primary = job.acceptance[Source.CACHE]
    shape = best_shape(config.tree, primary.hazards, law, primary.levels)
    acceptance = {}
    for source, rates in job.acceptance.items():
        firsts = tuple(row[0] for row in rates.levels) or rates.hazards
        acceptance[source] = replace(rates, hazards=firsts[: shape.depth])
    hazards = acceptance[Source.CACHE].hazards
    totals = [sum(fan_out) for fan_out in job.fan_outs.lists if fan_out]
    fan_outs = FanOuts(*(tree_fan_out(shape, hazards, law, total) for total in totals))
    return replace(
        job,
        shape=shape,
        lookahead=shape.depth,
        backup_lookahead=min(job.backup_lookahead, shape.depth),
        acceptance=acceptance,
        fan_out=fan_outs.after_hit,
        fan_out_miss=fan_outs.after_miss,
    )


def _check_sizes(job: Job) -> None:
    """Raises ConfigError if a tree or a fan-out is larger than forwards or kernels allow."""
    config = job.config
    asked = f"fan_out {config.fan_out}"
    if (size := job.dynamic) is not None:
        dynamic = f"tree={size.nodes} with tree_shape=dynamic and lookahead={size.depth}"
        if size.depth > MOST_LEVELS:
            raise ConfigError(f"{dynamic}: allowed: at most {MOST_LEVELS} levels")
        if size.nodes > (limit := min(MOST_NODES, size.most_found)):
            raise ConfigError(f"{dynamic}: allowed: at most tree={limit}")
    if job.draft is not None and job.fan_out and (config.lm_head or config.is_transformer):
        limit = min(MOST_CANDIDATES, job.draft.vocab_size) - 1
        if job.widest > limit:
            raise ConfigError(f"{asked} with lm_head: {job.widest} a row: allowed: at most {limit}")
    if job.layout is not None and job.drafts_by_transformer:
        limit = min(MOST_SPAN, SPAN // job.draft_sequences)
        if job.layout.num_lanes > limit:
            asked += f" with tree={config.tree}: {job.layout.num_lanes} lanes a sequence"
            raise ConfigError(f"{asked}: allowed: at most {limit}")
