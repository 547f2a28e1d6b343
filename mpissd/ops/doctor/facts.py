"""The records of what the doctor saw.

They hold plain values only, because ranks send them as JSON, also between different versions of
mpissd. None, "" and an empty list mean that something could not be learned; a field …_error says
why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Kind = TypeVar("Kind")
CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"


@dataclass(frozen=True)
class Gpu:
    """One GPU, from nvidia-smi; memory in bytes, clocks in MHz."""

    index: int
    uuid: str
    bus_id: str
    name: str
    driver: str
    capability: float | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    persistence: bool | None = None
    compute_mode: str = ""
    mig: bool | None = None
    ecc_errors: int | None = None  # uncorrected errors since the driver was loaded
    clock: int | None = None
    max_clock: int | None = None
    throttle: int | None = None  # bit mask of clocks_event_reasons.active


@dataclass(frozen=True)
class GpuUser:
    """A process that uses a GPU; num_bytes is None where the driver does not say."""

    uuid: str
    pid: int
    name: str
    num_bytes: int | None = None


@dataclass(frozen=True)
class CudaView:
    """CuPy's view of a rank's environment, from a child process, with versions of its libraries."""

    error: str = ""
    cupy: str = ""
    runtime: int | None = None  # 13020 is 13.2
    driver: int | None = None  # the newest CUDA that the driver serves
    nccl: int | None = None  # 22809 is 2.28.9
    nccl_built: int | None = None
    nccl_error: str = ""
    nvmath_error: str = ""
    count: int = 0
    name: str = ""
    uuid: str = ""
    bus_id: str = ""
    capability: str = ""
    memory_free: int | None = None
    memory_total: int | None = None
    peers: list[list[bool]] = field(default_factory=list)


@dataclass(frozen=True)
class HostFacts:
    """One host, as its first rank sees it."""

    host: str
    cores: int | None = None  # number of cores on which any of its ranks may run
    memory_free: int | None = None
    memory_limit: int | None = None  # bytes that the control group still allows
    shm_free: int | None = None
    clock_source: str = ""
    clock_ns: float | None = None  # ns that one reading of the clock takes
    watch_error: str = ""  # why a dead rank may be seen late or not be named
    open_files: int | None = None
    locked_bytes: int | None = None  # None: unlimited or unknown
    gpus: list[Gpu] = field(default_factory=list)
    gpu_error: str = ""
    gpu_users: list[GpuUser] = field(default_factory=list)
    links: dict[str, dict[str, str]] = field(default_factory=dict)  # {"GPU0": {"GPU1": "NV18"}}


@dataclass(frozen=True)
class RankFacts:
    """One rank; rank and world_size come from MPI, the fields launcher_… from the environment."""

    rank: int
    host: str
    pid: int
    python: str
    python_version: str
    mpissd: str
    folder: str
    role: str = "?"
    local_rank: int = 0
    world_size: int | None = None
    launcher_rank: int = 0
    launcher_size: int | None = None
    library: str = ""
    library_path: str = ""
    cores: list[int] = field(default_factory=list)
    core_numa: list[int] | None = None
    gpu_numa: int | None = None
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    blas_threads: int | None = None
    reads_neighbour: bool | None = None  # whether the rank may read the next rank's memory
    cuda: CudaView | None = None  # None: CuPy is not installed


@dataclass(frozen=True)
class LaunchFacts:
    """The process of `doctor` before MPI starts; inside: whether that process is a rank."""

    python: str
    python_version: str
    mpissd: str
    folder: str
    num_ranks: int
    inside: bool = False  # whether a launcher started it
    mpirun: str = ""  # MPIRUN, or "mpirun"
    mpirun_path: str = ""
    mpirun_version: str = ""
    mpi4py: str = ""
    mpi4py_error: str = ""
    library: str = ""
    library_path: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    stray: list[str] = field(default_factory=list)  # a launcher's variables, set outside one
    out: str = ""
    out_free: int | None = None
    config_error: str = ""
    trial_error: str = ""  # why mpirun could not start the ranks
    slurm: dict[str, str] = field(default_factory=dict)
    slurm_seconds_left: float | None = None
    has_slurm: bool = False  # Whether sbatch is on PATH.


@dataclass(frozen=True)
class SessionFacts:
    """The choices that a run would make, from a session that was opened and closed again."""

    error: str = ""
    backend: str = ""
    device_name: str = ""
    all_reduce: str = ""
    all_reduce_why: str = ""
    target: str = ""
    draft: str = ""
    needs: list[int] = field(default_factory=list)  # each rank's bytes of weights
    memory: list[int | None] = field(default_factory=list)  # each rank's bytes of free memory
    doubts: list[str] = field(default_factory=list)  # drafts that were made for another target


@dataclass(frozen=True)
class Asked:
    """The run that is examined."""

    mode: str
    backend: str
    pair: str | None
    tp: int
    drafts: int
    all_reduce: str = "auto"
    groups: int = 1


@dataclass(frozen=True)
class Facts:
    """All facts; `ranks` is empty if no rank was started or could start."""

    asked: Asked
    launch: LaunchFacts
    ranks: list[RankFacts] = field(default_factory=list)
    hosts: list[HostFacts] = field(default_factory=list)
    session: SessionFacts | None = None
    tried: bool = False  # whether the doctor tried to start the ranks

    def of_host(self, host: str) -> list[RankFacts]:
        """Returns the ranks of a host."""
        return [rank for rank in self.ranks if rank.host == host]


def build(kind: type[Kind], data: Mapping[str, Any]) -> Kind:
    """Returns a record of class `kind` from its fields as JSON; unknown fields are ignored."""
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in known})


def build_rank(data: Mapping[str, Any]) -> RankFacts:
    """Returns a RankFacts, with its CudaView, from its fields as JSON."""
    cuda = data.get("cuda")
    return build(RankFacts, {**data, "cuda": None if cuda is None else build(CudaView, cuda)})


def build_host(data: Mapping[str, Any]) -> HostFacts:
    """Returns a HostFacts, with its GPUs and their users, from its fields as JSON."""
    gpus = [build(Gpu, gpu) for gpu in data.get("gpus", ())]
    users = [build(GpuUser, user) for user in data.get("gpu_users", ())]
    return build(HostFacts, {**data, "gpus": gpus, "gpu_users": users})
