"""Small matrix products written in LLVM's vectors, which Numba functions call as intrinsics.

One *tile* is a product of `rows` vectors with a block of columns. Its sums stay in registers, and
each sum adds along the depth in order, one fused multiply-add at a time. A row's numbers therefore
depend neither on the other rows nor on the block's width. Rows are compile-time constants (1 …
MOST_ROWS): a tile branches to the code for its number of rows.
"""

from __future__ import annotations

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


# A narrow block is read once, cache line by cache line, by a tile of any number of rows. Tiles of
# many rows read a wide block in parts, and each part skips the cache lines of the others, which
# halves the speed on AVX2. int8 needs more arithmetic for fewer bytes, and a tile of one row needs
# four independent sums. Measured on AVX-512 and AVX2 (docs/performance.md), not on NEON or SSE.
TILES = {
    "avx512": Tiles(lanes=16, registers=32, width=64, int8_width=64),
    "avx2": Tiles(lanes=8, registers=16, width=16, int8_width=32),
    "neon": Tiles(lanes=4, registers=32, width=16, int8_width=32),
    "sse": Tiles(lanes=4, registers=16, width=16, int8_width=32),
}
MOST_ROWS = 6  # the most rows of one tile
GROUP = 32  # inputs of an int8 weight that share a scale
AHEAD = 2048  # distance, in words, by which prefetches run ahead of reads
_FAR = 2 * AHEAD  # the same for int8 weights, in bytes
I8, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()


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


def _at(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    return builder.gep(pointer, [index], inbounds=True)


def _load(builder: ir.IRBuilder, pointer: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(builder.bitcast(pointer, ir.PointerType(kind)), align=align)


def _store(builder: ir.IRBuilder, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, ir.PointerType(VECTOR)), align=4)


def _prefetch(builder: ir.IRBuilder, pointer: Any, count: int) -> None:
    """Asks for the cache lines of `count` vectors at an address."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for c in range(0, count * LANES, 16):
        place = builder.bitcast(_at(builder, pointer, I64(c)), ir.PointerType(I8))
        builder.call(function, [place, I32(0), I32(2), I32(1)])


def _multiply_add(module: ir.Module, kind: Any, suffix: str) -> Any:
    """Returns LLVM's function a · b + c, which is fused where the processor can do so."""
    signature = ir.FunctionType(kind, [kind] * 3)
    return cgutils.get_or_insert_function(module, signature, f"llvm.fmuladd.{suffix}")


def _weights(
    builder: ir.IRBuilder, kind: str, pointer: Any, ahead: Any, count: int
) -> list[list[Any]]:
    """Returns the weights that lie at one step, for each of its depths `count` vectors of float32.

    "float": float32. "bfloat16": two depths, whose bits are the low and the high half of a 32-bit
    word. "int8": one byte a weight. Asks the memory for the weights that lie `ahead` words.
    """
    integers = ir.VectorType(I32, LANES)
    depths: list[list[Any]] = [[], []]
    if kind == "bfloat16":
        _prefetch(builder, _at(builder, pointer, ahead), count)
    if kind == "int8":
        _prefetch(builder, _at(builder, pointer, I64(_FAR)), 1)
    for c in range(count):
        place = _at(builder, pointer, I64(LANES * c))
        if kind == "float":
            depths[0].append(_load(builder, place, VECTOR))
        elif kind == "int8":
            whole = _load(builder, place, ir.VectorType(I8, LANES), align=1)
            depths[0].append(builder.sitofp(builder.sext(whole, integers), VECTOR))
        else:
            word = _load(builder, place, integers)
            low = builder.shl(word, ir.Constant(integers, [16] * LANES))
            high = builder.and_(word, ir.Constant(integers, [0xFFFF0000] * LANES))
            depths[0].append(builder.bitcast(low, VECTOR))
            depths[1].append(builder.bitcast(high, VECTOR))
    return [depth for depth in depths if depth]


def _sums(
    builder: ir.IRBuilder,
    kind: str,
    weights: tuple[Any, Any, Any],
    inputs: list[Any],
    steps: Any,
    starts: list[Any],
) -> list[Any]:
    """Emits the loop that adds products along the depth; returns the sums after it.

    weights: their address, the elements from step to step, and those to the prefetch. inputs: the
    addresses of the rows. steps: at least one. starts: a vector for each row and its columns.
    """
    entry = builder.block
    loop, end = (builder.append_basic_block(part) for part in ("loop", "end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    step, sums = builder.phi(I64), [builder.phi(VECTOR) for _ in starts]
    pointer, stride, ahead = weights
    count, added = len(starts) // len(inputs), [*sums]
    here = _at(builder, pointer, builder.mul(step, stride))
    depths = _weights(builder, kind, here, ahead, count)
    fma = _multiply_add(builder.module, VECTOR, f"v{LANES}f32")
    undefined, zeros = ir.Constant(VECTOR, ir.Undefined), [0] * LANES
    for depth, vectors in enumerate(depths):
        column = builder.add(builder.mul(step, I64(len(depths))), I64(depth))
        for m, row in enumerate(inputs):
            value = builder.load(_at(builder, row, column))
            first = builder.insert_element(undefined, value, I32(0))
            mask = ir.Constant(ir.VectorType(I32, LANES), zeros)
            splat = builder.shuffle_vector(first, undefined, mask)
            for c in range(m * count, (m + 1) * count):
                added[c] = builder.call(fma, [vectors[c - m * count], splat, added[c]])
    after = builder.add(step, I64(1))
    for phi, start, next_ in zip([step, *sums], [I64(0), *starts], [after, *added], strict=True):
        phi.add_incoming(start, entry)
        phi.add_incoming(next_, loop)
    builder.cbranch(builder.icmp_signed("<", after, steps), loop, end)
    builder.position_at_end(end)
    return added


def kernel(module: ir.Module, kind: str, rows: int, count: int) -> Any:
    """Returns the function (weights, scales, x, y, steps, strides of weights, x, y, ahead) of one
    tile, which adds to y [rows, count vectors].

    int8: a step is a group of 32 inputs. Its products add up in order from 0, and their sum enters
    y times the group's scale.
    """
    name = f"tile_{kind}_{rows}_{count}"
    if name in module.globals:
        return module.globals[name]
    floats, element = ir.PointerType(F32), {"float": F32, "bfloat16": I32, "int8": I8}[kind]
    types_ = [ir.PointerType(element), *[floats] * 3, *[I64] * 5]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), types_), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    weights, scales, x, y, steps, stride, x_stride, y_stride, ahead = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    inputs = [_at(builder, x, builder.mul(I64(m), x_stride)) for m in range(rows)]
    outputs = [_at(builder, y, builder.mul(I64(m), y_stride)) for m in range(rows)]
    places = [_at(builder, row, I64(c * LANES)) for row in outputs for c in range(count)]
    if kind != "int8":
        starts = [_load(builder, place, VECTOR) for place in places]
        sums = _sums(builder, kind, (weights, stride, ahead), inputs, steps, starts)
        for value, place in zip(sums, places, strict=True):
            _store(builder, value, place)
        builder.ret_void()
        return function
    fma = _multiply_add(module, VECTOR, f"v{LANES}f32")
    with cgutils.for_range_slice(builder, I64(0), steps, I64(1)) as (group, _):
        first = builder.mul(group, I64(GROUP))
        rest = [_at(builder, row, first) for row in inputs]
        here = _at(builder, weights, builder.mul(first, stride)), stride, ahead
        starts = [ir.Constant(VECTOR, [0.0] * LANES)] * len(places)
        sums = _sums(builder, kind, here, rest, I64(GROUP), starts)
        scale = _at(builder, scales, builder.mul(group, stride))
        factors = [
            _load(builder, _at(builder, scale, I64(c * LANES)), VECTOR) for c in range(count)
        ]
        for n, (value, place) in enumerate(zip(sums, places, strict=True)):
            old = _load(builder, place, VECTOR)
            _store(builder, builder.call(fma, [value, factors[n % count], old]), place)
    builder.ret_void()
    return function


@intrinsic(prefer_literal=True)
def tile(
    typing, array, width, rows, weights, scales, x, y, steps, stride, x_stride, y_stride, ahead
):
    """Adds to y [rows, width] the product of x with one block of a weight, of `array`'s type.

    float32: weights [steps, stride]. uint32: bfloat16 [steps, stride], two depths in a word. int8:
    [steps, 32, stride] with scales float32 [steps, stride]. width: of float32 a literal; a packed
    weight's blocks have their own. Other arguments are integers: weights, scales, x and y are
    addresses, and a stride is the distance of two rows in elements. x: float32 [rows, depth].
    ahead: words from the read to the prefetch.
    """
    kind = {types.float32: "float", types.uint32: "bfloat16", types.int8: "int8"}[array.dtype]
    size = {"bfloat16": WIDTH, "int8": INT8_WIDTH}.get(kind) or width.literal_value

    def code(context, builder, signature, args):
        _, _, rows, weights, scales, x, y, *counts = args
        element = {"float": F32, "bfloat16": I32, "int8": I8}[kind]
        weights = builder.inttoptr(weights, ir.PointerType(element))
        scales, x, y = (builder.inttoptr(part, ir.PointerType(F32)) for part in (scales, x, y))
        done = builder.append_basic_block("done")
        switch = builder.switch(rows, done)
        for m in range(1, MOST_ROWS + 1):
            block = builder.append_basic_block(f"rows{m}")
            switch.add_case(I64(m), block)
            with builder.goto_block(block):
                count = columns(m, size)
                function = kernel(builder.module, kind, m, count)
                for first in range(0, size, count * LANES):
                    both = (_at(builder, part, I64(first)) for part in (weights, scales))
                    builder.call(function, [*both, x, _at(builder, y, I64(first)), *counts])
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(array, width, *[types.intp] * 10), code


@intrinsic
def fma(typing, a, b, c):
    """Returns a · b + c (float32), with one rounding where the processor can do so."""

    def code(context, builder, signature, args):
        return builder.call(_multiply_add(builder.module, F32, "f32"), args)

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
        _store(builder, _load(builder, pointer, VECTOR), best)
        with cgutils.for_range_slice(builder, I64(0), args[1], I64(LANES)) as (index, _):
            here = _load(builder, _at(builder, pointer, index), VECTOR)
            old = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", here, old), here, old), best)
        vector = builder.load(best)
        top = builder.extract_element(vector, I32(0))
        for lane in range(1, LANES):
            here = builder.extract_element(vector, I32(lane))
            top = builder.select(builder.fcmp_ordered(">", here, top), here, top)
        return top

    return types.float32(types.intp, types.intp), code
