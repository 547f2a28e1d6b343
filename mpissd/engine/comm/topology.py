"""The ranks' roles: G groups of T target ranks, then D draft ranks; rank 0 is the job's lead."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpissd.common import process
from mpissd.common.errors import ConfigError, FaultError, MpissdError
from mpissd.common.wait import PATIENT_SPIN_S, Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpissd.engine.backend.base import DeviceInfo

# The variables with (size, rank) of Open MPI, of MPICH and its derivatives, and of srun.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def launcher_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns how many processes mpirun or srun started, by its environment variables, so that
    MPI need not be started; None for a process that neither started."""
    return _launched(environ)[0]


def launcher_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Returns this process's rank by the variables of mpirun or srun; 0 without them."""
    return _launched(environ)[1]


def _launched(environ: Mapping[str, str]) -> tuple[int | None, int]:
    for size, rank in ((environ.get(s, ""), environ.get(r, "")) for s, r in _LAUNCHERS):
        if size.isdigit():
            return int(size), int(rank) if rank.isdigit() else 0
    return None, 0


def check_world(world_size: int, num_drafts: int, groups: int = 1) -> int:
    """Returns T = (world_size - num_drafts) / groups, the target ranks of a group; raises
    ConfigError if T is below 1 or not whole."""
    targets = world_size - num_drafts
    if targets < groups:
        asked = f"groups={groups} and " * (groups > 1)
        raise ConfigError(
            f"world of {world_size} rank{'s' * (world_size != 1)} is too small for "
            f"{asked}num_drafts={num_drafts}, which leaves T={max(0, targets) // groups} beside "
            f"D={num_drafts}: mpirun -np {'G·' * (groups > 1)}T+D needs at least "
            f"{num_drafts + groups}"
        )
    if targets % groups:
        raise ConfigError(
            f"world of {world_size} ranks with groups={groups} and num_drafts={num_drafts}: "
            f"{targets} target ranks do not divide into {groups} groups: mpirun -np G·T+D"
        )
    return targets // groups


@dataclass
class Topology:
    """This rank's role, and those of all ranks of `world`. Ranks g·T … g·T+T-1 are the targets of
    group g of G; ranks G·T … G·T+D-1 are the drafts, which all groups share."""

    world: MPI.Comm
    group: MPI.Comm  # the ranks with this rank's role; for targets, the ranks of one group
    tp: int
    num_drafts: int
    local_rank: int
    hosts: tuple[str, ...]  # the name of each world rank's host
    cores_a_rank: float  # usable cores for each rank, on the host with the fewest
    groups: int = 1  # G, the target groups

    def waiter(self, deadline_s: float) -> Waiter:
        """Returns how this rank waits for messages and devices, for at most deadline_s. With two
        cores or more for each rank it spins. With one it spins only briefly, because any other
        process would stretch a spin by a time slice of 4 ms."""
        if self.cores_a_rank >= 2:
            return Waiter(deadline_s, spin=True)
        if self.cores_a_rank >= 1:
            return Waiter(deadline_s, spin=False, spin_s=PATIENT_SPIN_S)
        return Waiter(deadline_s, spin=False)

    def __post_init__(self) -> None:
        rank = self.world.rank
        self.first_draft = self.groups * self.tp  # world rank of the first draft
        self.is_lead = rank == 0  # leads the job: prints and writes the files
        self.is_draft = rank >= self.first_draft
        self.leads_group = not self.is_draft and rank % self.tp == 0  # the first rank of its group
        self.group_index = min(rank // self.tp, self.groups)  # 0 … G-1; G on a draft

    def place(self, info: DeviceInfo) -> dict[str, Any]:
        """Returns this rank's role, host and device, as the profile of `mpissd probe` has them."""
        rank = self.world.rank
        return {
            "rank": rank,
            "role": "draft" if self.is_draft else "lead" if self.leads_group else "target",
            "host": self.hosts[rank],
            "device": info.name,
            "uuid": info.uuid,
            "bus_id": info.bus_id,
            "cores": len(usable_cores()),
        }


def open_topology(num_drafts: int, groups: int = 1, world: MPI.Comm | None = None) -> Topology:
    """Starts MPI and splits the world into targets and drafts. Collective. world: the ranks that
    decode, without those that train a draft; None: all. Raises ConfigError on every rank if the
    world is too small, or if mpirun and mpi4py belong to different MPIs."""
    from mpi4py import MPI

    from mpissd.engine.comm.mpi_patient import PatientComm

    all_ranks = PatientComm(MPI.COMM_WORLD)
    launched = launcher_size()
    if launched is not None and launched != all_ranks.size:
        library = MPI.Get_library_version().split(",")[0].strip()
        raise ConfigError(
            f"launcher mismatch: it started {launched} processes, but MPI sees {all_ranks.size}; "
            f"use the mpirun that belongs to mpi4py's library ({library})"
        )
    world = world or all_ranks
    return placed(world, check_world(world.size, num_drafts, groups), groups)


def placed(world: MPI.Comm, tp: int, groups: int = 1) -> Topology:
    """Returns the topology of `world`, whose first groups·tp ranks are targets. Collective."""
    from mpi4py import MPI

    group = world.Split(min(world.rank // tp, groups), world.rank)
    node = world.Split_type(MPI.COMM_TYPE_SHARED, world.rank)
    cores: set[int] = set().union(*node.allgather(usable_cores()))
    cores_a_rank = float(world.allreduce(len(cores) / node.size, op=MPI.MIN))
    hosts = label_hosts(world.allgather((socket.gethostname(), node.bcast(world.rank))))
    drafts = world.size - groups * tp
    return Topology(world, group, tp, drafts, node.rank, hosts, cores_a_rank, groups)


def label_hosts(names: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Returns a distinct name for the machine of each rank. names: by rank, its hostname and the
    first rank on the same machine, which is appended where several machines (containers, clones)
    have the same hostname."""
    machines = {name: {first for other, first in names if other == name} for name, _ in names}
    return tuple(name if len(machines[name]) == 1 else f"{name}#{first}" for name, first in names)


def part_of(topology: Topology, num_drafts: int) -> Topology | None:
    """Returns the topology of all targets and the first `num_drafts` drafts; None on the other
    drafts, which stay idle. Collective over topology.world."""
    from mpi4py import MPI

    if num_drafts == topology.num_drafts:
        return topology
    world = topology.world
    works = world.rank < topology.first_draft + num_drafts
    part = world.Split(0 if works else MPI.UNDEFINED, world.rank)
    return placed(part, topology.tp, topology.groups) if works else None


def usable_cores() -> set[int]:
    """Returns the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


class Refused(MpissdError):
    """The error that all ranks raise after one of them has failed; only rank 0 prints it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def agree(world: MPI.Comm, error: MpissdError | None) -> None:
    """Raises Refused on every rank if any of them passes an error. Collective. Without it, ranks
    that have no error would wait in their next collective for one that has."""
    errors = world.allgather(None if error is None else (str(error), error.exit_code))
    first = next((e for e in errors if e is not None), None)
    if first is not None:
        raise Refused(*first)


@contextmanager
def agreed(world: MPI.Comm) -> Iterator[None]:
    """Raises Refused on every rank if the block raises an MpissdError on any rank. Collective. A
    FaultError passes at once, because the other ranks may never leave their blocks."""
    error = None
    try:
        yield
    except FaultError:
        raise
    except MpissdError as refused:
        error = refused
    agree(world, error)


_FLAG = "--enable-recovery"


def check_recovery(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if mpirun would end the target ranks together with a lost draft rank. It
    raises nothing in a process that no launcher started, such as a dry run."""
    if launcher_size(environ) is None:
        return
    version = environ.get("OMPI_VERSION", "")
    if version.partition(".")[0] != "5":
        why = f"{f'Open MPI {version}' if version else 'this launcher'} ends all ranks with one"
    elif environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") != environ.get("OMPI_COMM_WORLD_SIZE"):
        why = "ranks on several hosts"
    else:
        why = "mpirun was started without recovery"
        pid = os.getppid()
        while pid > 1 and (fields := process.stat(pid)) is not None:
            if _FLAG.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return
            pid = fields[1]
    allowed = f"allowed: on_draft_loss=abort, or mpirun {_FLAG} of Open MPI 5 on one host"
    raise ConfigError(f"on_draft_loss=ar: {why}; {allowed}")
