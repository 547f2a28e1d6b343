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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

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


StepperKey = tuple[WeightsKey, ForwardOptions, int]  # with the sequences, if KV is read


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

    def keys(self, few_rows: int) -> tuple[WeightsKey, StepperKey]:
        """Returns the keys of the weights, and of the stepper on them."""
        options, shard = self.options, self.shard
        few = self.buckets[-1] <= few_rows and not isinstance(shard, TransformerShard)
        weights = WeightsKey(
            self.which, self.model, shard.shape, shard.tp, options.fuse, options.lm_head, few
        )
        keeps_kv = options.context or options.capacity
        return weights, (weights, options, self.num_sequences if keeps_kv else 0)

    def num_bytes(self, itemsize: int) -> tuple[int, int]:
        """Returns the bytes of this rank's weights, and of its KV cache."""
        rows, options, shard = self.buckets[-1], self.options, self.shard
        kv_bytes = shard.cache_bytes(rows, self.num_sequences, options, itemsize)
        return shard.weight_bytes(options, itemsize), kv_bytes


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
    """Weights, or a stepper on weights, in the cache; made is None if only the lead holds it.

    rows: the row counts of a stepper.
    """

    num_bytes: int
    made: Weights | Stepper | None = None
    rows: frozenset[int] = frozenset()


class Models:
    """Cache of a rank's models; must be closed before the group."""

    def __init__(self, backend: Backend, group: Group, seed: int) -> None:
        """Starts empty; `seed` is the seed of all weights.

        One seed serves all configurations, because the weights' values decide no outcome.
        """
        self._backend, self._group, self._seed = backend, group, seed
        self.room: int | None = None  # bytes that each rank of this role may use; None: unknown
        # The last used comes last.
        self._held: OrderedDict[WeightsKey | StepperKey, _Held] = OrderedDict()
        self._rows: dict[StepperKey, frozenset[int]] = {}

    def expect(self, jobs: Iterable[Job]) -> None:
        """Plans steppers with the row counts of all these jobs; call before the first `open`."""
        for need in (need for job in jobs for need in needs(job)):
            key = self._keys(need)[1]
            self._rows[key] = self._rows.get(key, frozenset()) | set(need.buckets)

    def open(self, job: Job, topology: Topology) -> list[Stepper | None]:
        """Returns [target stepper, draft stepper], None for a model that this rank lacks.

        Collective. If memory does not suffice for the row counts of all configurations, the
        steppers get only this job's row counts. Raises Refused on all ranks of the job if one of
        them has no room for these either.
        """
        # An inline draft is the lead's; every target rank counts its memory.
        held = {_DRAFT} if topology.is_draft else {_TARGET, _DRAFT} if job.inline else {_TARGET}
        mine = [need for need in needs(job) if need.which in held]
        try:
            return self._open(mine, topology)
        except Refused:
            for need in mine:
                self._rows[self._keys(need)[1]] = frozenset(need.buckets)
        return self._open(mine, topology)

    def _open(self, mine: Sequence[Need], topology: Topology) -> list[Stepper | None]:
        fresh = [need for need in mine if not self._is_there(need)]
        self._make_room(fresh, {key for need in mine for key in self._keys(need)})
        full = None
        try:
            for need in fresh:
                is_here = need.which == _TARGET or topology.is_draft or topology.is_lead
                self._make(need, topology.group.rank, is_here)
        except (ConfigError, MemoryError) as error:
            # The error itself would keep the allocations alive.
            full = ConfigError(f"rank {topology.world.rank}: {error}")
        try:
            agree(topology.world, full)
        except Refused:  # undo _make
            for need in fresh:
                weights, key = self._keys(need)
                self._drop(key)
                if not any(isinstance(k, tuple) and k[0] == weights for k in self._held):
                    self._drop(weights)
            raise
        for need in fresh:
            if (stepper := self._stepper(need)) is not None:
                stepper.compile()
        steppers: list[Stepper | None] = [None, None]
        for need in mine:
            stepper = self._stepper(need)
            steppers[need.which] = None if stepper is None else stepper.only(need.buckets)
        return steppers

    def _keys(self, need: Need) -> tuple[WeightsKey, StepperKey]:
        return need.keys(self._backend.few_rows)

    def _stepper(self, need: Need) -> Stepper | None:
        stepper: Stepper | None = cast(Any, self._held[self._keys(need)[1]].made)
        return stepper

    def _is_there(self, need: Need) -> bool:
        """Returns whether the stepper can be used as it is; drops it if not."""
        keys = self._keys(need)
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)
        if (held := self._held.get(keys[1])) is None:
            return False
        stepper, is_usable = self._stepper(need), frozenset(need.buckets) <= held.rows
        if need.source is not None:  # it has to read the states of the current target
            is_usable &= self._is_there(need.source)
            if is_usable and stepper is not None:
                is_usable = stepper.source is self._stepper(need.source)
        if not is_usable:
            self._drop(keys[1])
        return is_usable

    def _make_room(self, fresh: Sequence[Need], keep: Collection[WeightsKey | StepperKey]) -> None:
        """Drops the least recently used, except `keep`, until `fresh` fits.

        It counts computed bytes, which are equal on all ranks of a role, and not a device's report.
        """
        for key in [key for key in self._held if key not in keep]:
            size = sum(held.num_bytes for held in self._held.values())
            for need in fresh:
                weight_bytes, kv_bytes = need.num_bytes(self._backend.itemsize)
                size += kv_bytes + weight_bytes * (self._keys(need)[0] not in self._held)
            if self.room is None or size + _SPARE_BYTES <= self.room:
                return
            self._drop(key)

    def _make(self, need: Need, rank: int, is_here: bool) -> None:
        weights, key = self._keys(need)
        rows = self._rows.get(key, frozenset()) | set(need.buckets)
        group = self._group if need.which == _TARGET else SoloGroup()
        shard = replace(need.shard, rank=rank if need.which == _TARGET else 0)
        weight_bytes, kv_bytes = need.num_bytes(self._backend.itemsize)
        base = self._held.setdefault(weights, _Held(weight_bytes))
        seed = 2 * self._seed + need.which
        if base.made is None and is_here:
            base.made = need.model.weights(
                self._backend, shard, need.options, max_rows=max(rows), seed=seed
            )
        held = self._held[key] = _Held(kv_bytes, rows=rows)
        if is_here:
            source = None if need.source is None else self._stepper(need.source)
            parts = self._backend, group, shard, need.options
            held.made = Stepper(
                *parts, buckets=rows, num_sequences=need.num_sequences, seed=seed,
                model=need.model, weights=cast(Any, base.made), source=source, compiled=False,
            )  # fmt: skip

    def _drop(self, key: WeightsKey | StepperKey) -> None:
        """Closes and removes a stepper, or weights with the steppers on them, if they exist."""
        if isinstance(key, WeightsKey):
            on_them = [k for k in self._held if isinstance(k, tuple) and k[0] == key]
            for stepper_key in on_them:
                self._drop(stepper_key)
        held = self._held.pop(key, None)
        if held is not None and isinstance(held.made, Stepper):
            held.made.close()

    def close(self) -> None:
        """Destroys all programs and releases the weights."""
        for key in list(self._held):
            self._drop(key)
