"""Packed int8 weights whose groups of 32 inputs share a scale, and products with them in float32.

They are read as they lie in the file: half the bytes of bfloat16, and none of its rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from mpissd.engine.model.transformer.checkpoint import Floats
from mpissd.engine.model.transformer.numba_ops.products import AHEAD, JIT, clear, groups_of
from mpissd.engine.model.transformer.numba_ops.vectors import (
    F32,
    I32,
    I64,
    INT8_WIDTH,
    LANES,
    VECTOR,
    add_products,
    at,
    by_rows,
    columns,
    load,
    multiply_add,
    prefetch,
    store,
)

GROUP = 32  # inputs that share a scale
_BYTE = ir.IntType(8)
_FAR = 2 * AHEAD  # bytes from the read to the prefetch


def pack(weights: NDArray[np.int8], scales: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Returns a weight's packed values and scales, as `product` reads them.

    weights: [outputs, inputs], inputs a multiple of 32. scales: [outputs, inputs / 32].
    """
    outputs, inputs = weights.shape
    blocks, groups = -(-outputs // INT8_WIDTH), inputs // GROUP
    rest = ((0, blocks * INT8_WIDTH - outputs), (0, 0))
    values = np.pad(weights, rest).reshape(blocks, INT8_WIDTH, groups, GROUP)
    factors = np.pad(scales, rest).reshape(blocks, INT8_WIDTH, groups)
    return (
        np.ascontiguousarray(values.transpose(0, 2, 3, 1)),
        np.ascontiguousarray(factors.transpose(0, 2, 1), np.float32),
    )


def _signed(builder: ir.IRBuilder, pointer: Any, count: int) -> list[list[Any]]:
    """Returns `count` vectors of int8 weights of one depth as floats, as a list of one depth."""
    bytes_, words = ir.VectorType(_BYTE, LANES), ir.VectorType(I32, LANES)
    prefetch(builder, at(builder, pointer, I64(_FAR)), 1)
    vectors = []
    for c in range(count):
        place = builder.bitcast(at(builder, pointer, I64(c * LANES)), ir.PointerType(bytes_))
        whole = builder.sext(builder.load(place, align=1), words)
        vectors.append(builder.sitofp(whole, VECTOR))
    return [vectors]


def _kernel(module: ir.Module, rows: int, count: int) -> Any:
    """Returns the function (weights, scales, x, y, groups, strides of x and y) of one tile.

    A group's products add up in order from 0, and their sum enters y times the group's scale. There
    is at least one group.
    """
    name = f"tile_int8_{rows}_{count}"
    if name in module.globals:
        return module.globals[name]
    floats = ir.PointerType(F32)
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(_BYTE), *[floats] * 3, *[I64] * 3])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    weights, scales, x, y, groups, x_stride, y_stride = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    inputs = [at(builder, x, builder.mul(I64(m), x_stride)) for m in range(rows)]
    outputs = [at(builder, y, builder.mul(I64(m), y_stride)) for m in range(rows)]
    places = [at(builder, row, I64(c * LANES)) for row in outputs for c in range(count)]
    with cgutils.for_range_slice(builder, I64(0), groups, I64(1)) as (group, _):
        first = builder.mul(group, I64(GROUP))
        sums = _group(builder, weights, inputs, first, count)
        scale = at(builder, scales, builder.mul(group, I64(INT8_WIDTH)))
        _enter(builder, sums, scale, places, count)
    builder.ret_void()
    return function


def _group(
    builder: ir.IRBuilder, weights: Any, inputs: list[Any], first: Any, count: int
) -> list[Any]:
    """Emits the loop over a group's inputs from `first`; returns the sums after it."""
    start = builder.block
    loop, end = (builder.append_basic_block(part) for part in ("inputs", "summed"))
    builder.branch(loop)
    builder.position_at_end(loop)
    step, sums = builder.phi(I64), [builder.phi(VECTOR) for _ in range(len(inputs) * count)]
    depth = builder.add(first, step)
    here = at(builder, weights, builder.mul(depth, I64(INT8_WIDTH)))
    found = add_products(builder, _signed(builder, here, count), inputs, depth, sums)
    after = builder.add(step, I64(1))
    zeros = [I64(0), *[ir.Constant(VECTOR, [0.0] * LANES)] * len(sums)]
    for phi, none, value in zip([step, *sums], zeros, [after, *found], strict=True):
        phi.add_incoming(none, start)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", after, I64(GROUP)), loop, end)
    builder.position_at_end(end)
    return found


def _enter(
    builder: ir.IRBuilder, sums: list[Any], scale: Any, places: list[Any], count: int
) -> None:
    """Adds the sums, times the scales of their `count` vectors of columns, to those at `places`."""
    factors = [load(builder, at(builder, scale, I64(c * LANES)), VECTOR) for c in range(count)]
    fma = multiply_add(builder.module, VECTOR, f"v{LANES}f32")
    for n, (value, place) in enumerate(zip(sums, places, strict=True)):
        old = load(builder, place, VECTOR)
        store(builder, builder.call(fma, [value, factors[n % count], old]), place)


@intrinsic
def tile(typing, rows, weights, scales, x, y, groups, x_stride, y_stride):
    """Adds to y [rows, INT8_WIDTH] the product of x with one block of a packed weight.

    All arguments are integers, as for vectors.weight_tile. weights: int8 [groups, 32,
    INT8_WIDTH]. scales: float32 [groups, INT8_WIDTH]. x: float32 [rows, 32 · groups].
    """

    def code(context, builder, signature, args):
        rows, weights, scales, x, y, *counts = args
        weights = builder.inttoptr(weights, ir.PointerType(_BYTE))
        scales, x, y = (builder.inttoptr(part, ir.PointerType(F32)) for part in (scales, x, y))

        def call(m: int) -> None:
            count = columns(m, INT8_WIDTH)
            kernel = _kernel(builder.module, m, count)
            for first in range(0, INT8_WIDTH, count * LANES):
                parts = (at(builder, part, I64(first)) for part in (weights, scales))
                builder.call(kernel, [*parts, x, at(builder, y, I64(first)), *counts])

        return by_rows(context, builder, rows, call)

    return types.void(*[types.intp] * 8), code


@njit(**JIT)
def product(x, packed, scales, out, rows):
    """Sets out[:rows] = x[:rows] · weightᵀ, for a weight of `pack` (see products.product)."""
    blocks, count, _, _ = packed.shape
    groups, depth, width = groups_of(rows), x.shape[1], out.shape[1]
    clear(out, rows)
    base, factors = np.int64(packed.ctypes.data), np.int64(scales.ctypes.data)
    source, to = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    for block in range(blocks):
        for group in range(groups):
            start, stop = group * rows // groups, (group + 1) * rows // groups
            tile(
                stop - start,
                base + block * count * GROUP * INT8_WIDTH,
                factors + block * count * INT8_WIDTH * 4,
                source + start * depth * 4,
                to + (start * width + block * INT8_WIDTH) * 4,
                count,
                depth,
                width,
            )
