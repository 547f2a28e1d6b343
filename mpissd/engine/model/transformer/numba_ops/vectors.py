"""Small matrix products written in LLVM's vectors, which Numba functions call as intrinsics.

One *tile* is a product of `rows` vectors with a block of columns. Its sums stay in registers, and
each sum adds along the depth in order, one fused multiply-add at a time. A row's numbers therefore
depend neither on the other rows nor on the block's width. Rows are compile-time constants (1 …
MOST_ROWS): a tile branches to the code for its number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


class Tiles(NamedTuple):
    """An instruction set's vector registers, and the blocks of columns that suit them."""

    lanes: int  # floats of a register
    registers: int
    width: int  # columns of a block of bfloat16 weights
    int8_width: int  # columns of a block of int8 weights


# A narrow block is read once, cache line by cache line, by a tile of any number of rows. A wide one
# is read in parts by tiles of many rows, each of which skips the cache lines of the others: on AVX2
# that halves their speed. int8 costs more arithmetic for fewer bytes, and a single row's tile needs
# four independent sums. Measured on AVX-512 and AVX2 (docs/performance.md), not on NEON or SSE.
TILES = {
    "avx512": Tiles(lanes=16, registers=32, width=64, int8_width=64),
    "avx2": Tiles(lanes=8, registers=16, width=16, int8_width=32),
    "neon": Tiles(lanes=4, registers=32, width=16, int8_width=32),
    "sse": Tiles(lanes=4, registers=16, width=16, int8_width=32),
}
MOST_ROWS = 6  # of one tile
I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


def host() -> str:
    """Returns the key in TILES of this processor."""
    if binding.get_process_triple().startswith(("aarch64", "arm64")):
        return "neon"
    features = binding.get_host_cpu_features()
    return "avx512" if features.get("avx512f") else "avx2" if features.get("avx") else "sse"


LANES, REGISTERS, WIDTH, INT8_WIDTH = TILES[host()]
VECTOR = ir.VectorType(F32, LANES)


def columns(rows: int, width: int) -> int:
    """Returns how many vectors of columns a tile of `rows` rows sums at once.

    Their sums, the weights of one depth (a single row uses each at once) and an input fit the
    registers.
    """
    count = width // LANES
    while count > 1 and rows * count + (count if rows > 1 else 1) >= REGISTERS:
        count //= 2
    return count


def at(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    return builder.gep(pointer, [index], inbounds=True)


def _splat(builder: ir.IRBuilder, pointer: Any) -> Any:
    """Returns a vector whose lanes all hold the float at `pointer`."""
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), builder.load(pointer), I32(0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), zeros)


def load(builder: ir.IRBuilder, pointer: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(pointer, ir.PointerType(kind)), align=4)


def store(builder: ir.IRBuilder, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, ir.PointerType(VECTOR)), align=4)


def _floats(builder: ir.IRBuilder, pointer: Any, ahead: Any, count: int) -> list[list[Any]]:
    """Returns `count` vectors of float32 weights of one depth, as a list of one depth."""
    return [[load(builder, at(builder, pointer, I64(LANES * c)), VECTOR) for c in range(count)]]


def _halves(builder: ir.IRBuilder, pointer: Any, ahead: Any, count: int) -> list[list[Any]]:
    """Returns the weights of two depths: each 32-bit word holds the bfloat16 of both.

    Asks the memory for the words that lie `ahead`.
    """
    words = ir.VectorType(I32, LANES)
    prefetch(builder, at(builder, pointer, ahead), count)
    low, high = [], []
    for c in range(count):
        word = load(builder, at(builder, pointer, I64(LANES * c)), words)
        first = builder.shl(word, ir.Constant(words, [16] * LANES))
        second = builder.and_(word, ir.Constant(words, [0xFFFF0000] * LANES))
        low.append(builder.bitcast(first, VECTOR))
        high.append(builder.bitcast(second, VECTOR))
    return [low, high]


def prefetch(builder: ir.IRBuilder, pointer: Any, count: int) -> None:
    """Asks for the cache lines of `count` vectors at an address."""
    byte = ir.PointerType(ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for c in range(0, count * LANES, 16):
        place = builder.bitcast(at(builder, pointer, I64(c)), byte)
        builder.call(function, [place, I32(0), I32(2), I32(1)])


Loader = Callable[[ir.IRBuilder, Any, Any, int], list[list[Any]]]


def _kernel(module: ir.Module, rows: int, count: int, loader: Loader) -> Any:
    """Returns the function (weights, x, y, steps, strides of all three, ahead) of one tile.

    Each step has `count` vectors of columns, and there is at least one. x: [rows, depth]. y: [rows,
    columns], to which the tile adds.
    """
    name = f"tile{loader.__name__}_{rows}_{count}"
    if name in module.globals:
        return module.globals[name]
    floats = ir.PointerType(F32)
    weight_type = floats if loader is _floats else ir.PointerType(I32)
    kind = ir.FunctionType(ir.VoidType(), [weight_type, floats, floats, *[I64] * 5])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    weights, x, y, steps, stride, x_stride, y_stride, ahead = function.args
    entry, loop, end = (function.append_basic_block(part) for part in ("entry", "loop", "end"))
    builder = ir.IRBuilder(entry)
    inputs = [at(builder, x, builder.mul(I64(m), x_stride)) for m in range(rows)]
    outputs = [at(builder, y, builder.mul(I64(m), y_stride)) for m in range(rows)]
    places = [at(builder, row, I64(c * LANES)) for row in outputs for c in range(count)]
    starts = [load(builder, place, VECTOR) for place in places]
    builder.branch(loop)
    builder = ir.IRBuilder(loop)
    step, sums = builder.phi(I64), [builder.phi(VECTOR) for _ in starts]
    here = at(builder, weights, builder.mul(step, stride))
    found = add_products(builder, loader(builder, here, ahead, count), inputs, step, sums)
    after = builder.add(step, I64(1))
    for phi, first, next_ in zip([step, *sums], [I64(0), *starts], [after, *found], strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(next_, loop)
    builder.cbranch(builder.icmp_signed("<", after, steps), loop, end)
    builder = ir.IRBuilder(end)
    for value, place in zip(found, places, strict=True):
        store(builder, value, place)
    builder.ret_void()
    return function


def add_products(
    builder: ir.IRBuilder, depths: list[list[Any]], inputs: list[Any], step: Any, sums: list[Any]
) -> list[Any]:
    """Adds one step's products to the sums, depth by depth; returns the new sums."""
    count, found = len(depths[0]), list(sums)
    first = builder.mul(step, I64(len(depths)))
    fma = multiply_add(builder.module, VECTOR, f"v{LANES}f32")
    for depth, vectors in enumerate(depths):
        column = builder.add(first, I64(depth))
        for m, row in enumerate(inputs):
            value = _splat(builder, at(builder, row, column))
            for c in range(count):
                place = m * count + c
                found[place] = builder.call(fma, [vectors[c], value, found[place]])
    return found


def multiply_add(module: ir.Module, kind: Any, suffix: str) -> Any:
    """Returns LLVM's function a · b + c, which is fused where the processor can do so."""
    signature = ir.FunctionType(kind, [kind] * 3)
    return cgutils.get_or_insert_function(module, signature, f"llvm.fmuladd.{suffix}")


def _emit(context: Any, builder: ir.IRBuilder, args: Any, loader: Loader, width: int) -> Any:
    """Emits the calls of a kernel; args: rows, and the kernel's."""
    rows, weights, x, y, *counts = args
    word = F32 if loader is _floats else I32
    weights = builder.inttoptr(weights, ir.PointerType(word))
    x, y = (builder.inttoptr(part, ir.PointerType(F32)) for part in (x, y))

    def call(m: int) -> None:
        count = columns(m, width)
        kernel = _kernel(builder.module, m, count, loader)
        for first in range(0, width, count * LANES):
            part = at(builder, weights, I64(first)), x, at(builder, y, I64(first))
            builder.call(kernel, [*part, *counts])

    return by_rows(context, builder, rows, call)


def by_rows(context: Any, builder: ir.IRBuilder, rows: Any, emit: Callable[[int], None]) -> Any:
    """Emits the branch over the number of rows, with the code of emit(rows) for each."""
    done = builder.append_basic_block("done")
    switch = builder.switch(rows, done)
    for m in range(1, MOST_ROWS + 1):
        block = builder.append_basic_block(f"rows{m}")
        switch.add_case(I64(m), block)
        with builder.goto_block(block):
            emit(m)
            builder.branch(done)
    builder.position_at_end(done)
    return context.get_dummy_value()


INTEGERS = types.void(*[types.intp] * 9)


@intrinsic
def weight_tile(typing, rows, weights, x, y, steps, stride, x_stride, y_stride, ahead):
    """Adds to y [rows, WIDTH] the product of x with one block of a packed bfloat16 weight.

    All arguments are integers; weights, x and y are addresses, and a stride is the distance of two
    rows in elements. weights: uint32 [steps, WIDTH], two depths in a word. x: float32 [rows, 2 ·
    steps]. ahead: words from the read to the prefetch.
    """

    def code(context, builder, signature, args):
        return _emit(context, builder, args, _halves, WIDTH)

    return INTEGERS, code


@intrinsic
def float_tile_64(typing, rows, weights, x, y, steps, stride, x_stride, y_stride, ahead):
    """Adds to y [rows, 64] the product of x [rows, steps] with float32 weights [steps, 64]."""

    def code(context, builder, signature, args):
        return _emit(context, builder, args, _floats, 64)

    return INTEGERS, code


@intrinsic
def float_tile_16(typing, rows, weights, x, y, steps, stride, x_stride, y_stride, ahead):
    """Adds to y [rows, 16] the product of x [rows, steps] with float32 weights [steps, 16]."""

    def code(context, builder, signature, args):
        return _emit(context, builder, args, _floats, 16)

    return INTEGERS, code


@intrinsic
def fma(typing, a, b, c):
    """Returns a · b + c (float32), with one rounding where the processor can do so."""

    def code(context, builder, signature, args):
        return builder.call(multiply_add(builder.module, F32, "f32"), args)

    return types.float32(types.float32, types.float32, types.float32), code


@intrinsic
def as_float(typing, bits):
    """Returns the float32 of these 32 bits."""

    def code(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), code


@intrinsic
def as_bits(typing, value):
    """Returns the 32 bits of a float32."""

    def code(context, builder, signature, args):
        return builder.bitcast(args[0], I32)

    return types.uint32(types.float32), code


@intrinsic
def block_max(typing, address, count):
    """Returns the largest of `count` (a multiple of 16) float32 at an address."""

    def code(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.PointerType(F32))
        best = builder.alloca(VECTOR)
        store(builder, load(builder, pointer, VECTOR), best)
        with cgutils.for_range_slice(builder, I64(0), args[1], I64(LANES)) as (index, _):
            here = load(builder, at(builder, pointer, index), VECTOR)
            old = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", here, old), here, old), best)
        found = builder.load(best)
        top = builder.extract_element(found, I32(0))
        for lane in range(1, LANES):
            here = builder.extract_element(found, I32(lane))
            top = builder.select(builder.fcmp_ordered(">", here, top), here, top)
        return top

    return types.float32(types.intp, types.intp), code
