"""Resolves a configuration and T to a job: shapes, fan-out and bytes, without MPI or GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mpissd.common.config import AUTO_TREE, RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.presets import (
    LOOKUP,
    ModelShape,
    files_of,
    resolve_model,
    split_pair,
    target_of,
)
from mpissd.common.rounds import Source
from mpissd.common.workloads import class_of
from mpissd.engine.backend.numpy_backend import available_memory_bytes
from mpissd.engine.backend.profile import role_profiles
from mpissd.engine.backend.registry import unopened
from mpissd.engine.law.acceptance import hit_law_of, resolve_acceptance
from mpissd.engine.law.fanout import MOST_CANDIDATES, FanOuts, resolve_fan_out, tree_fan_out
from mpissd.engine.law.tree import CHAIN, shape
from mpissd.engine.model.forwards import MOST_SPAN, SPAN
from mpissd.engine.model.shard import ForwardOptions, Shard, TransformerShard
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.stepper import ModelSource
from mpissd.engine.model.transformer.sources import check_vocabularies, config_of, fetch_missing
from mpissd.engine.model.transformer.trees import MOST_LEVELS, MOST_NODES, WIDTH, Size
from mpissd.engine.oracle.workload import Resolved, Serving, Workload

__all__ = ["Job", "Serving", "buckets", "fine_buckets", "resolve", "resolve_unopened"]

# Tried in this order: the largest pair whose shards fit is the default.
_DEFAULT_PAIRS = ("70b/1b", "8b/1b", "toy")
_PREFILL_ROWS = {"numpy": 32, "cupy": 128}
_FLOAT32 = 4  # bytes of an entry of a distribution, and of a weight on a CPU
_SPARE_BYTES = 1 << 30  # device memory that stays free for activations, graphs and libraries
TARGET, DRAFT = 0, 1
_LEAST_CONTEXT = 256  # tokens; a default context is not made smaller


@dataclass(frozen=True)
class Need:
    """The weights and programs that a job needs of one model, TARGET or DRAFT."""

    which: int
    model: ModelSource
    shard: AnyShard
    options: ForwardOptions
    buckets: tuple[int, ...]
    num_sequences: int
    source: Need | None = None  # the target, if the draft reads its hidden states

    def num_bytes(self, itemsize: int) -> tuple[int, int]:
        """Returns the bytes of this rank's weights, and of its KV cache."""
        rows, options, shard = self.buckets[-1], self.options, self.shard
        kv_bytes = shard.cache_bytes(rows, self.num_sequences, options, itemsize)
        return shard.weight_bytes(options, itemsize), kv_bytes


@dataclass(frozen=True)
class Job(Resolved):
    """A resolved configuration with its workload, the options of its forwards and their rows."""

    @cached_property
    def workload(self) -> Workload:
        """The workload that the job decodes."""
        workload: Workload = class_of(self.config.workload)(self)
        return workload

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
        if self.lookahead and config.max_rounds is not None and self.workload.is_imposed:
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

        With an LM head it reads out as many candidates as a row may need. A lane also reads the KV
        of the 1 … K tokens that it has grown; their mean, rounded up, is counted.
        """
        config = self.config
        has_head = config.lm_head or self.drafts_by_transformer
        top_k = self.widest + 1 if has_head and (self.fan_out or self.tree_lanes) else 1
        own = self.lookahead // 2 + 1 if self.options.context else 1
        if not self.drafts_by_transformer:
            return ForwardOptions(config.fuse, config.lm_head, config.context, top_k, own)
        lanes = config.groups * self.draft_lanes
        steps = self.lookahead * (1 + (self.layout is not None)) if lanes else 0
        return replace(self.options, top_k=top_k, own_tokens=own, lanes=lanes, steps=steps)

    def target_buckets(self) -> list[int]:
        """Returns the row counts to compile for verifications of up to b(K+1) rows."""
        exact = [n for n in (self.config.batch_size, self.verify_rows, self.prefill_rows) if n]
        return buckets(*exact) if self.serving is None else fine_buckets(*exact)

    def draft_buckets(self) -> list[int]:
        """Returns the row counts to compile for the draft: glue, growth and backup steps."""
        batch, groups = self.config.batch_size, self.config.groups
        exact = [n for n in (self.verify_rows, self.grown_rows, self.prefill_rows) if n]
        if groups > 1:  # one forward may carry the rows of all groups
            exact += [groups * rows for rows in (batch, *exact)]
        return buckets(batch, *exact)

    @property
    def grown_rows(self) -> int:
        """The rows of the draft's largest growth step, at least one a sequence."""
        if self.dynamic is not None:
            return self.config.batch_size * WIDTH
        return self.group_lanes * (max(map(len, self.tree.inner)) if self.fan_out else 1)

    @property
    def needs(self) -> list[Need]:
        """The needs of the target, and of the draft if there is one."""
        workload, rows = self.workload, tuple(self.target_buckets())
        sizes = self.target_shard, self.options, rows, self.config.batch_size
        needed = [Need(TARGET, workload.target_model, *sizes)]
        if (shard := self.draft_shard) is not None:
            rows, source = tuple(self.draft_buckets()), needed[0] if self.reads_states else None
            parts = shard, self.draft_options, rows, self.draft_sequences
            needed.append(Need(DRAFT, workload.draft_model, *parts, source))
        return needed

    def rank_bytes(self, itemsize: int) -> tuple[int, int]:
        """Returns the weight and KV bytes of a (target rank, draft rank).

        itemsize: bytes of a weight. An inline draft counts for the target rank. A GPU that draws
        tokens also keeps distributions, one for each drafted token that a verification may need: of
        the last answer, and of the branches that grow. A target keeps one for each sequence that
        rejects.
        """
        kept = 0, 0
        if self.config.is_text and self.workload.samples and itemsize < _FLOAT32:
            lanes = self.config.groups * self.group_lanes if self.fan_out else 0
            kept = self.config.batch_size, (self.draft_sequences + lanes) * self.num_nodes
        needed = [
            sum(need.num_bytes(itemsize))
            + need.shard.scratch_bytes(need.buckets[-1], need.options, itemsize)
            + count * self.workload.proposal_width * _FLOAT32
            for need, count in zip(self.needs, kept, strict=False)
        ]
        target, draft = [*needed, 0][:2]
        return (target + draft, 0) if self.inline else (target, draft)


def fine_buckets(*exact: int) -> list[int]:
    """Returns row counts for batches that change with every request: four in each octave."""
    steps = {n << shift >> 2 for n in (4, 5, 6, 7) for shift in range(max(exact).bit_length())}
    return sorted({*exact, *(n for n in steps if n <= max(exact))})


def buckets(batch: int, *exact: int) -> list[int]:
    """Returns the row counts to compile: full rounds, and powers of two between."""
    largest = max(batch, *exact)
    powers = {1 << n for n in range(largest.bit_length()) if 1 << n < largest}
    return sorted({batch, *exact, *powers})


@dataclass(frozen=True)
class Room:
    """The memory of a job's devices: bytes of a target rank's and a draft rank's (None: unknown).

    itemsize: bytes of a weight.
    """

    itemsize: int
    target: int | None
    draft: int | None

    def fits(self, job: Job) -> bool:
        """Returns whether a job fits; any job fits into memory of unknown size."""
        rooms = zip(job.rank_bytes(self.itemsize), (self.target, self.draft), strict=True)
        return all(have is None or not need or need + _SPARE_BYTES <= have for need, have in rooms)

    def fitted(self, job: Job) -> Job:
        """Returns the job; one of text with a default context as long as memory allows.

        A context given by --context is never changed, nor a server's, which has a pool of pages.
        Raises ConfigError for a job that does not fit; it names the largest batch and the largest
        context that fit, each with the other as asked.
        """
        if self.fits(job):
            return job
        if job.config.is_text and not job.config.context and job.serving is None:
            most = self._most_that_fits(job, "context")
            if most >= _LEAST_CONTEXT:
                return replace(job, config=replace(job.config, context=most))
        target, draft = job.rank_bytes(self.itemsize)
        name, need, have = f"{job.target.name} at tp={job.tp}", target, self.target
        is_target = have is not None and need + _SPARE_BYTES > have
        if not is_target:
            name, need, have = job.draft.name if job.draft else "", draft, self.draft
        fixes = [f"--{field}={most}" for field in ("batch_size", "context")
                 if (most := self._most_that_fits(job, field))]  # fmt: skip
        # CPU ranks share one memory, so a larger T does not help.
        fixes += ["a larger TP"] * (is_target and self.itemsize != _FLOAT32)
        fixes += ["fewer layers (70b@8L)"] * is_target + ["another pair"]
        fixes += ["--backend=emulated"] * (self.itemsize == _FLOAT32 and not job.config.is_text)
        *others, last = fixes
        raise ConfigError(
            f"{name} needs {need / 1e9:.1f} GB a rank and 1.1 GB to spare; the device has "
            f"{(have or 0) / 1e9:.1f} GB: use {', '.join(others)}{' or ' * bool(others)}{last}"
        )

    def _most_that_fits(self, job: Job, field: str) -> int:
        """Returns the largest batch_size or context with which a job fits, or 0: by bisection."""
        context = job.longest if job.config.is_text else job.config.context
        low, high = 0, job.config.batch_size if field == "batch_size" else context
        while low < high:
            middle = (low + high + 1) // 2
            changes: dict[str, Any] = {field: middle}
            if self.fits(replace(job, config=replace(job.config, **changes))):
                low = middle
            else:
                high = middle - 1
        return low


def resolve(
    config: RunConfig,
    tp: int,
    *,
    backend: str,
    memory_bytes: int | None,
    draft_memory_bytes: int | None = None,
    serving: Serving | None = None,
) -> Job:
    """Returns the job of a configuration on T target ranks.

    memory_bytes: free on the smallest target device (None: unknown, nothing is refused);
    draft_memory_bytes: the same on the drafts' devices (None: the same as the targets'). serving:
    of a job whose requests join and leave. Raises ConfigError if T does not divide the target,
    rates or a list do not fit K, memory does not suffice, or the draft device is not allowed.
    """
    check_draft_device(config, backend)
    if config.tree == AUTO_TREE:
        raise ConfigError("tree=auto: only run, sweep and plan choose a tree: allowed: 1..256")
    draft_memory = memory_bytes if draft_memory_bytes is None else draft_memory_bytes
    room = Room(4 if backend == "numpy" else 2, memory_bytes, draft_memory)
    names: list[tuple[str, str | None]] = []
    if config.pair is not None:  # AR needs no draft and drops a pair's
        is_ar = config.mode == "ar"
        names = [(target_of(config.pair), None) if is_ar else split_pair(config.pair)]
    elif config.target is not None:
        names = [(config.target, config.draft)]
    else:
        pairs = ("toy",) if backend == "numpy" else _DEFAULT_PAIRS
        for pair in pairs:
            target = split_pair(pair)[0]
            with suppress(ConfigError):
                _check_shards(config, resolve_model(target), target, tp)
                names.append(split_pair(pair))
        if not names:
            tried = ", ".join(pairs)
            raise ConfigError(
                f"tp={tp}: no built-in pair divides by {tp} (tried {tried}): another TP"
            )
    refusals: list[ConfigError] = []
    for target, draft in names:
        try:
            return room.fitted(replace(_job(config, tp, target, draft, backend), serving=serving))
        except ConfigError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def resolve_unopened(config: RunConfig, tp: int, sharing: int | None = None) -> Job:
    """Resolves a job before any device is open, as far as memory sizes are known.

    Only the memory of emulated devices and of this host's CPUs is known then. sharing: ranks that
    share this host's memory, if all of them will run on it. Raises ConfigError as `resolve` does,
    and if an emulated device's profile lacks all-reduces over T ranks.
    """
    if config.tree == AUTO_TREE:
        config = replace(config, tree=None)
    if config.mode == "ar":
        fetch_missing(None, *filter(None, (config.pair and target_of(config.pair), config.target)))
    else:
        fetch_missing(config.pair, config.target, config.draft)
    memory = draft_memory = None
    backend = unopened(config.backend)
    if backend == "numpy" and sharing and (there := available_memory_bytes()):
        memory = there // sharing
    if backend == "emulated":
        profile, drafts = role_profiles(config.device, config.draft_device)
        profile.all_reduce_s(tp, 1)
        memory, draft_memory = profile.memory_bytes, drafts.memory_bytes
    return resolve(
        config, tp, backend=backend, memory_bytes=memory, draft_memory_bytes=draft_memory
    )


def _job(config: RunConfig, tp: int, where: str, draft_where: str | None, backend: str) -> Job:
    """Returns the job of this target and draft, in memory of any size."""
    target = resolve_model(where)
    draft = None if draft_where is None else resolve_model(draft_where)
    # Prompt lookup never runs the draft model, so none is loaded.
    draft = LOOKUP if config.is_lookup else draft
    if target.head is not None:
        raise ConfigError(f"target={target.name}: a draft's shape: allowed: a whole model")
    if config.is_text and backend == "emulated":
        raise ConfigError("workload=text with backend=emulated: allowed: numpy, cupy")
    if config.is_transformer and config.fuse:
        raise ConfigError("fuse with forward=transformer: allowed: forward=gemm")
    _check_shards(config, target, where, tp)
    if draft is not None and draft.head is not None:
        _check_heads(config, draft)
    elif draft is not None and draft_where is not None:
        if config.is_text and config.mode != "ar":
            check_vocabularies(where, draft_where)
        _check_states(config, tp, draft, draft_where, where)
    lookahead = 0 if config.mode == "ar" else config.lookahead
    backup_lookahead = lookahead if config.backup_lookahead is None else config.backup_lookahead
    primary = resolve_acceptance(config.acceptance_text, lookahead)
    fast = resolve_acceptance(config.acceptance_fast_text, lookahead)
    hit_law, tree = hit_law_of(config, lookahead), CHAIN

    def fan_out(text: str, served: int, hazards: Sequence[float]) -> tuple[int, ...]:
        """Returns F_0 … F_K after `served` drafted tokens, with K acceptance rates by place."""
        powers = hit_law.powers(config.lookahead, served)
        minimum = 1 if hit_law.p_hit else 0
        fans = resolve_fan_out(text, config.lookahead, hazards, *powers, minimum=minimum)
        if hit_law.p_hit and not all(fans):  # a hit cannot be imposed without a candidate
            what = f"p_hit={hit_law.p_hit} with fan_out {fans}"
            raise ConfigError(f"{what}: allowed: every F_k from 1")
        return fans

    fan_outs, (text, _, text_after_miss) = FanOuts(), config.fan_out.partition("/")
    if config.mode != "ar":  # SD grows no branches, but its list is checked as well
        after_hit = fan_out(text, lookahead, primary.hazards)
    if config.mode == "ssd":
        backup = (fast if config.backup == "fast" else primary).hazards
        cut = [rate * (n < backup_lookahead) for n, rate in enumerate(backup)]
        fan_outs = FanOuts(after_hit, fan_out(text_after_miss or text, backup_lookahead, cut))
    dynamic = None
    if config.tree_shape == "dynamic" and config.tree and lookahead:
        if backup_lookahead < lookahead:
            what = f"backup_lookahead={backup_lookahead} with tree_shape=dynamic"
            raise ConfigError(f"{what}: allowed: {lookahead}")
        lookahead = backup_lookahead = min(lookahead, config.tree)
        dynamic = _dynamic(config.tree, lookahead)
    elif config.tree is not None and lookahead:  # AR drafts nothing
        tree = shape(config.tree, primary.hazards, hit_law)
        if fan_outs.branches and backup_lookahead < lookahead:
            what = f"backup_lookahead={backup_lookahead} with tree={config.tree} and mode=ssd"
            raise ConfigError(f"{what}: keys are by node of the whole tree: allowed: {lookahead}")
        if fan_outs.branches and hit_law.p_hit is not None:
            what = f"p_hit={hit_law.p_hit} with tree={config.tree} and mode=ssd"
            raise ConfigError(f"{what}: keys share the ranks of nodes: allowed: hit_law=power:…")
        lookahead, backup_lookahead = tree.depth, min(backup_lookahead, tree.depth)
        primary, fast = (replace(law, hazards=law.hazards[:lookahead]) for law in (primary, fast))
        totals = [sum(each) for each in fan_outs.lists if each]
        fan_outs = FanOuts(*(tree_fan_out(tree, primary.hazards, hit_law, n) for n in totals))
    job = Job(
        config=config,
        tp=tp,
        target=target,
        draft=None if config.mode == "ar" else draft,
        lookahead=lookahead,
        fan_out=fan_outs.after_hit,
        fan_out_miss=fan_outs.after_miss,
        acceptance={Source.CACHE: primary, Source.JIT: primary, Source.FAST: fast},
        hit_law=hit_law,
        backup_lookahead=backup_lookahead,
        target_where=where,
        draft_where=draft_where or "",
        tree=tree,
        dynamic=dynamic,
        prefill_rows=_PREFILL_ROWS.get(backend, _PREFILL_ROWS["cupy"]) if config.is_text else 0,
    )
    most = min(MOST_CANDIDATES, draft.vocab_size if draft else MOST_CANDIDATES) - 1
    if (config.lm_head or config.is_transformer) and draft and job.fan_out and job.widest > most:
        raise ConfigError(
            f"fan_out {config.fan_out} with lm_head: {job.widest} a row: allowed: at most {most}"
        )
    if job.layout is not None and job.drafts_by_transformer:
        lanes, allowed = job.layout.num_lanes, min(MOST_SPAN, SPAN // job.draft_sequences)
        if lanes > allowed:
            what = f"fan_out {config.fan_out} with tree={config.tree}: {lanes} lanes a sequence"
            raise ConfigError(f"{what}: allowed: at most {allowed}")
    if (dynamic or tree is not CHAIN) and (job.reads_states or (draft and draft.head)):
        what = f"tree={config.tree} with draft={draft_where}"
        raise ConfigError(f"{what}: allowed: a draft model of its own")
    job.workload.check()
    return job


def _dynamic(nodes: int, levels: int) -> Size:
    """Returns the sizes of dynamic trees; raises ConfigError for those that no round can decide."""
    size = Size(nodes, levels)
    asked = f"tree={nodes} with tree_shape=dynamic and lookahead={levels}"
    if levels > MOST_LEVELS:
        raise ConfigError(f"{asked}: allowed: at most {MOST_LEVELS} levels")
    if nodes > (most := min(MOST_NODES, size.most_found)):
        raise ConfigError(f"{asked}: allowed: at most tree={most}")
    return size


def check_draft_device(config: RunConfig, backend: str) -> None:
    """Refuses draft_device on a backend that is not emulated, or without a draft rank."""
    if config.draft_device is None:
        return
    asked = f"draft_device={config.draft_device}"
    if backend != "emulated":
        raise ConfigError(f"{asked} with backend={backend}: allowed: backend=emulated")
    if not config.drafts:
        raise ConfigError(f"{asked} without a draft rank: allowed: num_drafts=1")


def _check_shards(config: RunConfig, target: ModelShape, where: str, tp: int) -> None:
    """Refuses a T over which the target's heads, FFN or (with lm_head) vocabulary cannot be split.

    Forwards of bare products need equal shares. where: the target's name.
    """
    if config.is_transformer:
        TransformerShard(config_of(where), tp)
        return
    Shard(target, tp)
    if config.lm_head and target.vocab_size % tp:
        raise ConfigError(f"{target.name}: vocab_size={target.vocab_size} % tp={tp} is not 0")


def _check_heads(config: RunConfig, draft: ModelShape) -> None:
    """Refuses a draft of heads (a shape, or a lookup) that the other flags do not allow."""
    if config.mode == "ar" or draft.head is None:
        return
    if not config.is_lookup:
        if draft.head.lm_heads == 0:
            asked = f"draft={draft.name} with mode={config.mode}, backup={config.backup}"
            raise ConfigError(f"{asked}: allowed: mode=sd, backup=fast")
        if config.is_transformer:
            asked = f"draft={draft.name} with forward=transformer"
            raise ConfigError(f"{asked}: allowed: a whole model")
    if draft.num_tokens == 1:
        return
    # Heads that draft in parallel cannot stop after fewer tokens than one forward drafts.
    if config.lookahead != draft.num_tokens:
        what = f"{draft.num_tokens}, one head a token (medusaN:MODEL has N)"
        raise ConfigError(f"lookahead={config.lookahead} with {draft.name}: allowed: {what}")
    if config.backup_lookahead not in (None, config.lookahead):
        asked = f"backup_lookahead={config.backup_lookahead} with {draft.name}"
        raise ConfigError(f"{asked}: allowed: {config.lookahead}, which one forward drafts")


def _check_states(
    config: RunConfig, tp: int, draft: ModelShape, draft_where: str, where: str
) -> None:
    """Refuses a draft that reads its target's hidden states if it cannot have them in time."""
    # A draft without a file reads tokens; its target may be bare products.
    kind = "" if files_of(draft_where) is None else config_of(draft_where, where).kind
    if not kind:
        return
    asked = f"draft={draft.name} ({kind})"
    if config.mode == "ssd" or config.drafts:
        given = f"mode={config.mode}, num_drafts={config.drafts}"
        why = "it reads the hidden state of the bonus token, known only after the verification"
        raise ConfigError(f"{asked} with {given}: {why}: allowed: mode=sd, num_drafts=0")
    if not config.is_text:
        raise ConfigError(f"{asked} with workload={config.workload}: allowed: workload=text")
    if tp > 1:
        why = "it reads one rank's hidden states and LM head"
        raise ConfigError(f"{asked} with tp={tp}: {why}: allowed: tp=1")
    if kind == "medusa" and config.lookahead > draft.num_layers:
        allowed = f"at most its {draft.num_layers} heads"
        raise ConfigError(f"lookahead={config.lookahead} with {asked}: allowed: {allowed}")
