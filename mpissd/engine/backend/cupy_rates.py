"""What a GPU's memory and its arithmetic give at most, measured by the backend's own kernels."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import numpy as np
from cupy.cuda import runtime

from mpissd.engine.backend.cupy_device import ceil_div, device_empty
from mpissd.engine.backend.cupy_program import CupyProgram
from mpissd.engine.backend.cupy_weight import HALF, Weight

_MIN_SAMPLE_BYTES, _MAX_READ_BYTES = 4 << 30, 4 * 10**9  # of one timed sample; of its buffer
_SAMPLES, _WARM_UP_S = 7, 0.05
_SQUARES, _PEAK_S = (8192, 4096, 2048, 1024), 0.03
_MIB = 1 << 20


class Rated(Protocol):
    """What is measured of a backend."""

    stream: Any

    @property
    def capture(self) -> bool: ...
    def random_words(self, num_bytes: int) -> Any: ...
    def read_words(self, buffer: Any, num_bytes: int, passes: int) -> None: ...
    def table(self, entries: int, width: int, key: int) -> Any: ...
    def matmul(self, x: Any, weight: Weight, out: Any) -> None: ...
    def synchronize(self) -> None: ...


def read_bandwidth(backend: Rated, num_bytes: int) -> float:
    """Reads a buffer of num_bytes (at most 4 GB, or half of what is free) again and again.

    Seven samples of at least 4 GiB each, timed by events; bytes over the median. Warmed up for
    50 ms: after memory was allocated or freed an H200 read at 3.9 TB/s for some milliseconds,
    and at 4.5 from then on.
    """
    room = min(_MAX_READ_BYTES, runtime.memGetInfo()[0] // 2)
    size = max(16, min(num_bytes, room) // 16 * 16)
    passes = ceil_div(_MIN_SAMPLE_BYTES, size)
    body = partial(backend.read_words, backend.random_words(size), size, passes)
    program = CupyProgram(backend.stream, body, capture=True)
    return float(size * passes / _median_s(backend, program))


def copy_bandwidth(backend: Rated, num_bytes: int) -> float:
    """As read_bandwidth, by copies of half a buffer (of at most 4 GB) onto its other half.

    Of whole MiB: an H200 copied 928 MiB at 4.26 TB/s, and 10^9 bytes at 2.76.
    """
    half = min(num_bytes, _MAX_READ_BYTES, runtime.memGetInfo()[0] // 2) // 2
    half = max(16, half // _MIB * _MIB or half // 16 * 16)
    passes = ceil_div(_MIN_SAMPLE_BYTES, 2 * half)
    source, to = backend.random_words(half), device_empty((half,), np.uint8)
    operands = (to.data.ptr, source.data.ptr, half, runtime.memcpyDeviceToDevice)

    def copy() -> None:
        for _ in range(passes):
            runtime.memcpyAsync(*operands, backend.stream.ptr)

    program = CupyProgram(backend.stream, copy, capture=True)
    return float(2 * half * passes / _median_s(backend, program))


def peak_flops(backend: Rated) -> float | None:
    """A square product of float16, of 8192 if there is room; None where 1024 is too much.

    Launched for 30 ms (three times at least), timed by events; the fastest, as chips slow down
    when they get hot.
    """
    room = runtime.memGetInfo()[0] // 2  # for x, weight and out
    side = next((n for n in _SQUARES if 3 * n * n * HALF.itemsize <= room), None)
    if side is None:
        return None
    x, weight = backend.table(side, side, 1), Weight(backend.table(side, side, 2))
    body = partial(backend.matmul, x, weight, device_empty((side, side), HALF))
    program = CupyProgram(backend.stream, body, capture=backend.capture)
    seconds = [_timed_s(backend, program)]
    while sum(seconds) < _PEAK_S or len(seconds) < 3:
        seconds.append(_timed_s(backend, program))
    return float(2 * side**3 / min(seconds))


def _median_s(backend: Rated, program: CupyProgram) -> float:
    """Of some launches, after a warm-up."""
    warm_s = 0.0
    while warm_s < _WARM_UP_S:
        warm_s += _timed_s(backend, program)
    return float(np.median([_timed_s(backend, program) for _ in range(_SAMPLES)]))


def _timed_s(backend: Rated, program: CupyProgram) -> float:
    program.launch()
    backend.synchronize()
    return program.elapsed_s()
