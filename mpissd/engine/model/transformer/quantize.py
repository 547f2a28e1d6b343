"""Eight-bit weights: blocks of 32 along the inputs, each with a 16-bit scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError

BLOCK = 32
Floats = NDArray[np.float32]


def quantize(
    matrix: Floats, dither: Floats | None = None
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Returns int8 [outputs, inputs] and its scales, float16 [outputs, inputs / 32].

    A weight is its integer times its block's scale, which makes the largest of the block ±127.
    dither: float32 [outputs, inputs] in [0, 1): x is rounded up where that is less than x − ⌊x⌋, to
    x on average over a uniform dither (stochastic rounding: 1502.02551, section 3); default: to
    nearest.
    """
    outputs, inputs = matrix.shape
    if inputs % BLOCK:
        raise ConfigError(f"{inputs} inputs of a matrix: allowed: multiples of {BLOCK}")
    blocks = np.asarray(matrix, np.float32).reshape(outputs, inputs // BLOCK, BLOCK)
    tiny = np.finfo(np.float16).tiny
    scales = np.maximum(np.abs(blocks).max(-1) / 127, tiny).astype(np.float16)
    scaled = blocks / scales[..., None].astype(np.float32)
    if dither is None:
        scaled = np.rint(scaled)
    else:
        below = np.floor(scaled)
        scaled = below + (dither.reshape(blocks.shape) < scaled - below)
    return np.clip(scaled, -127, 127).astype(np.int8).reshape(outputs, inputs), scales


def dequantize(matrix: NDArray[np.int8], scales: NDArray[np.float16]) -> Floats:
    """Returns the float32 values of quantised weights."""
    outputs, inputs = matrix.shape
    blocks = matrix.reshape(outputs, inputs // BLOCK, BLOCK).astype(np.float32)
    return np.asarray(blocks * scales[..., None].astype(np.float32)).reshape(outputs, inputs)
