"""One GPU as CuPy sees it: its identity, properties, memory and events."""

from __future__ import annotations

import math
from typing import Any
from uuid import UUID

import cupy
import numpy as np
from cupy.cuda import runtime

from mpissd.common.errors import ConfigError, FaultError
from mpissd.engine.backend.base import DeviceInfo

_NOT_READY = 600  # The error code cudaErrorNotReady.


def check_devices(local_rank: int) -> None:
    """Raises ConfigError unless this process sees more than local_rank GPUs."""
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise ConfigError(f"backend 'cupy': no usable GPU ({error}); allowed: numpy") from error
    if local_rank >= count:
        raise ConfigError(
            f"backend 'cupy': {local_rank + 1} ranks on this node (local rank {local_rank}), "
            f"{count} visible GPU(s); allowed: one rank a GPU (--mode=sd --num_drafts=0 drafts on "
            "the target's), or --backend=numpy"
        )


def device_info(device_id: int, properties: dict[str, Any]) -> DeviceInfo:
    """Returns what CUDA reports of a device; memory_bytes: the bytes that are free now."""
    # CuPy reads the UUID as a C string, so a zero byte cuts it short.
    uuid = bytes(properties.get("uuid", b""))[:16]
    return DeviceInfo(
        name=properties["name"].decode(),
        kind="gpu",
        uuid=f"GPU-{UUID(bytes=uuid)}" if len(uuid) == 16 else None,
        bus_id=runtime.deviceGetPCIBusId(device_id),
        memory_bytes=int(runtime.memGetInfo()[0]),
        cache_bytes=int(properties["l2CacheSize"]),
        compute_capability=f"{properties['major']}.{properties['minor']}",
    )


def device_empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns an uninitialised array in its own allocation.

    CuPy's pool is not used, because it rounds sizes up and keeps freed blocks. Raises ConfigError
    if the device is full, with the bytes wanted and free.
    """
    size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
    try:
        memory = cupy.cuda.Memory(size)
    except runtime.CUDARuntimeError as error:
        free = runtime.memGetInfo()[0]
        raise ConfigError(f"GPU memory: {size} bytes wanted, {free} free ({error})") from error
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def step(array: Any) -> int:
    """Returns the elements from one row to the next (the leading dimension)."""
    return max(int(array.strides[0]) // int(array.itemsize), int(array.shape[1]))


def reached(event: Any) -> bool:
    """Returns whether an event is over; raises FaultError if the device has failed meanwhile."""
    status = runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise FaultError(f"GPU: {runtime.CUDARuntimeError(status)}")
    return bool(status == 0)


def ceil_div(value: int, by: int) -> int:
    """Returns value / by, rounded up."""
    return -(-value // by)


def can_access_peers() -> list[list[bool]]:
    """Returns [i][j]: whether GPU i can map GPU j's memory, by the device numbers of this
    process."""
    every = range(int(runtime.getDeviceCount()))
    return [[i == j or bool(runtime.deviceCanAccessPeer(i, j)) for j in every] for i in every]
