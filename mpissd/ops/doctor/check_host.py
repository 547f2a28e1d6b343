"""Checks each host: cores, threads, memory, limits, the watch and the clock."""

from __future__ import annotations

from collections.abc import Iterator

from mpissd.ops.doctor.facts import CLOCK_SOURCE, Facts
from mpissd.ops.doctor.finding import Finding, ok, ok_if, warn

_MIB, _GIB = 1 << 20, 1 << 30
_SHM_A_RANK = 32 * _MIB  # shared memory of MPI and NCCL for each rank
_FILES_A_RANK, _FILES = 32, 256
_LOCKED = 64 * _MIB  # memory that a network card (InfiniBand) locks for transfers
_GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase")
_CLOCK_NS = 500.0


def check_cores(facts: Facts) -> Iterator[Finding]:
    """Finds hosts with fewer cores than ranks, and ranks whose GPU is on another NUMA node."""
    for host in facts.hosts:
        ranks = facts.of_host(host.host)
        if not host.cores or not ranks:
            continue
        detail = f"{host.cores} for {len(ranks)} rank{'s' * (len(ranks) != 1)} on {host.host}"
        fix = (
            "ranks share cores, so times are noisy: ask for more (--cpus-per-task), or a smaller TP"
        )
        yield ok_if(host.cores >= len(ranks), "cores", detail, fix)
        for rank in ranks:
            far = rank.gpu_numa is not None and rank.core_numa is not None
            if far and rank.gpu_numa not in (rank.core_numa or ()):
                yield warn(
                    "NUMA",
                    f"rank {rank.rank}'s GPU is on node {rank.gpu_numa}, its cores on "
                    f"{rank.core_numa}",
                    "bind ranks near their GPUs: mpirun --map-by numa, or none: --bind-to none",
                )


def check_threads(facts: Facts) -> Iterator[Finding]:
    """Finds hosts whose NumPy uses more threads than cores, which slowed a 2.7 ms round to 104."""
    for host in facts.hosts:
        threads = [rank.blas_threads or 1 for rank in facts.of_host(host.host)]
        if not threads or not host.cores:
            continue
        detail = f"{max(threads)} a rank, {sum(threads)} in all on {host.cores} cores"
        fits = sum(threads) <= max(host.cores, len(threads))
        yield ok_if(fits, "BLAS threads", detail, f"export {_CAPS} (or start by launch/local.sh)")


_CAPS = "OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_NUM_THREADS=1"


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Finds a small /dev/shm, which local ranks share, and ranks that cannot read each other."""
    for host in facts.hosts:
        ranks = facts.of_host(host.host)
        if len(ranks) < 2:
            continue
        if host.shm_free is None:
            yield warn("/dev/shm", f"none on {host.host}", "mount -t tmpfs tmpfs /dev/shm")
        elif host.shm_free < _SHM_A_RANK * len(ranks):
            detail = f"{_size(host.shm_free)} free on {host.host} for {len(ranks)} ranks"
            need = -(-_SHM_A_RANK * len(ranks) // _GIB)
            yield warn("/dev/shm", detail, f"docker run --shm-size={need}g, or remove old files")
        else:
            yield ok("/dev/shm", f"{_size(host.shm_free)} free on {host.host}")
        blocked = [rank.rank for rank in ranks if rank.reads_neighbour is False]
        if blocked:
            yield warn(
                "single copy",
                f"rank {blocked[0]} may not read its neighbour's memory (process_vm_readv)",
                "export MPIR_CVAR_CH4_CMA_ENABLE=0 (MPICH), or docker run "
                "--cap-add=SYS_PTRACE; Open MPI copies twice by itself",
            )
        elif any(rank.reads_neighbour for rank in ranks):
            yield ok("single copy", f"ranks of {host.host} read each other's memory")


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Finds limits of open files, and of locked memory between hosts, that are too low."""
    several = len(facts.hosts) > 1
    for host in facts.hosts:
        need = _FILES + _FILES_A_RANK * len(facts.of_host(host.host))
        if host.open_files is not None:
            detail, fix = f"{host.open_files} on {host.host}", f"ulimit -n {max(1024, need)}"
            yield ok_if(host.open_files >= need, "open files", detail, fix)
        if several and host.locked_bytes is not None and host.locked_bytes < _LOCKED:
            yield warn(
                "locked memory",
                f"{_size(host.locked_bytes)} on {host.host}, and the ranks span "
                f"{len(facts.hosts)} hosts",
                "ulimit -l unlimited (InfiniBand pins its buffers)",
            )


def check_watch(facts: Facts) -> Iterator[Finding]:
    """Finds hosts on which the warden would see a dead rank late or could not name it."""
    for host in facts.hosts:
        if host.watch_error:
            yield warn(
                "watch",
                f"{host.watch_error} on {host.host}: a dead rank may be seen late or not be named",
                "Linux >= 5.3; in a container: docker run --security-opt seccomp=unconfined",
            )


def check_clock(facts: Facts) -> Iterator[Finding]:
    """Finds a clock whose reading takes a system call; every phase of a round reads it."""
    for host in facts.hosts:
        if host.clock_ns is None:
            continue
        detail = (
            f"{host.clock_source or 'unknown'}, {host.clock_ns:.0f} ns a reading on {host.host}"
        )
        known = not host.clock_source or host.clock_source in _GOOD_CLOCKS
        fix = f"as root: echo tsc > {CLOCK_SOURCE}"
        yield ok_if(known and host.clock_ns < _CLOCK_NS, "clock", detail, fix)


def check_host_memory(facts: Facts) -> Iterator[Finding]:
    """Finds hosts with too little memory for their ranks' weights, with the NumPy backend."""
    session = facts.session
    if session is None or session.error or session.backend != "numpy":
        return
    for host in facts.hosts:
        need = sum(session.needs[rank.rank] for rank in facts.of_host(host.host))
        detail = f"{_size(need)} for the weights on {host.host}"
        if host.memory_free is not None:
            detail += f", {_size(host.memory_free)} free"
        if host.memory_limit is not None and need + _GIB > host.memory_limit:
            fix = "ask for more memory (--mem, docker run --memory), a larger TP or another PAIR"
            yield warn("memory", f"{detail}, {_size(host.memory_limit)} left to this job", fix)
        else:
            yield ok("memory", detail)


def _size(count: int) -> str:
    """Returns a number of bytes as text, in GB or MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
