"""Small matrix products written in LLVM's vectors, which Numba functions call as intrinsics.

A *tile* is the product of `rows` vectors with a block of columns. Its sums stay in registers, and
each sum adds along the depth in order, one fused multiply-add at a time. A row's numbers therefore
depend neither on the other rows nor on the block's width. A tile branches to code that is compiled
for its number of rows, 1 to MOST_ROWS.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic


class Tiles(NamedTuple):
    """An instruction set's vector registers, and the width of blocks of columns that suits them."""

    lanes: int  # floats of a register
    registers: int
    width: int  # number of columns of a block of bfloat16 weights


# AVX2 has narrow blocks, which tiles read in one pass: several passes halve its speed.
# Block widths were measured on AVX-512 and AVX2 (docs/performance.md), not on NEON or SSE.
TILES = {
    "avx512": Tiles(lanes=16, registers=32, width=64),
    "avx2": Tiles(lanes=8, registers=16, width=16),
    "neon": Tiles(lanes=4, registers=32, width=16),
    "sse": Tiles(lanes=4, registers=16, width=16),
}
MOST_ROWS = 6  # the most rows of x that one tile multiplies
AHEAD = 2048  # number of words by which prefetches run ahead of reads
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
# The processor's features by LLVM's names; a setting of Numba may replace the detected ones.
_GIVEN = numba.config.CPU_FEATURES
_SIGNED = get_host_cpu_features() if _GIVEN is None else _GIVEN
FEATURES = {signed[1:]: signed[0] == "+" for signed in _SIGNED.split(",") if signed}
HAS_VNNI = bool(FEATURES.get("avx512vnni") or FEATURES.get("avxvnni"))
# Without the feature fast-dpwssd (LLVM 20 or later), LLVM splits the instruction VPDPWSSD in two.
if HAS_VNNI and binding.llvm_version_info[0] >= 20:
    FEATURES["fast-dpwssd"] = True
    numba.config.CPU_FEATURES = ",".join("-+"[has] + name for name, has in FEATURES.items())


def host() -> str:
    """Returns this processor's instruction set, a key of TILES."""
    if binding.get_process_triple().startswith(("aarch64", "arm64")):
        return "neon"
    if FEATURES.get("avx512bw"):
        return "avx512"
    return "avx2" if all(map(FEATURES.get, ("avx2", "fma", "f16c"))) else "sse"


HOST = host()
LANES, REGISTERS, WIDTH = TILES[HOST]
VECTOR = ir.VectorType(F32, LANES)


def columns(rows: int, width: int) -> int:
    """Returns how many vectors of columns a tile of `rows` rows sums at once, so that the registers
    hold the sums, one input's weights (a vector at a time for a single row) and an input. width:
    the block's columns."""
    count = width // LANES
    while count > 1 and rows * count + (count if rows > 1 else 1) >= REGISTERS:
        count //= 2
    return count


def at(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    return builder.gep(pointer, [index], inbounds=True)


def load(builder: ir.IRBuilder, pointer: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(builder.bitcast(pointer, ir.PointerType(kind)), align=align)


def store(builder: ir.IRBuilder, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, ir.PointerType(VECTOR)), align=4)


def splat(builder: ir.IRBuilder, value: Any) -> Any:
    """Emits a vector whose elements are all equal to `value`."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    mask = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, mask)


def prefetch(builder: ir.IRBuilder, pointer: Any, words: int) -> None:
    """Emits prefetches of the cache lines of `words` 32-bit words from `pointer` on."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for word in range(0, words, 16):
        place = builder.bitcast(at(builder, pointer, I64(word)), ir.PointerType(I8))
        builder.call(function, [place, I32(0), I32(2), I32(1)])


def multiply_add(module: ir.Module, kind: Any, suffix: str) -> Any:
    """Returns LLVM's a · b + c for the type named `suffix`, fused if the processor can do so."""
    signature = ir.FunctionType(kind, [kind] * 3)
    return cgutils.get_or_insert_function(module, signature, f"llvm.fmuladd.{suffix}")


def _weights(
    builder: ir.IRBuilder, kind: str, pointer: Any, ahead: Any, count: int
) -> list[list[Any]]:
    """Emits the loads of one step's weights; returns `count` float32 vectors for each input of the
    step. kind: "float", with one input a step, or "bfloat16", with two inputs, in the low and the
    high half of a 32-bit word. In bfloat16, the weights `ahead` words further on are prefetched."""
    places = [at(builder, pointer, I64(LANES * c)) for c in range(count)]
    if kind == "float":
        return [[load(builder, place, VECTOR) for place in places]]
    prefetch(builder, at(builder, pointer, ahead), count * LANES)
    integers = ir.VectorType(I32, LANES)
    words = [load(builder, place, integers) for place in places]
    low = [builder.shl(word, ir.Constant(integers, [16] * LANES)) for word in words]
    high = [builder.and_(word, ir.Constant(integers, [0xFFFF0000] * LANES)) for word in words]
    return [[builder.bitcast(word, VECTOR) for word in depth] for depth in (low, high)]


def _sums(
    builder: ir.IRBuilder,
    kind: str,
    weights: tuple[Any, Any, Any],
    inputs: list[Any],
    steps: Any,
    starts: list[Any],
) -> list[Any]:
    """Emits the loop that adds up the products over all inputs; returns the final sums. weights:
    their address, the number of elements from one step to the next, and the number of words by
    which the prefetch runs ahead. inputs: each row's address. steps: the number of steps, at least
    one. starts: the initial sums by row."""
    entry = builder.block
    loop, end = (builder.append_basic_block(part) for part in ("loop", "end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(I64)
    sums = [builder.phi(VECTOR) for _ in starts]
    pointer, stride, ahead = weights
    count = len(starts) // len(inputs)
    added = [*sums]
    here = at(builder, pointer, builder.mul(step, stride))
    depths = _weights(builder, kind, here, ahead, count)
    fma = multiply_add(builder.module, VECTOR, f"v{LANES}f32")
    for depth, vectors in enumerate(depths):
        column = builder.add(builder.mul(step, I64(len(depths))), I64(depth))
        for m, row in enumerate(inputs):
            value = splat(builder, builder.load(at(builder, row, column)))
            for c in range(m * count, (m + 1) * count):
                added[c] = builder.call(fma, [vectors[c - m * count], value, added[c]])
    after = builder.add(step, I64(1))
    for phi, start, next_ in zip([step, *sums], [I64(0), *starts], [after, *added], strict=True):
        phi.add_incoming(start, entry)
        phi.add_incoming(next_, loop)
    builder.cbranch(builder.icmp_signed("<", after, steps), loop, end)
    builder.position_at_end(end)
    return added


def kernel(module: ir.Module, kind: str, rows: int, count: int) -> Any:
    """Makes the LLVM function that adds one tile's product to y [rows, count vectors]. kind:
    "float" or "bfloat16", the type of the weights. The function's arguments: the addresses weights,
    x and y; the number of steps; the strides of weights, x and y; the words prefetched ahead."""
    name = f"tile_{kind}_{rows}_{count}"
    if name in module.globals:
        return module.globals[name]
    floats = ir.PointerType(F32)
    arguments = [floats if kind == "float" else ir.PointerType(I32), floats, floats, *[I64] * 5]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    weights, x, y, steps, stride, x_stride, y_stride, ahead = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    inputs = [at(builder, x, builder.mul(I64(m), x_stride)) for m in range(rows)]
    outputs = [at(builder, y, builder.mul(I64(m), y_stride)) for m in range(rows)]
    places = [at(builder, row, I64(c * LANES)) for row in outputs for c in range(count)]
    starts = [load(builder, place, VECTOR) for place in places]
    sums = _sums(builder, kind, (weights, stride, ahead), inputs, steps, starts)
    for value, place in zip(sums, places, strict=True):
        store(builder, value, place)
    builder.ret_void()
    return function


def by_rows(builder: ir.IRBuilder, rows: Any, most_rows: int) -> Iterator[int]:
    """Emits a branch on the value `rows`. For each number that is yielded, the caller emits the
    code that runs for that number of rows."""
    done = builder.append_basic_block("done")
    switch = builder.switch(rows, done)
    for count in range(1, most_rows + 1):
        block = builder.append_basic_block(f"rows{count}")
        switch.add_case(I64(count), block)
        with builder.goto_block(block):
            yield count
            builder.branch(done)
    builder.position_at_end(done)


@intrinsic(prefer_literal=True)
def tile(typing, array, width, rows, weights, x, y, steps, stride, x_stride, y_stride, ahead):
    """Adds to y [rows, width] the product of x with one block of a weight; both are float32.

    array: any array of the weight's type: float32 [steps, stride], or uint32, which holds bfloat16
    of two inputs in a word. width: a literal for float32; for uint32 it is WIDTH. weights, x, y:
    addresses; x is [rows, depth]. A stride is the distance of two rows in elements. ahead: words
    from a read of the weights to the prefetch.
    """
    kind = {types.float32: "float", types.uint32: "bfloat16"}[array.dtype]
    size = WIDTH if kind == "bfloat16" else width.literal_value

    def code(context, builder, signature, args):
        _, _, rows, weights, x, y, *counts = args
        element = I32 if kind == "bfloat16" else F32
        weights = builder.inttoptr(weights, ir.PointerType(element))
        x, y = (builder.inttoptr(part, ir.PointerType(F32)) for part in (x, y))
        for m in by_rows(builder, rows, MOST_ROWS):
            count = columns(m, size)
            function = kernel(builder.module, kind, m, count)
            for first in range(0, size, count * LANES):
                place, to = (at(builder, part, I64(first)) for part in (weights, y))
                builder.call(function, [place, x, to, *counts])
        return context.get_dummy_value()

    return types.void(array, width, *[types.intp] * 9), code


@intrinsic
def fma(typing, a, b, c):
    """Returns a · b + c (float32), with one rounding where the processor can do so."""

    def code(context, builder, signature, args):
        return builder.call(multiply_add(builder.module, F32, "f32"), args)

    return types.float32(types.float32, types.float32, types.float32), code


@intrinsic
def as_float(typing, bits):
    """Returns the float32 that has these 32 bits."""

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
    """Returns the largest of `count` float32 at an address; count is a multiple of 16."""

    def code(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.PointerType(F32))
        best = builder.alloca(VECTOR)
        store(builder, load(builder, pointer, VECTOR), best)
        with cgutils.for_range_slice(builder, I64(0), args[1], I64(LANES)) as (index, _):
            here = load(builder, at(builder, pointer, index), VECTOR)
            old = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", here, old), here, old), best)
        vector = builder.load(best)
        top = builder.extract_element(vector, I32(0))
        for lane in range(1, LANES):
            here = builder.extract_element(vector, I32(lane))
            top = builder.select(builder.fcmp_ordered(">", here, top), here, top)
        return top

    return types.float32(types.intp, types.intp), code
