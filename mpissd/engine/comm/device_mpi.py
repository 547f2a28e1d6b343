"""All-reduces by MPI on device pointers, used only if asked for and after a trial.

An MPI that cannot read device memory ends in a segfault. Three conditions have to hold before this
job's MPI gets a device pointer:
1. the user asked for it (--cuda_aware_mpi);
2. the library claims it: by MPIX_Query_cuda_support (Open MPI, MPICH), by MPIX_GPU_query_support
   (MPICH 4), or Cray MPICH by MPICH_GPU_SUPPORT_ENABLED=1;
3. two ranks of a separate job on this host exchange a device buffer and find what was sent:
       mpirun -np 2 python -m mpissd.engine.comm.device_mpi
   The lead starts that job. Its environment lacks everything that this job's launcher set, or it
   would become a part of this job. It has to end with exit code 0 within a minute, or half of
   --deadline_s if that is less. A segfault there costs this job one line.

Of device-aware MPI only nonblocking sends and receives of bytes are used. A rank sends its array to
all others and sums what it received in rank order, so that all ranks get the same bits.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.common.errors import ConfigError
from mpissd.common.wait import Waiter
from mpissd.engine.comm.device_needs import Device
from mpissd.engine.comm.group import Group

TRIAL_DEADLINE_S = 60.0
_LAUNCHER = tuple(
    "OMPI_ PMIX_ PMI_ PRTE_ MPI_LOCAL HYDRA_ HYDI_ PALS_ MPIEXEC_ SLURM_ PBS_ FLUX_".split()
)
_FRAMEWORKS = "accelerator btl coll mtl opal plm pml rmaps".split()
_USER = (  # Variables that a user or a site may set; the trial job gets them, too.
    "OMPI_ALLOW_RUN_AS_ROOT",
    "PMIX_MCA_",
    "PRTE_MCA_",
    *(f"OMPI_MCA_{framework}" for framework in _FRAMEWORKS),
)
_TRIAL = ("-m", "mpi4py", "-m", __name__)
_TERM_S = 10.0
_REASON_BYTES = 512
_ALTERNATIVES = "allowed: nccl, staged, auto"


class DeviceMpiGroup(Group):
    """The group that exchanges device arrays by MPI and sums them on the device in float32."""

    name = "device"
    capturable = False

    def __init__(self, device: Device, comm: MPI.Comm, waiter: Waiter) -> None:
        super().__init__(comm.size, comm.rank)
        self._device, self._comm, self._waiter = device, comm, waiter
        self._slots: dict[tuple[int, ...], Any] = {}

    def all_reduce(self, array: Any) -> None:
        slots = self._slots_for(array)
        self._device.flush()
        with self._device.stream:
            slots[self.rank] = array
            self._exchange(slots)
            array[...] = slots.sum(axis=0, dtype=np.float32)

    def all_gather(self, local: Any, gathered: Any) -> None:
        slots = gathered.reshape(self.size, *local.shape)
        self._device.flush()
        with self._device.stream:
            slots[self.rank] = local
            self._exchange(slots)

    def _exchange(self, slots: Any) -> None:
        """Sends slots[rank] to all others and receives theirs.

        Waits for the stream first, because MPI does not follow CUDA streams.
        """
        self._waiter.until(self._device.fence(), "forward, up to an all-reduce")
        peers = [peer for peer in range(self.size) if peer != self.rank]
        requests = [self._comm.Irecv([slots[peer], MPI.BYTE], peer) for peer in peers]
        requests += [self._comm.Isend([slots[self.rank], MPI.BYTE], peer) for peer in peers]
        self._waiter.until(lambda: MPI.Request.Testall(requests), "device all-reduce")

    def _slots_for(self, array: Any) -> Any:
        if array.shape not in self._slots:
            empty = array[np.newaxis].repeat(self.size, axis=0)
            self._slots[array.shape] = empty
        return self._slots[array.shape]


def open_device_mpi(device: Device, comm: MPI.Comm, waiter: Waiter) -> DeviceMpiGroup:
    """Opens the group after the lead's checks. Collective.

    Raises ConfigError on every rank where device-aware MPI is not claimed or fails its trial.
    """
    deadline_s = min(TRIAL_DEADLINE_S, waiter.deadline_s / 2)  # The other ranks wait meanwhile.
    reason = refusal(deadline_s) if comm.rank == 0 else None
    line = np.zeros(_REASON_BYTES, np.uint8)
    text = (reason or "").encode()[:_REASON_BYTES]
    line[: len(text)] = np.frombuffer(text, np.uint8)
    waiter.until(comm.Ibcast(line).Test, "the trial of device-aware MPI")
    if line.any():
        raise ConfigError(bytes(line).rstrip(b"\0").decode(errors="replace"))
    return DeviceMpiGroup(device, comm, waiter)


def refusal(deadline_s: float) -> str | None:
    """Returns why MPI must not get device pointers, or None. Runs the trial job."""
    if not claims_cuda():
        return f"--cuda_aware_mpi: {vendor()} says it is not; {_ALTERNATIVES}"
    if why := trial(deadline_s):
        return f"--cuda_aware_mpi: {vendor()} says it is, but {why}; {_ALTERNATIVES}"
    return None


def vendor() -> str:
    """Returns the MPI library's name and version, for example "Open MPI 4.1.6"."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def claims_cuda(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the loaded MPI library claims to read device memory."""
    if environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        return True
    for path in loaded_mpi_libraries():
        library = ctypes.CDLL(path)
        if hasattr(library, "MPIX_Query_cuda_support"):
            return bool(library.MPIX_Query_cuda_support())
        if hasattr(library, "MPIX_GPU_query_support"):
            supported = ctypes.c_int(0)
            library.MPIX_GPU_query_support(0, ctypes.byref(supported))  # 0: MPIX_GPU_SUPPORT_CUDA
            return bool(supported.value)
    return False


def loaded_mpi_libraries() -> list[str]:
    """Returns the paths of the MPI libraries in this process's memory; none without /proc."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if ".so" in line}
    except OSError:
        return []
    names = ("libmpi.so", "libmpich.so", "libmpi_", "libmpi-")
    return sorted(path for path in paths if os.path.basename(path).startswith(names))


def trial(deadline_s: float, program: Sequence[str] = _TRIAL) -> str | None:
    """Runs the trial job; returns why it failed, or None. program: arguments of Python."""
    launcher = shutil.which("mpirun") or shutil.which("mpiexec")
    if launcher is None:
        return "there is no mpirun to try it with"
    command = [launcher, "-np", "2", sys.executable, *program]
    quiet = subprocess.DEVNULL
    job = subprocess.Popen(
        command, env=scrubbed(os.environ), stdin=quiet, stdout=quiet, stderr=quiet
    )
    try:
        code = job.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return f"an exchange between two ranks took over {deadline_s:.0f} s"
    finally:
        stop(job)
    return f"an exchange between two ranks ended {code}" if code else None


def stop(job: subprocess.Popen[bytes]) -> None:
    """Ends a job, which may be over. A SIGTERM comes first: it has mpirun end its ranks."""
    job.terminate()
    try:
        job.wait(_TERM_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without what a launcher sets; a user's own settings stay."""
    return {
        key: value
        for key, value in environ.items()
        if key.startswith(_USER) or not key.startswith(_LAUNCHER)
    }


def exchange() -> int:
    """Exchanges a device buffer with the other rank of the trial job; returns the exit code."""
    import cupy

    comm = MPI.COMM_WORLD
    if comm.size != 2:
        return 1
    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    mine = cupy.full(1 << 16, comm.rank + 1, np.float16)
    theirs = cupy.zeros_like(mine)
    cupy.cuda.Device().synchronize()
    peer = 1 - comm.rank
    comm.Sendrecv([mine, MPI.BYTE], peer, 0, [theirs, MPI.BYTE], peer, 0)
    return 0 if bool((theirs == peer + 1).all()) else 1


if __name__ == "__main__":
    sys.exit(exchange())
