"""One rank's resources: opens them in a fixed order, and closes them in the reverse order.

Opening: topology → backend → group → models → link. Closing: link → programs (graphs) → group
(NCCL) → backend. Graphs that outlive their communicator hang.

A *machine* holds the resources that outlive a configuration: ranks, device, all-reduce, models. A
*session* is one configuration on a machine. `run` opens a machine for one session, `sweep` for
many.

`Models` caches the models of a rank: made when a configuration first needs them, kept for the next.
Configurations share weights if their forwards read the same weights in the same layout. They share
a *stepper* (buffers and programs for every row count that any configuration needs) if they also
read as much context and read out as many candidates. A configuration uses only its own row counts
of a shared stepper, so it runs the same programs as in a job of its own. All target ranks make,
keep and drop the same models in the same order, because compiling is collective. With an inline
draft, every target rank also counts the memory of the lead's draft.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpissd.common import guard
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.output import make_output
from mpissd.common.presets import resolve_model, target_of
from mpissd.common.process import keep_freed
from mpissd.common.stage import Stage
from mpissd.common.wait import Waiter, within
from mpissd.engine.backend.base import Backend, DeviceInfo
from mpissd.engine.backend.registry import choose, open_backend, visible_gpus
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.comm.mpi_group import open_group
from mpissd.engine.comm.mpi_learner import LearnerComms
from mpissd.engine.comm.topology import Refused, Topology, agree, agreed, open_topology, part_of
from mpissd.engine.job import DRAFT, TARGET, Job, Need, Serving, resolve
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stepper import Stepper, Weights
from mpissd.engine.model.transformer.sources import doubt
from mpissd.engine.oracle.workload import Workload
from mpissd.engine.round.oracle import LogitsGather
from mpissd.engine.round.rows import TargetWorker

Logits = NDArray[np.float32]
# Measurements of the lab and when they were made, by owner and key: configurations that run on one
# machine share them, and an owner's are dropped when it is collected.
Calibrations = WeakKeyDictionary[Any, dict[Hashable, tuple[Any, datetime]]]
REST_S = 1e-3  # time between two polls of an idle rank
_SMALL_BYTES = 2e9  # some 15 forwards a second on a core that reads 30 GB/s
_SPARE_BYTES = 2 << 30  # left free for activations, graphs and libraries


Key = tuple[Any, ...]  # of weights, or of a stepper; configurations with equal keys share them


@dataclass
class _Held:
    """Weights, or a stepper on weights, in the cache; made is None if only the lead holds it.

    base: the key of a stepper's weights. rows: its row counts.
    """

    num_bytes: int
    made: Weights | Stepper | None = None
    base: Key | None = None
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
        self._held: OrderedDict[Key, _Held] = OrderedDict()
        self._rows: dict[Key, frozenset[int]] = {}

    def expect(self, jobs: Iterable[Job]) -> None:
        """Plans steppers with the row counts of all these jobs; call before the first `open`."""
        for need in (need for job in jobs for need in job.needs):
            key = self._keys(need)[1]
            self._rows[key] = self._rows.get(key, frozenset()) | set(need.buckets)

    def open(self, job: Job, topology: Topology) -> list[Stepper | None]:
        """Returns [target stepper, draft stepper], None for a model that this rank lacks.

        Collective. If memory does not suffice for the row counts of all configurations, the
        steppers get only this job's row counts. Raises Refused on all ranks of the job if one of
        them has no room for these either.
        """
        # An inline draft is the lead's; every target rank counts its memory.
        held = {DRAFT} if topology.is_draft else {TARGET, DRAFT} if job.inline else {TARGET}
        mine = [need for need in job.needs if need.which in held]
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
                is_here = need.which == TARGET or topology.is_draft or topology.is_lead
                self._make(need, topology.group.rank, is_here)
        except (ConfigError, MemoryError) as error:
            # The error itself would keep the allocations alive.
            full = ConfigError(f"rank {topology.world.rank}: {error}")
        try:
            agree(topology.world, full)
        except Refused:
            self.close()  # of all ranks alike; another attempt makes what it needs
            raise
        for need in fresh:
            if (stepper := self._stepper(need)) is not None:
                stepper.compile()
        steppers: list[Stepper | None] = [None, None]
        for need in mine:
            stepper = self._stepper(need)
            steppers[need.which] = None if stepper is None else stepper.only(need.buckets)
        return steppers

    def _keys(self, need: Need) -> tuple[Key, Key]:
        """Returns the keys of a need's weights, and of the stepper on them."""
        options, shard = need.options, need.shard
        # For few rows, a GPU may use another layout of the weights of products.
        few = need.buckets[-1] <= self._backend.few_rows and isinstance(shard, Shard)
        model = need.which, need.model, shard.shape, shard.tp
        weights = *model, options.fuse, options.lm_head, few
        keeps_kv = options.context or options.capacity
        return weights, (weights, options, need.num_sequences if keeps_kv else 0)

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

    def _make_room(self, fresh: Sequence[Need], keep: Collection[Key]) -> None:
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
        group = self._group if need.which == TARGET else SoloGroup()
        shard = replace(need.shard, rank=rank if need.which == TARGET else 0)
        weight_bytes, kv_bytes = need.num_bytes(self._backend.itemsize)
        base = self._held.setdefault(weights, _Held(weight_bytes))
        seed = 2 * self._seed + need.which
        if base.made is None and is_here:
            base.made = need.model.weights(
                self._backend, shard, need.options, max_rows=max(rows), seed=seed
            )
        held = self._held[key] = _Held(kv_bytes, base=weights, rows=rows)
        if is_here:
            source = None if need.source is None else self._stepper(need.source)
            parts = self._backend, group, shard, need.options
            held.made = Stepper(
                *parts, buckets=rows, num_sequences=need.num_sequences, seed=seed,
                model=need.model, weights=cast(Any, base.made), source=source, compiled=False,
            )  # fmt: skip

    def _drop(self, key: Key) -> None:
        """Closes and removes a stepper, or weights with the steppers on them, if they exist."""
        for other in [other for other, held in self._held.items() if held.base == key]:
            self._drop(other)
        held = self._held.pop(key, None)
        if held is not None and isinstance(held.made, Stepper):
            held.made.close()

    def close(self) -> None:
        """Destroys all programs and releases the weights."""
        for key in list(self._held):
            self._drop(key)


@dataclass
class Session:
    """The resources of one rank while a job runs."""

    topology: Topology  # the ranks in this job and their roles
    waiter: Waiter
    backend: Backend
    infos: list[DeviceInfo]  # by world rank
    job: Job
    group: Group
    models: Models
    calibrations: Calibrations
    resources: ExitStack  # closed at the end of this job
    learning: LearnerComms | None = None

    @property
    def workload(self) -> Workload:
        """The workload that this job decodes."""
        return self.job.workload

    def target_worker(self, stepper: Stepper) -> TargetWorker:
        """Returns a worker that verifies with this target rank's share of the model."""

        def open_gather() -> LogitsGather:
            comm = self.topology.group.Dup()
            self.resources.callback(comm.Free)

            def gather(local: Logits, waiter: Waiter) -> Logits:
                gathered = np.empty((comm.size * (comm.rank == 0), *local.shape), np.float32)
                request = comm.Igather(local, gathered, root=0)
                waiter.until(request.Test, "logits of the target ranks")
                return gathered

            return gather

        return self.workload.target_worker(stepper, open_gather)

    def barrier(self, waiter: Waiter | None = None) -> None:
        """Waits for all ranks of the world; raises an error after the waiter's deadline."""
        request = self.topology.world.Ibarrier()
        (waiter or self.waiter).until(request.Test, "barrier")

    def survivors(self, *, draft_lost: bool) -> MPI.Comm:
        """Returns the communicator of the living ranks: all, or the targets if the draft was lost.

        draft_lost: read only on the lead, which broadcasts it. Collective over the target ranks, if
        the configuration allows the run to go on without its draft.
        """
        topology = self.topology
        if self.job.config.on_draft_loss == "abort" or topology.is_draft:
            return topology.world
        return topology.group if topology.group.bcast(draft_lost) else topology.world


@dataclass
class Machine:
    """The resources of one rank that outlive a configuration."""

    topology: Topology  # of all ranks
    backend: Backend
    infos: list[DeviceInfo]  # by world rank
    group: Group
    models: Models
    resources: ExitStack
    calibrations: Calibrations = field(default_factory=WeakKeyDictionary)
    # {D: the ranks in use}; None: this rank idles
    parts: dict[int, Topology | None] = field(default_factory=dict)

    def divide(self, num_drafts: Iterable[int]) -> None:
        """Makes a topology for each number of draft ranks; collective over all ranks."""
        for count in num_drafts:
            self.parts[count] = part_of(self.topology, count)

    @property
    def memory(self) -> tuple[int | None, int | None]:
        """Least bytes that a target rank and a draft rank may use; None: unknown, or none."""
        shares = memory_shares(self.infos, self.topology.hosts)
        first = self.topology.first_draft
        target, draft = (
            min((n for n in part if n is not None), default=None) if None not in part else None
            for part in (shares[:first], shares[first:])
        )
        return target, draft

    def resolve(self, config: RunConfig, serving: Serving | None = None) -> Job:
        """Resolves a configuration to the same job on every rank, for the least memory of a role.

        Raises ConfigError.
        """
        target, draft = self.memory
        return resolve(
            config,
            self.topology.tp,
            backend=self.backend.name,
            memory_bytes=target,
            draft_memory_bytes=draft,
            serving=serving,
        )

    def session(self, job: Job) -> Session | None:
        """Returns the session of a job, or None if this rank takes no part in it."""
        topology = self.parts[job.config.drafts]
        if topology is None:
            return None
        waiter = topology.waiter(job.config.deadline_s)
        waiter.alarm = self.group.check
        return Session(
            topology=topology,
            waiter=waiter,
            backend=self.backend,
            infos=self.infos[: job.world_size],
            job=job,
            group=self.group,
            models=self.models,
            calibrations=self.calibrations,
            resources=ExitStack(),
        )


def rest(topology: Topology) -> None:
    """Waits for all ranks, without a deadline and with rare polls. Collective.

    An idle rank must not disturb the ranks that measure on its cores; they detect a lost rank.
    """
    arrived = topology.world.Ibarrier()

    def polled() -> bool:
        if arrived.Test():
            return True
        time.sleep(REST_S)
        return False

    Waiter(math.inf, spin=False).until(polled, "the other ranks")


@contextmanager
def opened(config: RunConfig) -> Iterator[Session]:
    """Opens this rank's part of one job, and always closes it within the deadline.

    Raises Refused on every rank if one rank fails.
    """
    with opened_machine(config, config.drafts) as machine:
        session = session_of(machine, config)
        machine.resources.callback(session.resources.close)
        yield session


@contextmanager
def opened_machine(
    config: RunConfig, num_drafts: int, world: MPI.Comm | None = None
) -> Iterator[Machine]:
    """Opens this rank's part of a machine of groups·T + num_drafts ranks, and always closes it
    within the deadline.

    world: see open_topology. Raises Refused on every rank if one rank fails.
    """
    machine = _open_machine(config, num_drafts, world)
    try:
        yield machine
        guard.stage(Stage.TEARDOWN)  # after an error the stage stays, and is named with it
    except FaultError:
        machine.group.abort()  # a collective that waits for a dead peer would block the device
        raise
    finally:
        with within(config.deadline_s, f"rank {machine.topology.world.rank}: teardown"):
            machine.resources.close()


def session_of(machine: Machine, config: RunConfig, serving: Serving | None = None) -> Session:
    """Returns the session of a machine that runs only this configuration; collective.

    serving: None for a run. Raises Refused on every rank if the configuration cannot run there.
    """
    with agreed(machine.topology.world):
        job = machine.resolve(config, serving)
    machine.models.expect([job])
    session = machine.session(job)
    assert session is not None, "a rank of a job that has no part in it"
    return session


def _open_machine(config: RunConfig, num_drafts: int, world: MPI.Comm | None) -> Machine:
    try:
        topology = open_topology(num_drafts, config.groups, world)
    except ConfigError as small:  # the same on every rank
        raise Refused(str(small), small.exit_code) from small
    keep_freed()
    resources = ExitStack()
    with agreed(topology.world):
        if topology.is_lead:
            make_output(config.out)
        device = (topology.is_draft and config.draft_device) or config.device
        name, local_rank = backend_name(config, topology), topology.local_rank
        backend = open_backend(name, device=device, local_rank=local_rank, graph=config.graph)
    resources.callback(backend.close)
    names = topology.world.allgather(backend.name)
    if len(set(names)) > 1:  # --backend=auto on nodes with different hardware
        raise Refused(f"backends by rank are {', '.join(names)}: say which with --backend", 2)
    infos = topology.world.allgather(backend.info)
    group: Group = SoloGroup()
    with agreed(topology.world):
        if not topology.is_draft:
            waiter = topology.waiter(config.deadline_s)
            group = open_group(backend, topology.group, config.all_reduce, waiter)
    resources.callback(group.close)
    models = Models(backend, group, config.seed)
    resources.callback(models.close)
    machine = Machine(topology, backend, infos, group, models, resources)
    models.room = machine.memory[topology.is_draft]
    machine.divide([num_drafts])
    return machine


def memory_shares(infos: Sequence[DeviceInfo], hosts: Sequence[str]) -> list[int | None]:
    """Returns the bytes that each rank may use; None if they are unknown.

    A GPU rank may use its GPU's memory; CPU ranks share their host's memory equally.
    """
    ranks = Counter(hosts)
    shares: list[int | None] = []
    for info, host in zip(infos, hosts, strict=True):
        sharers = ranks[host] if info.kind == "cpu" else 1
        shares.append(None if info.memory_bytes is None else info.memory_bytes // sharers)
    return shares


def backend_name(config: RunConfig, topology: Topology) -> str:
    """Returns the backend of this rank, the same on all ranks of its host.

    `auto` is numpy if text of a small model has more ranks than its host has GPUs, as SSD on a
    laptop: on one GPU they would be refused. CPUs read a small model's 16-bit weights often enough
    for text. The lead reports it on stderr.
    """
    name = choose(config.backend)
    where = target_of(config.pair) if config.pair else config.target
    if config.backend != "auto" or name != "cupy" or not config.is_text or where is None:
        return name
    size = Shard(resolve_model(where)).weight_bytes(ForwardOptions(lm_head=True), 2)
    here = topology.hosts.count(topology.hosts[topology.world.rank])
    if size > _SMALL_BYTES or here <= (gpus := visible_gpus()):
        return name
    if topology.is_lead:
        line = f"{here} ranks, {gpus} visible GPU(s): backend numpy, one core a rank"
        _tell(f"{line} (on the GPU: --backend=cupy --mode=sd --num_drafts=0)")
    return "numpy"


def doubt_of(job: Job) -> str:
    """Returns a line if a job's draft was made for another target than the job's; "" if not."""
    return doubt(job.draft_where, job.target_where) if job.drafts_by_transformer else ""


def tell_doubt(job: Job) -> None:
    """Writes the doubt about a job's draft to stderr, once in this process; for the lead."""
    if line := doubt_of(job):
        _tell(line)


@cache
def _tell(line: str) -> None:
    sys.stderr.write(f"mpissd: {line}\n")
    sys.stderr.flush()
