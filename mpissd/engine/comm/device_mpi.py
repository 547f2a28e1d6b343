"""All-reduces by MPI on device pointers, used only if asked for.

An MPI that cannot read device memory ends in a segfault. Two conditions have to hold before MPI
gets a device pointer: the user asked for it (--cuda_aware_mpi), and the library claims it, by
MPIX_Query_cuda_support (Open MPI, MPICH), by MPIX_GPU_query_support (MPICH 4), or Cray MPICH by
MPICH_GPU_SUPPORT_ENABLED=1.

Of device-aware MPI only nonblocking sends and receives of bytes are used. A rank sends its array to
all others and sums what it received in rank order, so that all ranks get the same bits.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.common.errors import ConfigError
from mpissd.common.wait import Waiter
from mpissd.engine.comm.group import Device, Group


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
    """Opens the group; raises ConfigError where the MPI library claims no device memory.

    All ranks of a job load one library, so that all raise the same error.
    """
    if not claims_cuda():
        name, version = MPI.get_vendor()
        library = f"{name} {'.'.join(map(str, version))}"
        raise ConfigError(
            f"--cuda_aware_mpi: {library} says it is not; allowed: nccl, staged, auto"
        )
    return DeviceMpiGroup(device, comm, waiter)


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
