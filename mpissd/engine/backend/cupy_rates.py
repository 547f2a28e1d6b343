"""Measures a GPU's memory bandwidth and peak arithmetic with the backend's own kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from cupy.cuda import runtime

from mpissd.engine.backend.cupy_device import HALF, CupyProgram, Weight, device_empty
from mpissd.engine.backend.kernels import ceil_div

# Bytes of one timed sample, and of its buffer at most.
_MIN_SAMPLE_BYTES, _MAX_READ_BYTES = 4 << 30, 4 * 10**9
_SAMPLES, _WARM_UP_S = 7, 0.05
_SQUARES, _PEAK_S = (8192, 4096, 2048, 1024), 0.03


def read_bandwidth(backend: Any, num_bytes: int) -> float:
    """Measures reading a buffer of num_bytes (at most 4 GB, or half of the free memory) repeatedly.

    Takes the median of seven samples of at least 4 GiB each, timed by events, after a warm-up of 50
    ms: after memory was allocated or freed, an H200 read at 3.9 TB/s for some milliseconds, and at
    4.5 TB/s from then on.
    """
    room = min(_MAX_READ_BYTES, runtime.memGetInfo()[0] // 2)
    size = max(16, min(num_bytes, room) // 16 * 16)
    passes = ceil_div(_MIN_SAMPLE_BYTES, size)
    body = partial(backend.read_words, backend.random_words(size), size, passes)
    program = CupyProgram(backend.stream, body, capture=True)
    return float(size * passes / _median_s(backend, program))


def peak_flops(backend: Any) -> float | None:
    """Measures a square float16 product, of side 8192 if memory allows; None if 1024 does not fit.

    It is launched for 30 ms (at least three times) and timed by events. The fastest launch counts,
    because chips slow down when they get hot.
    """
    # Half of the free memory, for x, the weight and the output.
    room = runtime.memGetInfo()[0] // 2
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


def _median_s(backend: Any, program: CupyProgram) -> float:
    """Returns the median seconds of _SAMPLES launches, after a warm-up."""
    warm_s = 0.0
    while warm_s < _WARM_UP_S:
        warm_s += _timed_s(backend, program)
    return float(np.median([_timed_s(backend, program) for _ in range(_SAMPLES)]))


def _timed_s(backend: Any, program: CupyProgram) -> float:
    program.launch()
    backend.synchronize()
    return program.elapsed_s()
