"""Opens one rank's resources in a fixed order, and closes them in the reverse order.

The order is topology (the roles of ranks), backend (the device), all-reduce, models with their CUDA
graphs, and message channels. CUDA graphs that outlive the communicator of their all-reduces hang.

A *machine* holds the resources that outlive a configuration: ranks, device, all-reduce, models. A
*session* is one configuration on a machine. `mpissd run` opens a machine for one session, and
`mpissd sweep` opens one for many.

`Models` caches the models of a rank from one configuration to the next. Configurations share
weights if their forwards read the same weights in the same layout. They share a *stepper* (a
model's buffers and compiled forwards, one for each row count that any configuration needs) if they
also read equally long contexts and equally many top-k candidates. A configuration uses only its own
row counts of a shared stepper, so that it runs the same forwards as in a job of its own. All target
ranks make, keep and drop the same models in the same order, because compiling is collective. If
rank 0 drafts (inline SD), every target rank counts the draft's memory, too, so that they agree.
"""

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
from mpissd.engine.backend.base import Backend, Binding, DeviceInfo
from mpissd.engine.backend.registry import binding_of, choose, open_backend
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
# {measured object: {key: (measured value, date of the measurement)}}, shared by configurations
Calibrations = WeakKeyDictionary[Any, dict[Hashable, tuple[Any, datetime]]]
REST_S = 1e-3  # the seconds between two polls of an idle rank
_SMALL_BYTES = 2e9  # the most bytes of weights with which a model is fast enough on CPUs
_SPARE_BYTES = 2 << 30  # bytes of device memory left free for activations, graphs and libraries


Key = tuple[Any, ...]  # identifies a cached object; configurations with equal keys share the object


@dataclass
class _Held:
    """An entry of the model cache: the weights of a model, or a stepper (its buffers and compiled
    forwards). made: the weights or the stepper; None on a rank that only counts their bytes. base:
    for a stepper, the key of its weights. rows: the row counts that a stepper was compiled for."""

    num_bytes: int
    made: Weights | Stepper | None
    base: Key | None = None
    rows: frozenset[int] = frozenset()


class Models:
    """Caches a rank's models (weights and compiled forwards) from one configuration to the next.
    Close it before the all-reduce that the forwards call, because the other order hangs."""

    def __init__(self, backend: Backend, group: Group, seed: int, room: int | None = None) -> None:
        """backend: this rank's device. group: the all-reduce of the target ranks. seed: the seed of
        random weights. room: the bytes that the models on a rank may use (None: unknown)."""
        self._backend = backend
        self._group = group
        self._seed = seed
        self._room = room
        self._held: OrderedDict[Key, _Held] = OrderedDict()  # least recently used entry first
        self._rows: dict[Key, frozenset[int]] = {}

    def expect(self, jobs: Iterable[Job]) -> None:
        """Announces the jobs that will be opened, so that each model is compiled once for the row
        counts of all these jobs. Called before `open`."""
        for need in (need for job in jobs for need in job.needs):
            key = self._keys(need)[1]
            self._rows[key] = self._rows.get(key, frozenset()) | set(need.buckets)

    def open(self, job: Job, topology: Topology) -> list[Stepper | None]:
        """Returns [target stepper, draft stepper] (compiled models), with None for a model that
        this rank does not run. All ranks of the job call it together. If memory does not suffice to
        compile the row counts of all announced jobs, only those of this job are compiled. Raises
        Refused on all ranks if that does not fit on one of them either."""
        # A draft without its own rank runs on rank 0; all target ranks count its memory.
        held = {DRAFT} if topology.is_draft else {TARGET, DRAFT} if job.inline else {TARGET}
        mine = [need for need in job.needs if need.which in held]
        try:
            return self._open(mine, topology)
        except Refused:
            for need in mine:
                self._rows[self._keys(need)[1]] = frozenset(need.buckets)
        return self._open(mine, topology)

    def _open(self, mine: Sequence[Need], topology: Topology) -> list[Stepper | None]:
        missing = [need for need in mine if not self._is_there(need)]
        self._make_room(missing, {key for need in mine for key in self._keys(need)})
        full = None
        try:
            for need in missing:
                is_here = _is_shared(need) or topology.is_draft or topology.is_lead
                self._make(need, topology.group.rank, is_here)
        except (ConfigError, MemoryError) as error:
            # Only the error's text is kept, because its traceback would keep allocations alive.
            full = ConfigError(f"rank {topology.world.rank}: {error}")
        try:
            agree(topology.world, full)
        except Refused:
            self.close()  # All ranks drop their models, so that all can try again.
            raise
        for need in missing:
            if (stepper := self._stepper(need)) is not None:
                stepper.compile()
        steppers: list[Stepper | None] = [None, None]
        for need in mine:
            stepper = self._stepper(need)
            steppers[need.which] = None if stepper is None else stepper.only(need.buckets)
        return steppers

    def _keys(self, need: Need) -> tuple[Key, Key]:
        """Returns (cache key of a model's weights, cache key of its compiled forwards)."""
        options = need.options
        shard = need.shard
        # If all forwards have few rows, a GPU may store the weights in another layout.
        few = need.buckets[-1] <= self._backend.few_rows and isinstance(shard, Shard)
        model = need.which, need.model, shard.shape, shard.tp
        weights = *model, options.fuse, options.lm_head, few
        keeps_kv = options.context or options.capacity
        return weights, (weights, options, need.num_sequences if keeps_kv else 0)

    def _stepper(self, need: Need) -> Stepper | None:
        return cast("Stepper | None", self._held[self._keys(need)[1]].made)

    def _is_there(self, need: Need) -> bool:
        """Returns whether the cache has a stepper that fits `need`. Drops one that does not fit."""
        keys = self._keys(need)
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)
        if (held := self._held.get(keys[1])) is None:
            return False
        stepper = self._stepper(need)
        is_usable = frozenset(need.buckets) <= held.rows
        if need.source is not None:  # The draft must read this target's hidden states.
            is_usable &= self._is_there(need.source)
            if is_usable and stepper is not None:
                is_usable = stepper.source is self._stepper(need.source)
        if not is_usable:
            self._drop(keys[1])
        return is_usable

    def _make_room(self, missing: Sequence[Need], keep: Collection[Key]) -> None:
        """Drops least recently used models, but not those with the keys `keep`, until the models
        `missing` fit. The sizes are computed, and not reported by the device, so that all target
        ranks, and all draft ranks, drop the same models."""
        for key in [key for key in self._held if key not in keep]:
            size = sum(held.num_bytes for held in self._held.values())
            for need in missing:
                weight_bytes, kv_bytes = need.num_bytes(self._backend.itemsize)
                size += kv_bytes + weight_bytes * (self._keys(need)[0] not in self._held)
            if self._room is None or size + _SPARE_BYTES <= self._room:
                return
            self._drop(key)

    def _make(self, need: Need, rank: int, is_here: bool) -> None:
        weights, key = self._keys(need)
        rows = self._rows.get(key, frozenset()) | set(need.buckets)
        group = self._group if _is_shared(need) else SoloGroup()
        shard = replace(need.shard, rank=rank if _is_shared(need) else 0)
        weight_bytes, kv_bytes = need.num_bytes(self._backend.itemsize)
        seed = 2 * self._seed + need.which
        made: Any = None
        if weights not in self._held:
            if is_here:
                made = need.model.weights(
                    self._backend, shard, need.options, max_rows=max(rows), seed=seed
                )
            self._held[weights] = _Held(weight_bytes, made)
        if is_here:
            base: Any = self._held[weights].made
            source = None if need.source is None else self._stepper(need.source)
            made = Stepper(
                self._backend, group, shard, need.options, buckets=rows, seed=seed,
                num_sequences=need.num_sequences, model=need.model, weights=base,
                source=source, compiled=False,
            )  # fmt: skip
        self._held[key] = _Held(kv_bytes, made, weights, rows)

    def _drop(self, key: Key) -> None:
        """Removes the weights or compiled forwards with this key, if there are any, from the cache,
        and with weights also the compiled forwards that use them. Closes compiled forwards."""
        for other in [other for other, held in self._held.items() if held.base == key]:
            self._drop(other)
        held = self._held.pop(key, None)
        if held is not None and isinstance(held.made, Stepper):
            held.made.close()

    def close(self) -> None:
        """Destroys all compiled forwards and releases the weights."""
        for key in list(self._held):
            self._drop(key)


def _is_shared(need: Need) -> bool:
    """Returns whether all target ranks run a model: the target, or a draft that they share."""
    return need.which == TARGET or need.shard.tp > 1


@dataclass
class Session:
    """The resources of one rank while it runs the job of one configuration. learning: the channel
    between this rank and the learner, which trains the draft (None: no training)."""

    topology: Topology  # the ranks of this job and their roles
    waiter: Waiter
    backend: Backend
    infos: list[DeviceInfo]  # the devices, by rank in the job
    job: Job
    group: Group
    models: Models
    calibrations: Calibrations
    resources: ExitStack = field(default_factory=ExitStack)  # closed when the job ends
    learning: LearnerComms | None = None

    @property
    def workload(self) -> Workload:
        """The job's workload, which makes the sequences and the oracles that decide tokens."""
        return self.job.workload

    def target_worker(self, stepper: Stepper) -> TargetWorker:
        """Returns the worker of verifications. stepper: runs this rank's part of the target."""

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
        """Waits until all ranks of the job call this; raises Overdue at the deadline. waiter: has
        the deadline (None: the session's waiter)."""
        request = self.topology.world.Ibarrier()
        (waiter or self.waiter).until(request.Test, "barrier")

    def survivors(self, *, draft_lost: bool) -> MPI.Comm:
        """Returns a communicator of the ranks that are alive: the target ranks if rank 0 passes
        draft_lost=True, else all ranks. With on_draft_loss=ar, where a run may go on without its
        draft, all target ranks call it together."""
        topology = self.topology
        if self.job.config.on_draft_loss == "abort" or topology.is_draft:
            return topology.world
        return topology.group if topology.group.bcast(draft_lost) else topology.world


@dataclass
class Machine:
    """The resources of one rank that outlive a configuration. memory: (the fewest bytes that any
    target rank may use, the fewest that any draft rank may use), each None if unknown."""

    topology: Topology  # the roles of all ranks
    backend: Backend
    target_backend: str  # the name of the target ranks' backend
    infos: list[DeviceInfo]  # the devices, by rank
    group: Group
    models: Models
    memory: tuple[int | None, int | None]
    resources: ExitStack
    calibrations: Calibrations = field(default_factory=WeakKeyDictionary)
    # {D: the topology of a job with D draft ranks, or None if this rank has no part in the job}
    parts: dict[int, Topology | None] = field(default_factory=dict)

    def divide(self, num_drafts: Iterable[int]) -> None:
        """Makes the roles of the ranks in later jobs, for each number of draft ranks in
        `num_drafts`. All ranks call it together."""
        for count in num_drafts:
            self.parts[count] = part_of(self.topology, count)

    def resolve(self, config: RunConfig, serving: Serving | None = None) -> Job:
        """Resolves a configuration to a job, as job.resolve does. The smallest memory of any target
        rank, and of any draft rank, limits it, so that all ranks get the same job."""
        target, draft = self.memory
        return resolve(
            config,
            self.topology.tp,
            backend=self.target_backend,
            memory_bytes=target,
            draft_memory_bytes=draft,
            serving=serving,
        )

    def session(self, job: Job) -> Session | None:
        """Returns this rank's session of a job, or None if the rank has no part in the job."""
        topology = self.parts[job.config.drafts]
        if topology is None:
            return None
        waiter = topology.waiter(job.config.deadline_s)
        waiter.alarm = self.group.check
        infos = self.infos[: job.world_size]
        return Session(
            topology, waiter, self.backend, infos, job, self.group, self.models, self.calibrations
        )


def rest(topology: Topology) -> None:
    """Waits, without a deadline, until all ranks have called this. Polls are rare, because other
    ranks may measure on this rank's cores. If a rank is lost, the working ranks detect it."""
    arrived = topology.world.Ibarrier()

    def polled() -> bool:
        if arrived.Test():
            return True
        time.sleep(REST_S)
        return False

    Waiter(math.inf, spin=False).until(polled, "the other ranks")


@contextmanager
def opened(config: RunConfig) -> Iterator[Session]:
    """Opens this rank's device, communicators and models for one configuration, and closes them in
    the end within the deadline. All ranks call it together; if one fails, all raise Refused."""
    with opened_machine(config, config.drafts) as machine:
        session = session_of(machine, config)
        machine.resources.callback(session.resources.close)
        yield session


@contextmanager
def opened_machine(
    config: RunConfig, num_drafts: int, world: MPI.Comm | None = None
) -> Iterator[Machine]:
    """Opens this rank's resources that outlive a configuration (device, all-reduce, models), and
    closes them within the deadline, also after an error. world: the ranks, `groups` groups of
    target ranks and num_drafts draft ranks (None: all). If one fails, all raise Refused."""
    machine = _open_machine(config, num_drafts, world)
    try:
        yield machine
        guard.stage(Stage.TEARDOWN)  # skipped by an error, which is reported with its stage
    except FaultError:
        machine.group.abort()  # An all-reduce with a dead rank would block the device.
        raise
    finally:
        with within(config.deadline_s, f"rank {machine.topology.world.rank}: teardown"):
            machine.resources.close()


def session_of(machine: Machine, config: RunConfig, serving: Serving | None = None) -> Session:
    """Returns the session of a machine's only configuration. serving: a server's settings (None: no
    server). All ranks call it together; if the job is impossible, all raise Refused."""
    with agreed(machine.topology.world):
        job = machine.resolve(config, serving)
    machine.models.expect([job])
    session = machine.session(job)
    assert session is not None, "a rank of a job that has no part in it"
    return session


def _open_machine(config: RunConfig, num_drafts: int, world: MPI.Comm | None) -> Machine:
    try:
        topology = open_topology(num_drafts, config.groups, world)
    except ConfigError as small:  # Every rank raises the same error.
        raise Refused(str(small), small.exit_code) from small
    keep_freed()
    resources = ExitStack()
    with agreed(topology.world):
        if topology.is_lead:
            make_output(config.out)
        own = config.draft_backend if topology.is_draft else None
        binding = binding_of(own or choose(config.backend), topology.local_rank)
    bindings = topology.world.allgather(binding)
    name = own or backend_name(config, topology, bindings)
    names = topology.world.allgather(name)
    alike = names[: topology.first_draft] if config.draft_backend else names
    if len(set(alike)) > 1:  # --backend=auto found a GPU on some hosts only.
        raise Refused(f"backends by rank are {', '.join(alike)}: say which with --backend", 2)
    with agreed(topology.world):
        if name == "cupy" and not config.share_gpu:
            refuse_sharing(bindings, topology.hosts)
        device = (topology.is_draft and config.draft_device) or config.device
        backend = open_backend(
            name, device=device, local_rank=topology.local_rank, graph=config.graph
        )
    resources.callback(backend.close)
    infos = topology.world.allgather(backend.info)
    group: Group = SoloGroup()
    with agreed(topology.world):
        if not topology.is_draft:
            waiter = topology.waiter(config.deadline_s)
            group = open_group(backend, topology.group, config.all_reduce, waiter)
    resources.callback(group.close)
    shares = memory_shares(infos, topology.hosts)
    first = topology.first_draft
    memory = _least(shares[:first]), _least(shares[first:])
    models = Models(backend, group, config.seed, memory[topology.is_draft])
    resources.callback(models.close)
    machine = Machine(topology, backend, names[0], infos, group, models, memory, resources)
    machine.divide([num_drafts])
    return machine


def refuse_sharing(bindings: Sequence[Binding | None], hosts: Sequence[str]) -> None:
    """Raises ConfigError if two ranks take one GPU. bindings, hosts: by rank."""
    first: dict[str, int] = {}
    for rank, (binding, host) in enumerate(zip(bindings, hosts, strict=True)):
        if binding is None:
            continue
        other = first.setdefault(binding.gpu(host), rank)
        if other != rank:
            raise ConfigError(
                f"ranks {other} ({bindings[other]}) and {rank} ({binding}) share "
                f"{binding.gpu(host)}; allowed: a GPU a rank (--mode=sd --num_drafts=0 drafts on "
                "the target's; srun --gpus-per-task=1), --share_gpu, or --backend=numpy"
            )


def distinct_gpus(infos: Iterable[DeviceInfo], hosts: Sequence[str]) -> list[str]:
    """Returns a name for each rank's GPU, or for the rank without one. infos, hosts: by rank."""
    bound = enumerate(zip((info.binding for info in infos), hosts, strict=False))
    return [binding.gpu(host) if binding else f"rank {rank}" for rank, (binding, host) in bound]


def memory_shares(infos: Sequence[DeviceInfo], hosts: Sequence[str]) -> list[int | None]:
    """Returns the bytes of memory that each rank may use (None: unknown): an equal share of its
    GPU's or, for a CPU rank, of its host's memory. infos, hosts: by rank, its device and host."""
    gpus = distinct_gpus(infos, hosts)
    ranks = Counter(hosts) + Counter(gpus)
    shares: list[int | None] = []
    for info, host, gpu in zip(infos, hosts, gpus, strict=True):
        sharers = ranks[host if info.kind == "cpu" else gpu]
        shares.append(None if info.memory_bytes is None else info.memory_bytes // sharers)
    return shares


def _least(shares: Sequence[int | None]) -> int | None:
    """Returns the smallest of some ranks' bytes of memory; None if one is unknown, or for none."""
    sizes = [size for size in shares if size is not None]
    return None if len(sizes) < len(shares) else min(sizes, default=None)


def backend_name(config: RunConfig, topology: Topology, bindings: Sequence[Binding | None]) -> str:
    """Returns the name of this rank's backend, the same on all ranks of a host. With
    --backend=auto, a small text model runs on "numpy" if the host has fewer GPUs than ranks (SSD on
    a laptop), because CPUs read a small model's 16-bit weights fast enough. Rank 0 then writes this
    to stderr. bindings: the GPU of each rank."""
    name = choose(config.backend)
    where = target_of(config.pair) if config.pair else config.target
    if config.backend != "auto" or name != "cupy" or not config.is_text or where is None:
        return name
    size = Shard(resolve_model(where)).weight_bytes(ForwardOptions(lm_head=True), 2)
    host = topology.hosts[topology.world.rank]
    last = topology.first_draft if config.draft_backend else None
    ranks = zip(bindings[:last], topology.hosts[:last], strict=True)
    here = [bound for bound, other in ranks if other == host]
    gpus = len({bound.gpu(host) for bound in here if bound})
    if size > _SMALL_BYTES or gpus == len(here) or config.share_gpu:
        return name
    if topology.is_lead:
        line = f"{len(here)} ranks, {gpus} visible GPU(s): backend numpy, one core a rank"
        _tell(f"{line} (on the GPU: --backend=cupy --mode=sd --num_drafts=0)")
    return "numpy"


def doubt_of(job: Job) -> str:
    """Returns a warning if the job's draft was trained for another target than the job's, or ""."""
    return doubt(job.draft_where, job.target_where) if job.drafts_by_transformer else ""


def tell_doubt(job: Job) -> None:
    """Warns on stderr, once a process, if the job's draft was trained for another target."""
    if line := doubt_of(job):
        _tell(line)


@cache
def _tell(line: str) -> None:
    sys.stderr.write(f"mpissd: {line}\n")
