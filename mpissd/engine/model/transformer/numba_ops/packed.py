"""Products with weights that stay in ggml's blocks and are unpacked in registers.

A weight is s · q or s · q + m: q is an integer of 4, 6 or 8 bits, and s and m hold for a group of
32 inputs (16 in Q6_K). A product rounds each input to a · n: n is an integer of 16 bits, and a is a
float32 for a group of 32 inputs, such that the group's largest n is ±32767. A group's sum of q · n
is an exact integer, which is then multiplied by a and s in float32. A row's numbers therefore
depend neither on the other rows nor on the number of rows computed together.

Blocks are stored transposed: a vector holds the same 32-bit word of LANES outputs, so that a shift
and a mask give the integers of a pair of inputs. The blocks are defined in llama.cpp's
ggml-common.h.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from mpissd.engine.model.transformer.checkpoint import Q4_0, Q4_1, Q4_K, Q6_K, Q8_0
from mpissd.engine.model.transformer.numba_ops.kernels import JIT, ROUNDER
from mpissd.engine.model.transformer.numba_ops.tiles import (
    F32,
    HAS_VNNI,
    HOST,
    I16,
    I32,
    I64,
    LANES,
    VECTOR,
    as_bits,
    as_float,
    at,
    by_rows,
    fma,
    load,
    multiply_add,
    prefetch,
    splat,
    store,
)

GROUP = 32  # number of inputs that are rounded with one common factor
RECORD = GROUP // 2 + 2  # words of a rounded group: 16 pairs of integers, factor, factor · sum
MOST_ROWS = 8 if HOST == "avx512" else 6  # the most rows of x in a tile: its sums fit in registers
AHEAD = 2048  # number of words by which prefetches run ahead of reads
WORDS = ir.VectorType(I32, LANES)
SHORTS = ir.VectorType(I16, 2 * LANES)


class Layout(NamedTuple):
    """How blocks of one of ggml's types are packed: a word of scales, then chunks of words."""

    joined: int  # number of the file's blocks in a packed block
    inputs: int  # of a packed block
    chunks: int  # of a packed block
    words: int  # of a chunk


# Two blocks of Q4_0 or Q8_0 are joined, because 18 or 34 bytes are not whole words.
LAYOUTS = {
    Q4_0: Layout(2, 64, 2, 4),
    Q4_1: Layout(1, 32, 1, 4),
    Q8_0: Layout(2, 64, 2, 8),
    Q4_K: Layout(1, 256, 4, 9),
    Q6_K: Layout(1, 256, 2, 26),
}


def pack(kind: int, blocks: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Packs a matrix of a .gguf; returns uint32 [⌈outputs / LANES⌉, packed blocks, words, LANES],
    where a vector register holds LANES words. blocks: bytes as ggml's type `kind` stores them,
    [outputs, blocks, bytes of a block]."""
    outputs, count, size = blocks.shape
    layout = LAYOUTS[kind]
    rest = -outputs % LANES, -count % layout.joined
    blocks = np.pad(blocks, ((0, rest[0]), (0, rest[1]), (0, 0)))
    blocks = blocks.reshape(outputs + rest[0], -1, layout.joined, size)
    # head: the bytes of each block's word of scales. parts: the bytes of its chunks, in order.
    if kind == Q4_K:
        low, middle, high = (blocks[..., 0, first : first + 4] for first in (4, 8, 12))
        scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
        minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
        head = blocks[..., :4]
        parts = [scales, minima, blocks[..., 0, 16:]]
    elif kind == Q6_K:
        head = np.pad(blocks[..., 208:], ((0, 0), (0, 0), (0, 0), (0, 2)))
        parts = [blocks[..., 0, 192:208], blocks[..., 0, :128], blocks[..., 0, 128:192]]
    else:
        half = 4 // layout.joined
        head = blocks[..., :half]
        parts = [blocks[..., half:]]
    chunks = [part.reshape(*blocks.shape[:2], layout.chunks, -1) for part in parts]
    joint = [part.reshape(*blocks.shape[:2], -1) for part in (head, np.concatenate(chunks, -1))]
    words = np.concatenate(joint, axis=-1).view(np.uint32)
    return np.ascontiguousarray(words.reshape(-1, LANES, *words.shape[1:]).transpose(0, 2, 3, 1))


class InputGroup(NamedTuple):
    """The weights of inputs that share a scale, as LLVM values: weight = scale · integer + minimum.
    pairs: (number of a pair of inputs in the chunk, function that emits code for the pair's
    integers, as the 16-bit halves of words). Pair 2w + i holds inputs 4w + i and 4w + i + 2."""

    scale: Any
    minimum: Any | None
    pairs: list[tuple[int, Callable[[], Any]]]


class Chunk:
    """Emits LLVM code that unpacks one chunk of a packed block: the weights of LANES outputs, one
    in each element of a vector register."""

    def __init__(self, builder: ir.IRBuilder, scales: Any, address: Any, number: Any) -> None:
        """Takes chunk `number` of a block. scales, address: LLVM pointers to the block's word of
        scales and to the chunk."""
        self._build = builder
        self._scales = scales
        self._address = address
        self._number = builder.trunc(number, I32)

    def groups(self, kind: int) -> Iterator[InputGroup]:
        """Yields the groups of inputs that share a scale, in order. kind: ggml's type."""
        types_ = {Q4_0: self._q4_0, Q4_1: self._q4_1, Q8_0: self._q8_0, Q4_K: self._q4_k}
        return types_.get(kind, self._q6_k)()

    def _q4_0(self) -> Iterator[InputGroup]:
        scale = self._half(self._number)
        pairs = self._nibbles(range(4), (0, 8, 4, 12), 0)
        yield InputGroup(scale, self._build.fmul(scale, _all(VECTOR, -8.0)), pairs)

    def _q4_1(self) -> Iterator[InputGroup]:
        pairs = self._nibbles(range(4), (0, 8, 4, 12), 0)
        yield InputGroup(self._half(I32(0)), self._half(I32(1)), pairs)

    def _q8_0(self) -> Iterator[InputGroup]:
        places = [(w, odd) for w in range(8) for odd in (False, True)]
        pairs = [partial(self._bytes, w, odd) for w, odd in places]
        yield InputGroup(self._half(self._number), None, list(enumerate(pairs)))

    def _q4_k(self) -> Iterator[InputGroup]:
        for g in range(2):
            scale = self._build.fmul(self._half(I32(0)), self._byte(0, g))
            minimum = self._build.fmul(self._half(I32(1)), self._byte(0, 2 + g))
            pairs = self._nibbles(range(1, 9), (4 * g, 4 * g + 8), 16 * g)
            yield InputGroup(scale, self._build.fneg(minimum), pairs)

    def _q6_k(self) -> Iterator[InputGroup]:
        for g in range(8):
            quarter, half = divmod(g, 2)  # group g is a half of a quarter of 128 inputs
            low = 2 + 8 * (quarter % 2) + 4 * half
            high = 18 + 4 * half
            shifts = 4 * (quarter // 2), 2 * quarter - 4
            places = [(w, 8 * odd) for w in range(4) for odd in range(2)]
            pairs = [
                partial(self._six, low + w, high + w, [shift + odd for shift in shifts])
                for w, odd in places
            ]
            scale = self._build.fmul(self._half(I32(0)), self._byte(g // 4, g % 4))
            yield InputGroup(scale, None, list(enumerate(pairs, 8 * g)))

    def _nibbles(
        self, words: Sequence[int], shifts: Sequence[int], first: int
    ) -> list[tuple[int, Callable[[], Any]]]:
        """Returns (number, function) for each pair of 4-bit integers in these words of the chunk.
        shifts: where the pairs lie in a word, in bits; pairs at the first two shifts are numbered
        from `first` on, and pairs at the other two after them."""
        places = [(w, n) for w in range(len(words)) for n in range(len(shifts))]
        numbers = [first + 2 * w + n % 2 + n // 2 * 2 * len(words) for w, n in places]
        pairs = [partial(self._bits, words[w], shifts[n], 0x000F000F) for w, n in places]
        return list(zip(numbers, pairs, strict=True))

    def _six(self, low: int, high: int, shifts: Sequence[int]) -> Any:
        four = self._bits(low, shifts[0], 0x000F000F)
        two = self._bits(high, shifts[1], 0x00300030)
        return self._halves(self._build.sub, self._build.or_(four, two), 32)

    def _bytes(self, word: int, high: bool) -> Any:
        value = self._word(word)
        raised = value if high else self._halves(self._build.shl, value, 8)
        return self._halves(self._build.ashr, raised, 8)

    def _word(self, word: int) -> Any:
        return load(self._build, at(self._build, self._address, I64(word * LANES)), WORDS)

    def _bits(self, word: int, shift: int, mask: int) -> Any:
        """Emits word >> shift & mask; a negative shift is to the left."""
        move = self._build.lshr if shift > 0 else self._build.shl
        value = self._word(word)
        moved = move(value, _all(WORDS, abs(shift))) if shift else value
        return self._build.and_(moved, _all(WORDS, mask))

    def _halves(self, operation: Callable[..., Any], value: Any, by: int) -> Any:
        """Emits an operation on each 16-bit half of a vector of words and the constant `by`."""
        halves = operation(self._build.bitcast(value, SHORTS), _all(SHORTS, by))
        return self._build.bitcast(halves, WORDS)

    def _half(self, number: Any) -> Any:
        """Emits float16 number `number` (0 or 1) of the word of scales as a float32."""
        shift = splat(self._build, self._build.mul(number, I32(16)))
        bits = self._build.lshr(load(self._build, self._scales, WORDS), shift)
        shorts = self._build.trunc(bits, ir.VectorType(I16, LANES))
        halves = self._build.bitcast(shorts, ir.VectorType(ir.HalfType(), LANES))
        return self._build.fpext(halves, VECTOR)

    def _byte(self, word: int, index: int) -> Any:
        """Emits signed byte number `index` of a word as a float32."""
        top = self._build.shl(self._word(word), _all(WORDS, 24 - 8 * index))
        return self._build.sitofp(self._build.ashr(top, _all(WORDS, 24)), VECTOR)


def _all(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _add_products(builder: ir.IRBuilder, weights: Any, inputs: Any, total: Any) -> Any:
    """Emits total + weights · inputs for vectors of words. A word of weights or inputs holds two
    16-bit integers; a word of the result adds up its two products."""
    if HOST == "neon":
        half = _all(WORDS, 16)
        low = (builder.ashr(builder.shl(words, half), half) for words in (weights, inputs))
        high = (builder.ashr(words, half) for words in (weights, inputs))
        return builder.add(total, builder.add(builder.mul(*low), builder.mul(*high)))
    if HAS_VNNI:
        kind = ir.FunctionType(WORDS, [WORDS] * 3)
        name = f"llvm.x86.avx512.vpdpwssd.{32 * LANES}"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [total, weights, inputs])
    kind = ir.FunctionType(WORDS, [SHORTS, SHORTS])
    name = {"avx512": "llvm.x86.avx512.pmaddw.d.512", "avx2": "llvm.x86.avx2.pmadd.wd"}[HOST]
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    halves = [builder.bitcast(words, SHORTS) for words in (weights, inputs)]
    return builder.add(total, builder.call(function, halves))


def kernel(module: ir.Module, kind: int, rows: int) -> Any:
    """Makes the LLVM function of one tile, which sets y [rows, LANES] to the product of rows of
    rounded inputs with LANES outputs of ggml's type `kind`. The function's arguments: the addresses
    of the weights, of the rounded rows (records) and of y; the number of packed blocks of weights;
    the stride of y."""
    name = f"packed_{kind}_{rows}"
    if name in module.globals:
        return module.globals[name]
    words = ir.PointerType(I32)
    arguments = [words, words, ir.PointerType(F32), I64, I64]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    weights, records, y, blocks, stride = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))

    def read(record: Any, word: int) -> Any:
        return splat(builder, builder.load(at(builder, record, I64(word))))

    sums = [builder.alloca(VECTOR) for _ in range(rows)]
    for place in sums:
        builder.store(_all(VECTOR, 0.0), place)
    fused = multiply_add(module, VECTOR, f"v{LANES}f32")
    layout = LAYOUTS[kind]
    chains = max(1, 4 // rows)  # number of separate sums, which hide an addition's latency
    size = 1 + layout.chunks * layout.words
    step = layout.inputs // layout.chunks // GROUP
    with (
        cgutils.for_range_slice(builder, I64(0), blocks, I64(1)) as (block, _),
        cgutils.for_range_slice(builder, I64(0), I64(layout.chunks), I64(1)) as (chunk, _),
    ):
        scales = at(builder, weights, builder.mul(block, I64(size * LANES)))
        here = at(builder, scales, builder.mul(chunk, I64(layout.words * LANES)))
        here = at(builder, here, I64(LANES))
        prefetch(builder, at(builder, here, I64(AHEAD)), layout.words * LANES)
        number = builder.add(builder.mul(block, I64(layout.chunks)), chunk)
        record = at(builder, records, builder.mul(number, I64(step * rows * RECORD)))
        for group in Chunk(builder, scales, here, chunk).groups(kind):
            first = group.pairs[0][0] // (GROUP // 2) * rows
            inputs = [at(builder, record, I64((first + m) * RECORD)) for m in range(rows)]
            totals = [[_all(WORDS, 0)] * chains for _ in range(rows)]
            for n, (pair, integers) in enumerate(group.pairs):
                values = integers()
                for m, total in enumerate(totals):
                    x = read(inputs[m], pair % (GROUP // 2))
                    total[n % chains] = _add_products(builder, values, x, total[n % chains])
            for m, (total, place) in enumerate(zip(totals, sums, strict=True)):
                integer = builder.sitofp(reduce(builder.add, total), VECTOR)
                factor = builder.bitcast(read(inputs[m], RECORD - 2), VECTOR)
                offset = builder.bitcast(read(inputs[m], RECORD - 1), VECTOR)
                value = builder.fmul(integer, factor)
                value = builder.call(fused, [value, group.scale, builder.load(place)])
                if group.minimum is not None:
                    value = builder.call(fused, [offset, group.minimum, value])
                builder.store(value, place)
    for m, place in enumerate(sums):
        store(builder, builder.load(place), at(builder, y, builder.mul(I64(m), stride)))
    builder.ret_void()
    return function


@intrinsic(prefer_literal=True)
def packed_tile(typing, kind, rows, weights, y, blocks, stride, first, records):
    """Sets y [rows, LANES], float32, to the product of rows of rounded inputs with LANES outputs.
    kind: a literal, ggml's type. weights, y: addresses. blocks: packed blocks of an output. stride:
    elements from row to row of y. records: the array of rounded rows (as an address, it would not
    be kept alive). first: the word at which these rows' records begin."""

    def code(context, builder, signature, args):
        _, rows, weights, y, *counts, first, records = args
        array = context.make_array(signature.args[-1])(context, builder, records)
        words = builder.inttoptr(weights, ir.PointerType(I32)), at(builder, array.data, first)
        y = builder.inttoptr(y, ir.PointerType(F32))
        for m in by_rows(builder, rows, MOST_ROWS):
            builder.call(kernel(builder.module, kind.literal_value, m), [*words, y, *counts])
        return context.get_dummy_value()

    return types.void(kind, *[types.intp] * 6, records), code


_LARGEST, _ZERO = map(np.float32, (32767, 0))


@njit(**JIT)
def round_inputs(x, first, last, groups, records):
    """Rounds rows first … last − 1 of x to 16-bit integers with a common factor for each group of
    32, and writes them to records, uint32 [groups · rows · RECORD]."""
    rows = last - first
    values = np.empty(GROUP, np.int32)
    for m in range(rows):
        row = x[first + m]
        for group in range(groups):
            part = row[group * GROUP : (group + 1) * GROUP]
            top = np.uint32(0)
            for k in range(GROUP):
                top = max(top, as_bits(part[k]) & np.uint32(0x7FFFFFFF))
            largest = as_float(top)
            total = np.int32(0)
            inverse = _LARGEST / largest if largest > _ZERO else _ZERO
            for k in range(GROUP):
                value = np.int32(fma(part[k], inverse, ROUNDER) - ROUNDER)
                values[k] = value
                total += value
            record = records[(group * rows + m) * RECORD : (group * rows + m + 1) * RECORD]
            for w in range(GROUP // 4):
                for i in range(2):
                    low, high = np.uint32(values[4 * w + i]), np.uint32(values[4 * w + i + 2])
                    record[2 * w + i] = (low & np.uint32(0xFFFF)) | (high << np.uint32(16))
            factor = largest / _LARGEST
            record[RECORD - 2] = as_bits(factor)
            record[RECORD - 1] = as_bits(factor * np.float32(total))


def _product(kind: int) -> Any:
    inputs = LAYOUTS[kind].inputs

    def product(x, packed, out, first, rows):
        """Sets out[:rows, first …] = x[:rows] · weightᵀ. packed: the weight, as `pack` writes it.
        `out` has a column for each output of the packed blocks, and x one for each input."""
        columns, blocks, words, lanes = packed.shape
        groups = blocks * inputs // GROUP
        tiles = (rows + MOST_ROWS - 1) // MOST_ROWS
        records = np.empty(rows * groups * RECORD, np.uint32)
        for tile in range(tiles):
            start, stop = tile * rows // tiles, (tile + 1) * rows // tiles
            round_inputs(x, start, stop, groups, records[start * groups * RECORD :])
        base = np.int64(packed.ctypes.data)
        to = np.int64(out.ctypes.data) + first * 4
        for column in range(columns):
            for tile in range(tiles):
                start, stop = tile * rows // tiles, (tile + 1) * rows // tiles
                packed_tile(
                    kind,
                    stop - start,
                    base + column * blocks * words * lanes * 4,
                    to + (start * out.shape[1] + column * lanes) * 4,
                    blocks,
                    out.shape[1],
                    start * groups * RECORD,
                    records,
                )

    # The name selects a file of Numba's cache: ranks that compile two types need two files.
    product.__qualname__ = f"product_{kind}"
    return njit(**JIT)(product)


PRODUCTS = {kind: _product(kind) for kind in LAYOUTS}
