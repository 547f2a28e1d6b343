"""One rank's resources, opened in an order and closed in its reverse.

Opening: topology → backend → group → models → link. Closing: link → programs (graphs) → group
(NCCL) → backend. Graphs that outlive their communicator hang.

A *machine* is what stays while configurations come and go: ranks, device, all-reduce, models. A
*session* is one configuration on it. `run` opens a machine for one session, `sweep` for many.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError, FaultError, MpissdError
from mpissd.common.output import make_output
from mpissd.common.rounds import Request
from mpissd.common.wait import Waiter, within
from mpissd.engine.backend.base import Backend, DeviceInfo
from mpissd.engine.backend.registry import choose, open_backend
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.comm.mpi_gather import MpiLogitsGather
from mpissd.engine.comm.mpi_group import open_group
from mpissd.engine.comm.topology import Refused, Topology, agree, open_topology, part_of
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.session.calibrations import Calibrations
from mpissd.engine.session.models import Models
from mpissd.engine.workload.base import TargetWorker, Workload
from mpissd.engine.workload.registry import workload_of

_REST_S = 1e-3  # between two looks of a rank that idles


@dataclass
class Session:
    """What one rank holds while a job runs."""

    topology: Topology  # of the ranks that take part
    waiter: Waiter
    backend: Backend
    infos: list[DeviceInfo]  # by world rank
    job: Job
    group: Group
    models: Models
    calibrations: Calibrations
    resources: ExitStack  # of this job alone

    @property
    def workload(self) -> Workload:
        """What this job decodes."""
        return workload_of(self.job)

    def target_worker(self, stepper: Stepper) -> TargetWorker:
        """Verifies with this target rank's share of the target model."""
        rank = self.topology.group.rank
        return self.workload.target_worker(stepper, rank, self._open_gather)

    def _open_gather(self) -> MpiLogitsGather:
        comm = self.topology.group.Dup()
        self.resources.callback(comm.Free)
        return MpiLogitsGather(comm)

    def requests(self, first_id: int, count: int) -> list[Request]:
        """`count` sequences to decode, numbered from first_id."""
        return self.workload.requests(first_id, count)

    def barrier(self, waiter: Waiter | None = None) -> None:
        """All ranks of the world arrive; the wait naps and has a deadline."""
        request = self.topology.world.Ibarrier()
        (waiter or self.waiter).until(request.Test, "barrier")

    def agree(self, error: MpissdError | None) -> None:
        """Refuses on every rank if one rank has an error."""
        agree(self.topology.world, error)


@dataclass
class Machine:
    """What one rank holds while configurations come and go."""

    topology: Topology  # of all ranks
    backend: Backend
    infos: list[DeviceInfo]  # by world rank
    group: Group
    models: Models
    resources: ExitStack
    calibrations: Calibrations = field(default_factory=Calibrations)
    parts: dict[int, Topology | None] = field(default_factory=dict)  # by D; None: this rank idles

    def divide(self, num_drafts: Iterable[int]) -> None:
        """Has parts with so many draft ranks each; collective over all ranks."""
        for count in num_drafts:
            self.parts[count] = part_of(self.topology, count)

    def resolve(self, config: RunConfig) -> Job:
        """The same job on every rank: memory is the smallest of each role's. Raises ConfigError."""
        target, draft = self.memory
        return resolve(
            config,
            self.topology.tp,
            backend=self.backend.name,
            memory_bytes=target,
            draft_memory_bytes=draft,
        )

    @property
    def memory(self) -> tuple[int | None, int | None]:
        """Bytes that every target rank, and every draft rank, may fill; None: unknown, or none."""
        shares, tp = memory_shares(self.infos, self.topology.hosts), self.topology.tp
        return _least(shares[:tp]), _least(shares[tp:])

    def session(self, job: Job) -> Session | None:
        """A job on the ranks that it has; None where this rank idles meanwhile."""
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

    def rest(self) -> None:
        """All ranks arrive. Who has nothing to do meanwhile hardly looks: others measure on its
        cores, as long as they want to, and it is for them to notice that one is gone."""
        arrived = self.topology.world.Ibarrier()

        def looked() -> bool:
            if arrived.Test():
                return True
            time.sleep(_REST_S)
            return False

        Waiter(math.inf, spin=False).until(looked, "the other ranks")

    def close(self) -> None:
        """In the order that the module says."""
        self.resources.close()


def open_session(config: RunConfig) -> Session:
    """Opens a rank's part of one job; every rank leaves with Refused where one cannot."""
    machine = open_machine(config, config.drafts)
    session = session_of(machine, config)
    session.resources.callback(machine.close)
    return session


@contextmanager
def opened(config: RunConfig) -> Iterator[Session]:
    """Yields a rank's part of one job, and closes it within the deadline, whatever happens."""
    session = open_session(config)
    try:
        yield session
    except FaultError:
        session.group.abort()  # a collective that waits for a dead peer would hold the device
        raise
    finally:
        with within(config.deadline_s, f"rank {session.topology.world.rank}: teardown"):
            session.resources.close()


def session_of(machine: Machine, config: RunConfig) -> Session:
    """The one job of a machine with as many ranks; Refused on every rank where it is none."""
    job, error = None, None
    try:
        job = machine.resolve(config)
    except MpissdError as refused:
        error = refused
    agree(machine.topology.world, error)
    assert job is not None
    machine.models.expect([job])
    session = machine.session(job)
    assert session is not None, "a rank of a job that has no part in it"
    return session


def open_machine(config: RunConfig, num_drafts: int) -> Machine:
    """Opens a rank's part of T + num_drafts ranks; Refused on every rank where one cannot."""
    try:
        topology = open_topology(num_drafts)
    except ConfigError as small:  # the same on every rank
        raise Refused(str(small), small.exit_code) from small
    resources = ExitStack()
    backend, error = _open_backend(config, topology)
    agree(topology.world, error)
    assert backend is not None
    resources.callback(backend.close)
    names = topology.world.allgather(backend.name)
    if len(set(names)) > 1:  # --backend=auto on unlike nodes
        raise Refused(f"backends by rank are {', '.join(names)}: say which with --backend", 2)
    infos = topology.world.allgather(backend.info)
    group, error = _open_group(config, topology, backend)
    resources.callback(group.close)
    agree(topology.world, error)
    models = Models(backend, group, config.seed)
    resources.callback(models.close)
    machine = Machine(topology, backend, infos, group, models, resources)
    models.room = machine.memory[topology.is_draft]
    machine.divide([num_drafts])
    return machine


def _open_group(
    config: RunConfig, topology: Topology, backend: Backend
) -> tuple[Group, MpissdError | None]:
    if topology.is_draft:
        return SoloGroup(), None
    waiter, aware = topology.waiter(config.deadline_s), config.cuda_aware_mpi
    try:
        group = open_group(backend, topology.group, config.all_reduce, waiter, cuda_aware=aware)
    except ConfigError as refused:
        return SoloGroup(), refused
    return group, None


def _open_backend(
    config: RunConfig, topology: Topology
) -> tuple[Backend | None, MpissdError | None]:
    try:
        if topology.is_lead:
            make_output(config.out)
        name = choose(config.backend)
        device = (topology.is_draft and config.draft_device) or config.device
        backend = open_backend(
            name, device=device, local_rank=topology.local_rank, graph=config.graph
        )
    except MpissdError as error:
        return None, error
    return backend, None


def memory_shares(infos: Sequence[DeviceInfo], hosts: Sequence[str]) -> list[int | None]:
    """Bytes that each rank may fill: its GPU's, or its share of the one memory of a host's CPUs."""
    ranks = Counter(hosts)
    shares: list[int | None] = []
    for info, host in zip(infos, hosts, strict=True):
        sharers = ranks[host] if info.kind == "cpu" else 1
        shares.append(None if info.memory_bytes is None else info.memory_bytes // sharers)
    return shares


def _least(sizes: Sequence[int | None]) -> int | None:
    """The smallest; None where one is unknown, or there is none."""
    known = [size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None
