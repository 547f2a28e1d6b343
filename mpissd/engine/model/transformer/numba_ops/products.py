"""Packed bfloat16 weights, and products with them in float32."""

from __future__ import annotations

import numpy as np
from numba import njit

from mpissd.engine.model.transformer.numba_ops.vectors import (
    MOST_ROWS,
    WIDTH,
    as_bits,
    float_tile_16,
    float_tile_64,
    weight_tile,
)

JIT = {"cache": True, "error_model": "numpy", "boundscheck": False, "nogil": True}
AHEAD = 2048  # distance, in words, by which prefetches run ahead of reads
BLOCK = 64  # columns to which activations are padded: a multiple of every block's


@njit(**JIT)
def rounded(value):
    """Returns the bfloat16 (as a uint32 below 2¹⁶) nearest to a float32, ties to even."""
    bits = as_bits(value)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@njit(**JIT)
def pack(matrix, first, packed):
    """Writes matrix, float32 [outputs, inputs], into the outputs from `first` of a packed weight.

    packed: uint32 [blocks, ⌈inputs / 2⌉, WIDTH]; the lower half of a word is the even input.
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
def groups_of(rows):
    """Returns the number of even groups of at most MOST_ROWS in which `rows` are computed."""
    return (rows + MOST_ROWS - 1) // MOST_ROWS


@njit(**JIT)
def clear(array, rows):
    """Sets the first rows of a matrix to 0."""
    for row in range(rows):
        for column in range(array.shape[1]):
            array[row, column] = 0


@njit(**JIT)
def product(x, packed, out, rows):
    """Sets out[:rows] = x[:rows] · weightᵀ; `packed` is the weight as `pack` writes it.

    If the number of inputs is odd, x has one more column, of zeros. out has at least WIDTH · blocks
    columns. A block of the weight is read from memory once for all groups of rows; while the last
    group is computed, the next block is fetched.
    """
    blocks, pairs, _ = packed.shape
    groups, depth, width = groups_of(rows), x.shape[1], out.shape[1]
    clear(out, rows)
    base, source, to = np.int64(packed.ctypes.data), x.ctypes.data, out.ctypes.data
    for block in range(blocks):
        for group in range(groups):
            start, stop = group * rows // groups, (group + 1) * rows // groups
            weight_tile(
                stop - start,
                base + block * pairs * WIDTH * 4,
                np.int64(source) + start * depth * 4,
                np.int64(to) + (start * width + block * WIDTH) * 4,
                pairs,
                WIDTH,
                depth,
                width,
                AHEAD if groups == 1 or group < groups - 1 else pairs * WIDTH,
            )


@njit(**JIT)
def float_product(x, first, count, depth, weights, stride, out, width):
    """Adds to out [count, width] the product of rows of x with float32 weights.

    x: [rows, columns], of which `count` rows from `first` and `depth` columns are read. weights,
    out: addresses; a row of weights has `stride` elements. width: a multiple of 16.
    """
    groups, columns = groups_of(count), x.shape[1]
    for group in range(groups):
        start, stop = group * count // groups, (group + 1) * count // groups
        rows, source = stop - start, np.int64(x.ctypes.data) + (first + start) * columns * 4
        to, column = out + start * width * 4, 0
        while column + 64 <= width:
            at = column * 4
            float_tile_64(rows, weights + at, source, to + at, depth, stride, columns, width, 0)
            column += 64
        while column < width:
            at = column * 4
            float_tile_16(rows, weights + at, source, to + at, depth, stride, columns, width, 0)
            column += 16
