"""The CPU backend, with products in float32; tests compare the other backends with it."""

import platform
import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.backend.base import Backend, Cost, DeviceInfo, Program, WeightPart, element

Floats = NDArray[np.float32]


class HostProgram(Program):
    """A forward as a Python function (the body). A launch calls it and returns after its end."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body
        self._start = self._end = 0.0

    def launch(self) -> None:
        self._start = time.perf_counter()
        self._body()
        self._end = time.perf_counter()

    def done(self) -> bool:
        return True

    def elapsed_s(self) -> float:
        return self._end - self._start

    def after_s(self, earlier: Program) -> float:
        assert isinstance(earlier, HostProgram)
        return self._start - earlier._end


class NumpyBackend(Backend):
    """The backend on NumPy arrays; weights are [in, out] in C order."""

    name = "numpy"
    itemsize = 4
    dtype_name = "float32"

    def __init__(self) -> None:
        self.info = DeviceInfo(
            name=_reported("cpuinfo", "model name") or platform.machine(),
            kind="cpu",
            memory_bytes=available_memory_bytes(),
            cache_bytes=last_level_cache_bytes(),
        )

    def weight(self, parts: Sequence[WeightPart]) -> Floats:
        return np.ascontiguousarray(np.concatenate([part.values() for part in parts], axis=1))

    def activation(self, rows: int, width: int) -> Floats:
        return np.full((rows, width), np.nan, np.float32)

    def table(self, entries: int, width: int, key: int) -> Floats:
        return element(key, np.arange(entries), np.arange(width))

    def gather(self, table: Any, tokens: Any, out: Any) -> None:
        np.take(table, tokens % len(table), axis=0, out=out)

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        np.matmul(x, weight, out=out)

    def read(self, num_bytes: int) -> Callable[..., None]:
        cache = np.ones(max(1, num_bytes // 4), np.float32)

        def read_first(count: int = num_bytes) -> None:
            cache[: max(1, count // 4)].max()

        return read_first

    def top_k(self, values: Any, k: int, out_ids: Any, out_values: Any) -> None:
        if k == 1:
            out_ids[:, 0] = np.argmax(values, axis=1)
        else:
            out_ids[...] = np.argsort(-values, axis=1, kind="stable")[:, :k]
        out_values[...] = np.take_along_axis(values, out_ids, axis=1)

    def top_buffers(self, rows: int, k: int) -> tuple[Any, Any]:
        return np.full((rows, k), -1, np.int32), np.full((rows, k), np.nan, np.float32)

    def read_out(self, ids: Any, host: Any) -> None:
        host[: ids.size] = ids.reshape(-1)

    def program(
        self, body: Callable[[], None], cost: Cost, *, capturable: bool = True
    ) -> HostProgram:
        return HostProgram(body)

    def to_host(self, array: Any) -> Any:
        return np.array(array)

    def from_host(self, values: Any, out: Any) -> None:
        out[...] = values

    def read_bandwidth(self, num_bytes: int) -> float | None:
        """Returns the bytes a second of the fastest read, by NumPy's max, of a buffer of num_bytes
        (at most 4 GB). The reads, at least 4 and at most 100,000, add up to about 1 GB."""
        buffer = np.ones(max(1, min(num_bytes, 4 * 10**9) // 4), np.float32)
        count = min(10**5, max(4, -(-(10**9) // buffer.nbytes)))
        return buffer.nbytes / _fastest_s(buffer.max, count)

    def peak_flops(self) -> float | None:
        """Returns the operations a second of the fastest of 10 to 100 products of square matrices,
        whose side is the largest power of two with a product of at most about 5 ms."""

        def fastest(side: int, count: int) -> float:
            x = np.full((side, side), 0.5, np.float32)
            out = np.empty((side, side), np.float32)
            multiply = partial(np.matmul, x, x.copy(), out=out)
            multiply()  # The first call loads the BLAS library.
            return _fastest_s(multiply, count)

        side = 256
        once_s = fastest(256, 20)  # 20 calls, as other processes may disturb some.
        while 8 * once_s <= 5e-3:
            once_s = fastest(2 * side, 1)
            side = 2 * side
        count = max(10, min(100, int(0.05 / once_s)))
        return float(2 * side**3 / min(once_s, fastest(side, count)))


def _fastest_s(operation: Callable[[], object], count: int) -> float:
    """Returns the seconds of the fastest of `count` calls, the one that was disturbed least."""
    return min(timeit.repeat(operation, timer=time.perf_counter, number=1, repeat=count))


def _reported(file: str, name: str) -> str:
    """Returns the value of the first line of /proc/`file` that begins with `name`, or ""."""
    with suppress(OSError):
        for line in Path("/proc", file).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def available_memory_bytes() -> int | None:
    """Returns the bytes of memory available without swapping; None if the system doesn't tell."""
    kilobytes = _reported("meminfo", "MemAvailable")
    return int(kilobytes.split()[0]) * 1024 if kilobytes else None


def last_level_cache_bytes() -> int | None:
    """Returns the size in bytes of a core's last-level cache; None if the system does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)  # The unit is KiB.
    return max(sizes, default=None)
