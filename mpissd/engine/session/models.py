"""Cache of the models on a rank: made when a configuration first needs them, kept for the next.

Configurations share weights if their forwards read the same weights in the same layout. They share
a *stepper* (buffers and programs for every row count that any configuration needs) if they also
read as much context and read out as many candidates. A configuration uses only its own row counts
of a shared stepper, so it runs the same programs as in a job of its own.

All target ranks make, keep and drop the same models in the same order, because compiling is
collective. With an inline draft, every target rank also counts the memory of the lead's draft.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mpissd.common.errors import ConfigError
from mpissd.common.presets import ModelShape
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.comm.topology import Refused, Topology, agree
from mpissd.engine.job import Job
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.stepper import ModelSource, Stepper, Weights
from mpissd.engine.model.transformer.shard import TransformerShard

StepperKey = tuple[ForwardOptions, int]
_TARGET, _DRAFT = 0, 1
_SPARE_BYTES = 2 << 30  # left free for activations, graphs and libraries


@dataclass(frozen=True)
class WeightsKey:
    """Key of one model's weights; configurations with equal keys share them."""

    which: int
    model: ModelSource
    shape: ModelShape
    tp: int
    fuse: bool
    lm_head: bool
    few: bool  # whether forwards have few rows, for which a GPU may use another layout


@dataclass(frozen=True)
class Need:
    """The weights and programs that one configuration needs of one model."""

    which: int
    model: ModelSource
    shard: AnyShard
    options: ForwardOptions
    buckets: tuple[int, ...]
    num_sequences: int
    source: Need | None = None  # the target, if the draft reads its hidden states

    def weights(self, few_rows: int) -> WeightsKey:
        options, shard = self.options, self.shard
        few = self.buckets[-1] <= few_rows and not isinstance(shard, TransformerShard)
        return WeightsKey(
            self.which, self.model, shard.shape, shard.tp, options.fuse, options.lm_head, few
        )

    @property
    def stepper(self) -> StepperKey:
        """Key of the stepper on these weights: options, and sequences if KV is read."""
        keeps_kv = self.options.context or self.options.capacity
        return self.options, self.num_sequences if keeps_kv else 0

    def kv_bytes(self, itemsize: int) -> int:
        """Returns the bytes of this rank's KV cache."""
        rows, options = self.buckets[-1], self.options
        return self.shard.cache_bytes(rows, self.num_sequences, options, itemsize)

    def weight_bytes(self, itemsize: int) -> int:
        """Returns the bytes of this rank's weights."""
        return self.shard.weight_bytes(self.options, itemsize)


def needs(job: Job) -> list[Need]:
    """Returns the needs of a job: of its target, and of its draft if it has one."""
    batch, workload = job.config.batch_size, job.workload
    target, rows = job.target_shard, tuple(job.target_buckets())
    needed = [Need(_TARGET, workload.target_model, target, job.options, rows, batch)]
    if (draft := job.draft_shard) is not None:
        rows = tuple(job.draft_buckets())
        source = needed[0] if job.reads_states else None
        model, options, sequences = workload.draft_model, job.draft_options, job.draft_sequences
        parts = model, draft, options, rows, sequences
        needed.append(Need(_DRAFT, *parts, source))
    return needed


@dataclass
class _Held:
    """Weights in the cache and the steppers on them; None if only the lead holds them."""

    num_bytes: int
    weights: Weights | None = None
    steppers: dict[StepperKey, Stepper | None] = field(default_factory=dict)
    kv_bytes: dict[StepperKey, int] = field(default_factory=dict)
    rows: dict[StepperKey, frozenset[int]] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return self.num_bytes + sum(self.kv_bytes.values())

    def drop(self, key: StepperKey) -> None:
        """Closes and removes a stepper, if it exists."""
        self.kv_bytes.pop(key, None)
        self.rows.pop(key, None)
        stepper = self.steppers.pop(key, None)
        if stepper is not None:
            stepper.close()


class Models:
    """Cache of a rank's models; must be closed before the group."""

    def __init__(self, backend: Backend, group: Group, seed: int) -> None:
        """Starts empty; `seed` is the seed of all weights.

        One seed serves all configurations, because the weights' values decide no outcome.
        """
        self._backend, self._group, self._seed = backend, group, seed
        self.room: int | None = None  # bytes that each rank of this role may use; None: unknown
        self._held: OrderedDict[WeightsKey, _Held] = OrderedDict()  # the last used comes last
        self._rows: dict[tuple[WeightsKey, StepperKey], frozenset[int]] = {}

    def expect(self, jobs: Iterable[Job]) -> None:
        """Plans steppers with the row counts of all these jobs; call before the first `open`."""
        for need in (need for job in jobs for need in needs(job)):
            self._rows[self._key(need), need.stepper] = self._wanted(need)

    def open(self, job: Job, topology: Topology) -> list[Stepper | None]:
        """Returns [target stepper, draft stepper], None for a model that this rank lacks.

        Collective. If memory does not suffice for the row counts of all configurations, the
        steppers get only this job's row counts. Raises Refused on all ranks of the job if one of
        them has no room for these either.
        """
        mine = [need for need in needs(job) if _counts(need, job, topology)]
        try:
            return self._open(mine, topology)
        except Refused:
            for need in mine:
                self._rows[self._key(need), need.stepper] = frozenset(need.buckets)
        return self._open(mine, topology)

    def _open(self, mine: Sequence[Need], topology: Topology) -> list[Stepper | None]:
        fresh = [need for need in mine if not self._is_there(need)]
        self._make_room(fresh, {self._key(need): need.stepper for need in mine})
        error = self._allocate(fresh, topology)
        try:
            agree(topology.world, error)
        except Refused:
            for need in fresh:
                self._forget(need)
            raise
        for need in fresh:
            if (stepper := self._stepper(need)) is not None:
                stepper.compile()
        steppers: list[Stepper | None] = [None, None]
        for need in mine:
            stepper = self._stepper(need)
            steppers[need.which] = None if stepper is None else stepper.only(need.buckets)
        return steppers

    def _wanted(self, need: Need) -> frozenset[int]:
        known = self._rows.get((self._key(need), need.stepper), frozenset())
        return known | frozenset(need.buckets)

    def _key(self, need: Need) -> WeightsKey:
        return need.weights(self._backend.few_rows)

    def _stepper(self, need: Need) -> Stepper | None:
        return self._held[self._key(need)].steppers[need.stepper]

    def _is_there(self, need: Need) -> bool:
        held = self._held.get(self._key(need))
        if held is None:
            return False
        self._held.move_to_end(self._key(need))
        is_whole = frozenset(need.buckets) <= held.rows.get(need.stepper, frozenset())
        if is_whole and self._reads_source(need):
            return True
        held.drop(need.stepper)
        return False

    def _reads_source(self, need: Need) -> bool:
        """Returns whether a stepper reads the states of the current target, if it reads any."""
        if need.source is None:
            return True
        stepper = self._stepper(need)
        is_there = self._is_there(need.source)
        return is_there and (stepper is None or stepper.source is self._stepper(need.source))

    def _make_room(self, fresh: Sequence[Need], keep: Mapping[WeightsKey, StepperKey]) -> None:
        """Drops models until `fresh` fits: the least recently used, then other steppers of `keep`.

        It counts computed bytes, which are equal on all ranks of a role, and not a device's report.
        """
        for key in [key for key in self._held if key not in keep]:
            if self._fits(fresh):
                return
            self._drop(key)
        for key, stepper in keep.items():
            held = self._held.get(key, _Held(0))
            for other in [other for other in held.steppers if other != stepper]:
                if self._fits(fresh):
                    return
                held.drop(other)

    def _fits(self, fresh: Sequence[Need]) -> bool:
        size = sum(held.total_bytes for held in self._held.values())
        for need in fresh:
            size += need.kv_bytes(self._backend.itemsize)
            size += 0 if self._key(need) in self._held else self._weight_bytes(need)
        return self.room is None or size + _SPARE_BYTES <= self.room

    def _weight_bytes(self, need: Need) -> int:
        return need.weight_bytes(self._backend.itemsize)

    def _allocate(self, fresh: Sequence[Need], topology: Topology) -> ConfigError | None:
        """Makes the missing weights and steppers; returns an error if the device is full."""
        full = None
        try:
            for need in fresh:
                is_here = need.which == _TARGET or topology.is_draft or topology.is_lead
                self._make(need, topology.group.rank, is_here)
        except (ConfigError, MemoryError) as error:
            full = str(error)  # the error itself would keep the allocations alive
        if full is None:
            return None
        return ConfigError(f"rank {topology.world.rank}: {full}")

    def _make(self, need: Need, rank: int, is_here: bool) -> None:
        key = self._key(need)
        group = self._group if need.which == _TARGET else SoloGroup()
        shard = replace(need.shard, rank=rank if need.which == _TARGET else 0)
        held = self._held.setdefault(key, _Held(self._weight_bytes(need)))
        rows = self._wanted(need)
        seed = 2 * self._seed + need.which
        if held.weights is None and is_here:
            held.weights = need.model.weights(
                self._backend, shard, need.options, max_rows=max(rows), seed=seed
            )
        held.kv_bytes[need.stepper] = need.kv_bytes(self._backend.itemsize)
        held.rows[need.stepper] = rows
        held.steppers[need.stepper] = None
        if is_here:
            held.steppers[need.stepper] = Stepper(
                self._backend,
                group,
                shard,
                need.options,
                buckets=rows,
                num_sequences=need.num_sequences,
                seed=seed,
                model=need.model,
                weights=held.weights,
                source=None if need.source is None else self._stepper(need.source),
                compiled=False,
            )

    def _forget(self, need: Need) -> None:
        """Undoes `_make` after it failed on this or another rank."""
        held = self._held.get(self._key(need))
        if held is not None:
            held.drop(need.stepper)
            if not held.steppers:
                self._drop(self._key(need))

    def _drop(self, key: WeightsKey) -> None:
        held = self._held.pop(key)
        for stepper in list(held.steppers):
            held.drop(stepper)

    def close(self) -> None:
        """Destroys all programs and releases the weights."""
        for key in list(self._held):
            self._drop(key)


def _counts(need: Need, job: Job, topology: Topology) -> bool:
    """Returns whether a model counts in this rank's memory: its own, or the lead's inline draft."""
    if topology.is_draft:
        return need.which == _DRAFT
    return need.which == _TARGET or job.inline
