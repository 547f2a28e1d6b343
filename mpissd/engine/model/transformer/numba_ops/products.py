"""Packed bfloat16 weights, and products with them in float32."""

from __future__ import annotations

import numpy as np
from numba import njit

from mpissd.engine.model.transformer.numba_ops.vectors import (
    MOST_ROWS,
    WIDTH,
    as_bits,
    weight_tile,
)

JIT = {"cache": True, "error_model": "numpy", "boundscheck": False, "nogil": True}
AHEAD = 2048  # distance, in words, by which prefetches run ahead of reads


@njit(**JIT)
def rounded(value):
    """Returns the bfloat16 (as a uint32 below 2¹⁶) nearest to a float32, ties to even."""
    bits = as_bits(value)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@njit(**JIT)
def pack(matrix, first, packed):
    """Writes matrix, float32 [outputs, inputs], into the outputs from `first` of a packed weight.

    packed: uint32 [blocks, ⌈inputs / 2⌉, 64]; the lower half of a word is the even input.
    """
    outputs, inputs = matrix.shape
    for output in range(outputs):
        block, column = (first + output) // WIDTH, (first + output) % WIDTH
        for pair in range(inputs // 2):
            low, high = rounded(matrix[output, 2 * pair]), rounded(matrix[output, 2 * pair + 1])
            packed[block, pair, column] = low | (high << np.uint32(16))
        if inputs % 2:
            packed[block, inputs // 2, column] = rounded(matrix[output, inputs - 1])


@njit(**JIT)
def product(x, packed, out, rows, turned):
    """Sets out[:rows] = x[:rows] · weightᵀ, for a weight of `pack`; out has 64 · blocks columns.

    turned: float32 scratch of at least rows · depth. Rows go through the blocks in even groups of
    at most MOST_ROWS, so that a block is read from memory once. While the last group computes, the
    next block is fetched.
    """
    blocks, pairs, _ = packed.shape
    depth, inputs = 2 * pairs, min(2 * pairs, x.shape[1])
    groups = (rows + MOST_ROWS - 1) // MOST_ROWS
    for group in range(groups):
        start, stop = group * rows // groups, (group + 1) * rows // groups
        at = start * depth
        count = stop - start
        for k in range(inputs):
            for row in range(count):
                turned[at + k * count + row] = x[start + row, k]
        for k in range(inputs, depth):
            for row in range(count):
                turned[at + k * count + row] = 0
    base, source, to = packed.ctypes.data, turned.ctypes.data, out.ctypes.data
    width = out.shape[1]
    for block in range(blocks):
        for group in range(groups):
            start, stop = group * rows // groups, (group + 1) * rows // groups
            weight_tile(
                stop - start,
                base + block * pairs * WIDTH * 4,
                source + start * depth * 4,
                to + (start * width + block * WIDTH) * 4,
                pairs,
                WIDTH,
                width,
                AHEAD if groups == 1 or group < groups - 1 else pairs * WIDTH,
            )
