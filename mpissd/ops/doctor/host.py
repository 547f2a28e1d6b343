"""Gathers the facts of a host and of a process that need neither MPI nor CUDA."""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import sys
import time
from pathlib import Path

from mpissd.engine.backend.numpy_backend import available_memory_bytes
from mpissd.ops.doctor.child import ASK_S, ask
from mpissd.ops.doctor.facts import CLOCK_SOURCE, CudaView, HostFacts, build
from mpissd.ops.doctor.smi import read_gpus, read_links, read_users

_READINGS = 2000  # readings of the clock, to time one
# The names of the function that returns the number of threads, in builds of OpenBLAS and in MKL.
_THREADS = (
    "scipy_openblas_get_num_threads64_ scipy_openblas_get_num_threads openblas_get_num_threads64_ "
    "openblas_get_num_threads MKL_Get_Max_Threads"
).split()


def read_host(cores: int | None) -> HostFacts:
    """Returns the facts of this host; called before any of its ranks opens a GPU.

    cores: the number of cores on which its ranks may run.
    """
    gpus, error = read_gpus()
    files, locked = _limits()
    return HostFacts(
        host=socket.gethostname(),
        cores=cores,
        memory_free=available_memory_bytes(),
        memory_limit=control_group_bytes(),
        shm_free=_space("/dev/shm"),
        clock_source=_text(Path(CLOCK_SOURCE)),
        clock_ns=_clock_ns(),
        watch_error=watch_error(),
        open_files=files,
        locked_bytes=locked,
        gpus=gpus,
        gpu_error=error,
        gpu_users=read_users() if gpus else [],
        links=read_links() if len(gpus) > 1 else {},
    )


def read_cuda(local_rank: int, timeout_s: float = 3 * ASK_S) -> CudaView:
    """Returns what CuPy sees. A child asks it, because an import may crash and a driver hang."""
    program = [sys.executable, "-m", "mpissd.engine.backend.cupy_facts", str(local_rank)]
    answer = ask(program, timeout_s)
    if answer.problem:
        return CudaView(error=answer.problem)
    try:
        return build(CudaView, json.loads(answer.out.splitlines()[-1]))
    except (ValueError, IndexError):
        return CudaView(error=f"no answer: {answer.out[-200:]!r}")


def control_group_bytes(root: str = "/sys/fs/cgroup") -> int | None:
    """Returns the bytes that this container's control group still allows; None without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        texts = _text(Path(root, limit)), _text(Path(root, used))
        if all(text.isdigit() for text in texts) and int(texts[0]) < 1 << 60:
            return max(0, int(texts[0]) - int(texts[1]))
    return None


def blas_threads(maps: str = "/proc/self/maps") -> int | None:
    """Returns the number of threads of the BLAS in this process; None where it is unknown."""
    for path in sorted(set(re.findall(r"(/\S*(?:openblas|mkl_rt)\S*)$", _text(Path(maps)), re.M))):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in _THREADS:
            if hasattr(library, name):
                return int(getattr(library, name)())
    return None


def peek(pid: int, address: int, count: int) -> bytes | None:
    """Returns `count` bytes of another process's memory, read as MPI reads large messages.

    None where that is not permitted.
    """

    class Span(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "process_vm_readv"):
        return None
    here = ctypes.create_string_buffer(count)
    local, remote = Span(ctypes.addressof(here), count), Span(address, count)
    one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
    read = library.process_vm_readv
    read.restype = ctypes.c_ssize_t
    done = read(ctypes.c_int(pid), ctypes.byref(local), one, ctypes.byref(remote), one, zero)
    return here.raw if done == count else None


def watch_error() -> str:
    """Returns what the warden (mpissd.ops.warden) lacks on this host; "" where it lacks nothing."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0mpissd-doctor-{os.getpid()}")
    except AttributeError as error:
        return f"no Linux: {error}"
    except OSError as error:
        return f"pidfd_open or an abstract socket: {error.strerror}"
    return ""


def _space(path: str) -> int | None:
    """Returns the free bytes of the file system at `path`; None if the path does not exist."""
    try:
        system = os.statvfs(path)
    except OSError:
        return None
    if not system.f_blocks:  # a file system without storage, such as /proc
        return None
    return system.f_bavail * system.f_frsize


def free_space(path: str) -> int | None:
    """Returns the free bytes where a path is, or would be created; None if unknown."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return _space(str(folder))


def _limits() -> tuple[int | None, int | None]:
    """Returns the limits (open files, locked bytes); None where unlimited or unknown."""
    if sys.platform == "win32":
        return None, None
    import resource

    limits = []
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
        soft = resource.getrlimit(kind)[0]
        limits.append(None if soft == resource.RLIM_INFINITY else soft)
    return limits[0], limits[1]


def _clock_ns() -> float:
    """Returns how many ns one reading of the clock takes."""
    begun = time.perf_counter_ns()
    for _ in range(_READINGS):
        time.perf_counter_ns()
    return (time.perf_counter_ns() - begun) / _READINGS


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
