"""Facts of a healthy machine: 4 × H200, of which 70b/1b takes T = 2 and D = 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpissd.ops.doctor.facts import (
    Asked,
    CudaView,
    Facts,
    Gpu,
    HostFacts,
    LaunchFacts,
    RankFacts,
    SessionFacts,
)
from mpissd.ops.doctor.smi import parse_gpus, parse_links

SMI = """\
index, uuid, pci.bus_id, name, driver_version, compute_cap, memory.total [MiB], \
memory.free [MiB], persistence_mode, compute_mode, mig.mode.current, \
ecc.errors.uncorrected.volatile.total, clocks.current.sm [MHz], clocks.max.sm [MHz], \
clocks_event_reasons.active
""" + "".join(
    f"{n}, GPU-{n}a1b2c3d-0000-4000-8000-00000000000{n}, 00000000:{bus}:00.0, NVIDIA H200, "
    "580.95.05, 9.0, 143771 MiB, 143156 MiB, Enabled, Default, Disabled, 0, 345 MHz, 1980 MHz, "
    "0x0000000000000001\n"
    for n, bus in enumerate(("18", "2A", "3A", "5D"))
)
TOPO = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tNV18\tNV18\tPXB\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-47,96-143\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t0-47,96-143\t0\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t0-47,96-143\t0\t\tN/A
NIC0\tPXB\tNODE\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
LAUNCH = LaunchFacts(
    python="/home/user/.venv/bin/python",
    python_version="3.12.4",
    mpissd="0.1.0",
    folder="/home/user/mpissd",
    num_ranks=3,
    mpirun="mpirun",
    mpirun_path="/home/user/.venv/bin/mpirun",
    mpirun_version="mpirun (Open MPI) 5.0.11",
    mpi4py="4.1.2",
    library="Open MPI v5.0.11",
    library_path="/home/user/.venv/lib/libmpi.so.40",
    packages={"cupy-cuda13x": "14.0.1", "mpi4py": "4.1.2", "nvidia-nccl-cu13": "2.28.9"},
    out="/home/user/out",
    out_free=10**12,
)


def _cuda(rank: int) -> CudaView:
    gpu = parse_gpus(SMI)[rank]
    return CudaView(
        cupy="14.0.1",
        runtime=13020,
        driver=13000,  # of the same generation: it serves a newer runtime
        nccl=22809,
        nccl_built=22803,
        count=4,
        name=gpu.name,
        uuid=gpu.uuid,
        bus_id=gpu.bus_id.upper(),
        capability="9.0",
        memory_free=143156 << 20,
        memory_total=143771 << 20,
        peers=[[True] * 4] * 4,
    )


RANKS = [
    RankFacts(
        rank=n,
        host="gpu1",
        pid=1000 + n,
        python=LAUNCH.python,
        python_version=LAUNCH.python_version,
        mpissd=LAUNCH.mpissd,
        folder=LAUNCH.folder,
        role=("lead", "target", "draft")[n],
        local_rank=n,
        world_size=3,
        launcher_rank=n,
        launcher_size=3,
        library=LAUNCH.library,
        library_path=LAUNCH.library_path,
        cores=list(range(48)),
        core_numa=[0],
        gpu_numa=0,
        blas_threads=1,
        reads_neighbour=True,
        cuda=_cuda(n),
    )
    for n in range(3)
]
HOST = HostFacts(
    host="gpu1",
    cores=48,
    memory_free=10**12,
    shm_free=10**11,
    clock_source="tsc",
    clock_ns=40.0,
    open_files=65536,
    gpus=parse_gpus(SMI),
    links=parse_links(TOPO),
)
SESSION = SessionFacts(
    backend="cupy",
    device_name="NVIDIA H200",
    all_reduce="oneshot",
    all_reduce_why="the target's GPUs map each other's memory",
    target="llama-3.1-70b",
    draft="llama-3.2-1b",
    needs=[68_500_000_000] * 2 + [1_900_000_000],
    memory=[150_000_000_000] * 3,
)
HEALTHY = Facts(Asked("ssd", "auto", None, 2, 1), LAUNCH, RANKS, [HOST], SESSION, tried=True)


def launch(**changes: Any) -> Facts:
    """Another launching process."""
    return replace(HEALTHY, launch=replace(LAUNCH, **changes))


def host(**changes: Any) -> Facts:
    """Another host."""
    return replace(HEALTHY, hosts=[replace(HOST, **changes)])


def gpu(index: int, **changes: Any) -> Facts:
    """Another GPU, for nvidia-smi."""
    gpus: list[Gpu] = [replace(g, **changes) if g.index == index else g for g in HOST.gpus]
    return host(gpus=gpus)


def ranks(which: int | None = None, **changes: Any) -> Facts:
    """Another rank, or all of them."""
    found = [replace(r, **changes) if which in (None, r.rank) else r for r in RANKS]
    return replace(HEALTHY, ranks=found)


def cuda(which: int | None = None, **changes: Any) -> Facts:
    """What CuPy sees on a rank, or on all of them."""
    found = [
        replace(r, cuda=replace(r.cuda or CudaView(), **changes)) if which in (None, r.rank) else r
        for r in RANKS
    ]
    return replace(HEALTHY, ranks=found)


def session(**changes: Any) -> Facts:
    """Another choice."""
    return replace(HEALTHY, session=replace(SESSION, **changes))


def asked(facts: Facts, **changes: Any) -> Facts:
    """The same machine for another run."""
    return replace(facts, asked=replace(facts.asked, **changes))
