"""Packed weights of the CPU, bfloat16 or int8, and products with them in float32.

int8 weights are read as they lie in the file: half the bytes of bfloat16, and none of its rounding.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from mpissd.engine.model.transformer.checkpoint import Floats
from mpissd.engine.model.transformer.numba_ops.tiles import (
    AHEAD,
    GROUP,
    INT8_WIDTH,
    MOST_ROWS,
    WIDTH,
    as_bits,
    tile,
)

JIT = {"cache": True, "error_model": "numpy", "boundscheck": False, "nogil": True}
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


def pack_int8(weights: NDArray[np.int8], scales: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Returns packed values, int8 [blocks, inputs, INT8_WIDTH], and scales, float32 [blocks,
    inputs / 32, INT8_WIDTH].

    weights: [outputs, inputs], inputs a multiple of 32. scales: [outputs, inputs / 32].
    """
    outputs, inputs = weights.shape
    blocks = -(-outputs // INT8_WIDTH)
    rest = ((0, blocks * INT8_WIDTH - outputs), (0, 0))
    values = np.pad(weights, rest).reshape(blocks, INT8_WIDTH, inputs)
    factors = np.pad(scales, rest).reshape(blocks, INT8_WIDTH, inputs // GROUP)
    return (
        np.ascontiguousarray(values.transpose(0, 2, 1)),
        np.ascontiguousarray(factors.transpose(0, 2, 1), np.float32),
    )


@njit(**JIT)
def clear(array, rows):
    """Sets the first rows of a matrix to 0."""
    for row in range(rows):
        for column in range(array.shape[1]):
            array[row, column] = 0


@njit(**JIT)
def product(x, packed, scales, out, rows):
    """Sets out[:rows] = x[:rows] · weightᵀ; packed: as `pack` or `pack_int8` writes it.

    scales: of int8; bfloat16 reads none. If the number of inputs is odd, x has one more column, of
    zeros. out has at least a column for each of the blocks'. Rows are computed in even groups of at
    most MOST_ROWS. A block of the weight is read from memory once for all groups; while the last
    one is computed, the next block is fetched.
    """
    blocks, steps, width = packed.shape
    size, scale_size, ahead = steps * width * packed.itemsize, 0, steps * width
    if packed.itemsize == 1:
        steps //= GROUP
        scale_size = steps * width * 4
    groups, depth, columns = (rows + MOST_ROWS - 1) // MOST_ROWS, x.shape[1], out.shape[1]
    clear(out, rows)
    base, factors = np.int64(packed.ctypes.data), np.int64(scales.ctypes.data)
    source, to = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    for block in range(blocks):
        for group in range(groups):
            start, stop = group * rows // groups, (group + 1) * rows // groups
            tile(
                packed,
                width,
                stop - start,
                base + block * size,
                factors + block * scale_size,
                source + start * depth * 4,
                to + (start * columns + block * width) * 4,
                steps,
                width,
                depth,
                columns,
                AHEAD if groups == 1 or group < groups - 1 else ahead,
            )


@njit(**JIT)
def float_product(x, first, count, depth, weights, stride, out, width):
    """Adds to out [count, width] the product of rows of x with float32 weights.

    x: [rows, columns], of which `count` rows from `first` and `depth` columns are read. weights,
    out: addresses; a row of weights has `stride` elements. width: a multiple of 16.
    """
    groups, columns = (count + MOST_ROWS - 1) // MOST_ROWS, x.shape[1]
    for group in range(groups):
        start, stop = group * count // groups, (group + 1) * count // groups
        rows, source = stop - start, np.int64(x.ctypes.data) + (first + start) * columns * 4
        to, column = out + start * width * 4, 0
        while column < width:
            at, end = weights + column * 4, to + column * 4
            if column + 64 <= width:
                tile(x, 64, rows, at, at, source, end, depth, stride, columns, width, 0)
                column += 64
            else:
                tile(x, 16, rows, at, at, source, end, depth, stride, columns, width, 0)
                column += 16
