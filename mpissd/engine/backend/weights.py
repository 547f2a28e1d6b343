"""Random weight values: a hash of (key, row, column), which is the same on every backend.

A shard on T ranks therefore holds exactly the values of the whole matrix, so that T = 2 can be
compared with T = 1 element by element, and NumPy can check what a GPU holds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.backend.base import WeightPart

# Multipliers of the two coordinates and the finaliser's constants (MurmurHash3's fmix32).
ROW_PRIME, COLUMN_PRIME = 0x9E3779B1, 0x85EBCA77
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35
_SQRT_12 = np.float32(12.0**0.5)  # A uniform variable on [-½, ½) has standard deviation 1/√12.


def element(key: int, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns the matrix `key` at these rows and columns: float32 [rows, columns], uniform,
    variance 1."""
    mask = np.uint64(0xFFFFFFFF)
    r = (rows.astype(np.uint64) * np.uint64(ROW_PRIME)) & mask
    c = (columns.astype(np.uint64) * np.uint64(COLUMN_PRIME)) & mask
    h = ((r[:, None] ^ c[None, :]) ^ np.uint64(key & 0xFFFFFFFF)).astype(np.uint32)
    for shift, factor in ((16, MIX_1), (13, MIX_2)):
        h ^= h >> np.uint32(shift)
        h *= np.uint32(factor)
    h ^= h >> np.uint32(16)
    # 24 bits are exact in float32, so host and device agree to the last bit.
    uniform = (h >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
    return np.asarray(uniform * _SQRT_12, np.float32)


def part(spec: WeightPart) -> NDArray[np.float32]:
    """Returns the values of one part, float32 [in, out], scaled to its standard deviation."""
    rows = np.arange(spec.in_start, spec.in_stop, dtype=np.int64)
    columns = np.arange(spec.out_start, spec.out_stop, dtype=np.int64)
    return np.asarray(element(spec.key, rows, columns) * np.float32(spec.scale), np.float32)
