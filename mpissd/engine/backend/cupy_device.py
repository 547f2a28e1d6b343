"""One GPU as CuPy sees it: its identity, memory and events, captured programs and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import cupy
import numpy as np
from cupy.cuda import runtime

from mpissd.common.errors import ConfigError, FaultError
from mpissd.engine.backend.base import DeviceInfo, Program, WeightPart
from mpissd.engine.backend.chain_plan import PAIR, TILE, pack, suits, unpack
from mpissd.engine.backend.kernels import ceil_div

_NOT_READY = 600  # The error code cudaErrorNotReady.
HALF = np.dtype(np.float16)
Launch = Callable[..., None]


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


class CupyProgram(Program):
    """A captured graph of a body, or the body itself if it cannot be captured.

    It keeps the body, and so the buffers that the graph reads, alive.
    """

    def __init__(
        self, stream: Any, body: Callable[[], None], capture: bool, stop: Any = (0,)
    ) -> None:
        """Takes `stop`: a launch raises FaultError once a kernel has set stop[0], having given up a
        wait."""
        self._stream, self._body, self._stop = stream, body, stop
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        # The first run loads kernels, connects peers and allocates, which a capture must not do.
        body()
        stream.synchronize()
        self._graph = captured(stream, body) if capture else None

    @property
    def captured(self) -> bool:
        """Whether launches replay a graph."""
        return self._graph is not None

    def launch(self) -> None:
        self._start.record(self._stream)
        if self._graph is None:
            self._body()
        else:
            self._graph.launch(self._stream)
        self._end.record(self._stream)

    def done(self) -> bool:
        if not reached(self._end):
            return False
        if self._stop[0]:
            raise FaultError(
                "GPU: a forward waited in vain for another rank, or for its own blocks"
            )
        return True

    def elapsed_s(self) -> float:
        return float(cupy.cuda.get_elapsed_time(self._start, self._end)) / 1e3

    def after_s(self, earlier: Program) -> float:
        assert isinstance(earlier, CupyProgram)
        return float(cupy.cuda.get_elapsed_time(earlier._end, self._start)) / 1e3

    def close(self) -> None:
        """Destroys the graph; a later launch runs the body."""
        self._graph = None


def captured(stream: Any, body: Callable[[], None]) -> Any:
    """Captures what `body` enqueues and returns the graph; the capture ends even if the body
    fails."""
    with stream:
        stream.begin_capture()
        try:
            body()
        finally:  # A capture left open would make the stream unusable.
            graph = stream.end_capture()
    graph.upload(stream)
    return graph


@dataclass(frozen=True)
class Weight:
    """A weight: row-major [in, out], or packed in the chain's order in an array of that shape."""

    values: Any
    packed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out), for either order."""
        rows, columns = self.values.shape
        return rows, columns

    def row_major(self, values: Any) -> Any:
        """Converts this weight's host copy to row-major order."""
        return unpack(values) if self.packed else values

    def in_order(self, values: Any) -> Any:
        """Converts row-major host values to this weight's order."""
        return pack(values) if self.packed else values


def made(parts: Sequence[WeightPart], packs: bool, launch: Launch) -> Weight:
    """Makes one weight from these parts, side by side.

    packs: whether to store it in the chain's order if its shape allows it.
    """
    rows = parts[0].in_stop - parts[0].in_start
    widths = [part.out_stop - part.out_start for part in parts]
    values = device_empty((rows, sum(widths)), HALF)
    packed = packs and suits(rows, sum(widths)) and all(width % TILE == 0 for width in widths)
    column = 0
    for part, width in zip(parts, widths, strict=True):
        if packed:
            _fill_packed(launch, values.data.ptr + values.itemsize * rows * column, part)
        else:
            fill(launch, values[:, column : column + width], part)
        column += width
    return Weight(values, packed)


def fill(launch: Launch, out: Any, part: WeightPart) -> None:
    """Fills a row-major array with the values of a part."""
    rows, columns = out.shape
    grid = (ceil_div(columns, 8 * 32), min(ceil_div(rows, 8), 65535))
    sizes = (np.int32(rows), np.int32(columns))
    key, first, scale = _numbers(part)
    launch("fill", grid, (32, 8), (out, np.int64(step(out)), key, *first, *sizes, scale))


def _fill_packed(launch: Launch, address: int, part: WeightPart) -> None:
    rows, columns = part.in_stop - part.in_start, part.out_stop - part.out_start
    lanes = rows * columns // 8
    key, (row, column), scale = _numbers(part)
    halves = key, column, key, np.uint32(column + TILE // 2)
    widths = np.int32(columns), np.int32(columns - TILE // 2), np.int32(TILE)
    sizes = np.int64(lanes), np.int32(rows // PAIR), np.int32(rows)
    args = (np.uintp(address), *sizes, row, *halves, *widths, scale)
    launch("pack_random", (min(ceil_div(lanes, 256), 1 << 16),), (256,), args)


def _numbers(part: WeightPart) -> tuple[Any, tuple[Any, Any], Any]:
    first = (np.uint32(part.in_start), np.uint32(part.out_start))
    return np.uint32(part.key & 0xFFFFFFFF), first, np.float32(part.scale)
