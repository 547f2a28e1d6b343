"""The roles of the ranks: G groups of T target ranks, then D draft ranks. Rank 0 writes files."""

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

# Environment variables with (number of ranks, rank), as set by Open MPI, MPICH and srun.
_SRUN_SIZE = "SLURM_STEP_NUM_TASKS"
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    (_SRUN_SIZE, "SLURM_PROCID"),
)


def launcher_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns how many processes mpirun or srun started, by environment variables and without
    starting MPI; None if neither started this process."""
    return _launched(environ)[0]


def launcher_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Returns this process's rank, by environment variables of mpirun or srun; 0 without them."""
    return _launched(environ)[1]


def _launched(environ: Mapping[str, str]) -> tuple[int | None, int]:
    for name, of_rank in _LAUNCHERS:
        size, rank = environ.get(name, ""), environ.get(of_rank, "")
        # A shell that Slurm started (srun --pty) is a step of one task, and no launcher.
        if size.isdigit() and (name, size) != (_SRUN_SIZE, "1"):
            return int(size), int(rank) if rank.isdigit() else 0
    return None, 0


def _mismatch(launched: int, seen: int, library: str) -> str:
    """Returns a refusal of ranks that MPI does not join, which happens if the launcher and mpi4py
    belong to two MPIs. library: the name of mpi4py's."""
    fix = "use the mpirun that belongs to mpi4py's library"
    if "OMPI_COMM_WORLD_SIZE" not in os.environ and os.environ.get(_SRUN_SIZE) == str(launched):
        fix = "srun --mpi=pmix for Open MPI or --mpi=pmi2 for MPICH, or mpirun inside the job"
    return (
        f"launcher mismatch: it started {launched} processes, but MPI sees {seen}; {fix} "
        f"(mpi4py's library: {library})"
    )


def check_world(world_size: int, num_drafts: int, groups: int = 1) -> int:
    """Returns T = (world_size - num_drafts) / groups, the number of target ranks in a group. Raises
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
    """The role of this rank and the layout of the ranks of `world`: G groups of T target ranks,
    then D draft ranks. Ranks g·T … g·T+T-1 are the targets of group g = 0 … G-1. Ranks G·T …
    G·T+D-1 are the drafts, which all groups share."""

    world: MPI.Comm
    group: MPI.Comm  # on a target: the ranks of its group; on a draft: all drafts
    tp: int
    num_drafts: int
    local_rank: int
    hosts: tuple[str, ...]  # the host name of each rank of `world`
    cores_a_rank: float  # usable CPU cores divided by ranks, on the host where that is least
    groups: int = 1  # G, the number of target groups

    def waiter(self, deadline_s: float) -> Waiter:
        """Returns a Waiter for this rank's waits for messages and devices, with this deadline. With
        two or more cores a rank, it polls without pause. With one core a rank, it sleeps after a
        short while, because another process on the core would stretch the polling by a time slice
        of 4 ms."""
        if self.cores_a_rank >= 2:
            return Waiter(deadline_s, spin=True)
        if self.cores_a_rank >= 1:
            return Waiter(deadline_s, spin=False, spin_s=PATIENT_SPIN_S)
        return Waiter(deadline_s, spin=False)

    def __post_init__(self) -> None:
        rank = self.world.rank
        self.first_draft = self.groups * self.tp  # world rank of the first draft
        self.is_lead = rank == 0  # whether this rank prints and writes the job's files
        self.is_draft = rank >= self.first_draft
        self.leads_group = not self.is_draft and rank % self.tp == 0  # first rank of a target group
        self.group_index = min(rank // self.tp, self.groups)  # its group: 0 … G-1; G on drafts

    def place(self, info: DeviceInfo) -> dict[str, Any]:
        """Returns this rank's role, host and device as `mpissd probe` writes them to a profile."""
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
    """Starts MPI and splits its ranks into targets and drafts. Collective. world: the ranks that
    decode, without learners (None: all ranks). Raises ConfigError on every rank if there are too
    few ranks, or if mpirun and mpi4py belong to different MPI libraries."""
    from mpi4py import MPI

    from mpissd.engine.comm.mpi_patient import PatientComm

    all_ranks = PatientComm(MPI.COMM_WORLD)
    launched = launcher_size()
    if launched is not None and launched != all_ranks.size:
        library = MPI.Get_library_version().split(",")[0].strip()
        raise ConfigError(_mismatch(launched, all_ranks.size, library))
    world = world or all_ranks
    return placed(world, check_world(world.size, num_drafts, groups), groups)


def placed(world: MPI.Comm, tp: int, groups: int = 1) -> Topology:
    """Returns the topology of `world`: groups·tp target ranks, then the drafts. Collective."""
    from mpi4py import MPI

    group = world.Split(min(world.rank // tp, groups), world.rank)
    node = world.Split_type(MPI.COMM_TYPE_SHARED, world.rank)
    cores: set[int] = set().union(*node.allgather(usable_cores()))
    cores_a_rank = float(world.allreduce(len(cores) / node.size, op=MPI.MIN))
    hosts = label_hosts(world.allgather((socket.gethostname(), node.bcast(world.rank))))
    drafts = world.size - groups * tp
    return Topology(world, group, tp, drafts, node.rank, hosts, cores_a_rank, groups)


def label_hosts(names: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Returns, for each rank, a name that is unique to its machine. names: for each rank, its
    hostname and the first rank on the same machine. That number is appended to hostnames which
    several machines share (containers, clones)."""
    machines = {name: {first for other, first in names if other == name} for name, _ in names}
    return tuple(name if len(machines[name]) == 1 else f"{name}#{first}" for name, first in names)


def part_of(topology: Topology, num_drafts: int) -> Topology | None:
    """Returns the topology of all targets and the first `num_drafts` drafts. Returns None on the
    remaining drafts, which stay idle. Collective over topology.world."""
    from mpi4py import MPI

    if num_drafts == topology.num_drafts:
        return topology
    world = topology.world
    works = world.rank < topology.first_draft + num_drafts
    part = world.Split(0 if works else MPI.UNDEFINED, world.rank)
    return placed(part, topology.tp, topology.groups) if works else None


def usable_cores() -> set[int]:
    """Returns the numbers of the CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


class Refused(MpissdError):
    """The error that all ranks raise after one of them failed; only rank 0 prints it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def agree(world: MPI.Comm, error: MpissdError | None) -> None:
    """Raises Refused on every rank if any rank passes an error, because ranks without an error
    would else wait in the next collective for the rank that has one. Collective."""
    errors = world.allgather(None if error is None else (str(error), error.exit_code))
    first = next((e for e in errors if e is not None), None)
    if first is not None:
        raise Refused(*first)


@contextmanager
def agreed(world: MPI.Comm) -> Iterator[None]:
    """Runs a `with` block; raises Refused on every rank if the block raises an MpissdError on any.
    Collective. A FaultError is raised at once, as other ranks may never leave their blocks."""
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
    """Raises ConfigError if mpirun would end all ranks when a draft rank is lost. Does nothing in a
    process that no launcher started, such as a dry run."""
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
