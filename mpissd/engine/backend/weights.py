"""Random weight values: a hash of (key, row, column), which is the same on every backend.

A shard on T ranks therefore holds exactly the values of the whole matrix, so that T = 2 can be
compared with T = 1 element by element, and NumPy can check a GPU's values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.backend.base import WeightPart

# Multipliers of the row and of the column; constants of fmix32, the last step of MurmurHash3.
ROW_PRIME, COLUMN_PRIME = 0x9E3779B1, 0x85EBCA77
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35
_SQRT_12 = np.float32(12.0**0.5)  # A uniform variable on [-½, ½) has standard deviation 1/√12.

_CACHED = 1 << 17  # elements made at once, which stay in a core's cache


def element(key: int, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns the matrix `key` at these rows and columns: float32 [rows, columns], uniform,
    variance 1."""
    r = rows.astype(np.uint32) * np.uint32(ROW_PRIME) ^ np.uint32(key & 0xFFFFFFFF)
    c = columns.astype(np.uint32) * np.uint32(COLUMN_PRIME)
    values = np.empty((len(r), len(c)), np.float32)
    step = max(1, _CACHED // max(1, len(c)))
    for start in range(0, len(r), step):
        h, out = r[start : start + step, None] ^ c, values[start : start + step]
        for shift, factor in ((16, MIX_1), (13, MIX_2)):
            h ^= h >> np.uint32(shift)
            h *= np.uint32(factor)
        h ^= h >> np.uint32(16)
        # 24 bits are exact in float32, so host and device agree to the last bit.
        np.multiply(h >> np.uint32(8), np.float32(2.0**-24), out=out, casting="unsafe")
        out -= np.float32(0.5)
        out *= _SQRT_12
    return values


def part(spec: WeightPart) -> NDArray[np.float32]:
    """Returns the values of one part, float32 [in, out], scaled to its standard deviation."""
    rows = np.arange(spec.in_start, spec.in_stop, dtype=np.int64)
    columns = np.arange(spec.out_start, spec.out_stop, dtype=np.int64)
    return np.asarray(element(spec.key, rows, columns) * np.float32(spec.scale), np.float32)
