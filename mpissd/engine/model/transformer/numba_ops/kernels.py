"""The CPU's kernels: products with bfloat16 weights, norms and rotations, and attention.

Keys are stored transposed, [head_dim, positions], so that scores and weighted sums of values are
both small products, whose terms add up in a fixed order. A page's part of the softmax is merged
into the sum of the pages before it, in rising order of absolute positions. The argument row_places,
int32 [4, n], holds where each row (token) lies in the KV cache: its slot, position, lane and trunk
(see forwards.Places).
"""

import numpy as np
from numba import njit

from mpissd.engine.model.forwards import SPAN
from mpissd.engine.model.transformer.numba_ops.tiles import (
    AHEAD,
    MOST_ROWS,
    WIDTH,
    as_bits,
    as_float,
    block_max,
    fma,
    tile,
)

JIT = {"cache": True, "error_model": "numpy", "boundscheck": False, "nogil": True}
BLOCK = 64  # activations are padded to a multiple of so many columns
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = map(np.float32, (0.693359375, -2.12194440e-4))
ROUNDER = np.float32(12582912.0)  # 1.5 · 2²³: adding it to a float32 rounds to a whole number
_LEAST, _MOST = map(np.float32, (-87.0, 88.0))  # least and largest argument of `exp`
_C2, _C3, _C4 = map(np.float32, (5.0000001201e-1, 1.6666665459e-1, 4.1665795894e-2))
_C5, _C6, _C7 = map(np.float32, (8.3334519073e-3, 1.3981999507e-3, 1.9875691500e-4))
_ONE = np.float32(1)
_SCAN = 64  # `top_k` skips blocks of so many logits if none of them can be among the k best
_NONE = np.float32(-np.inf)
_SLOT, _POSITION, _LANE, _TRUNK = range(4)  # rows of the argument row_places


@njit(**JIT)
def rounded(value):
    """Rounds a float32 to bfloat16, ties to even; returns the 16 bits as a uint32."""
    bits = as_bits(value)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@njit(**JIT)
def pack(matrix, first, packed):
    """Rounds a matrix, float32 [outputs, inputs], to bfloat16 and writes it into a packed weight,
    as its outputs from number `first` on. packed: uint32 [blocks, ⌈inputs / 2⌉, WIDTH]; a word
    holds an even input in its lower half, and the next input in its upper half."""
    outputs, inputs = matrix.shape
    for output in range(outputs):
        block, column = divmod(first + output, WIDTH)
        for pair in range(inputs // 2):
            low, high = rounded(matrix[output, 2 * pair]), rounded(matrix[output, 2 * pair + 1])
            packed[block, pair, column] = low | (high << np.uint32(16))
        if inputs % 2:
            packed[block, inputs // 2, column] = rounded(matrix[output, inputs - 1])


@njit(**JIT)
def clear(array, rows):
    """Sets the first `rows` rows of a matrix to 0."""
    for row in range(rows):
        for column in range(array.shape[1]):
            array[row, column] = 0


@njit(**JIT)
def product(x, packed, out, first, rows):
    """Sets out[:rows, first …] = x[:rows] · weightᵀ. packed: the weight in bfloat16, as `pack`
    writes it. If the number of inputs is odd, x has one more column, of zeros. `out` has a column
    for each output of the packed blocks. Rows are computed in even groups of at most MOST_ROWS. A
    block of the weight is read from memory once; the next is prefetched during the last group."""
    blocks, steps, width = packed.shape
    depth = x.shape[1]
    columns = out.shape[1]
    groups = (rows + MOST_ROWS - 1) // MOST_ROWS
    for row in range(rows):
        for column in range(first, first + blocks * width):
            out[row, column] = 0
    base = np.int64(packed.ctypes.data)
    source = np.int64(x.ctypes.data)
    to = np.int64(out.ctypes.data) + first * 4
    for block in range(blocks):
        for group in range(groups):
            start, stop = group * rows // groups, (group + 1) * rows // groups
            tile(
                packed,
                width,
                stop - start,
                base + block * steps * width * 4,
                source + start * depth * 4,
                to + (start * columns + block * width) * 4,
                steps,
                width,
                depth,
                columns,
                AHEAD if groups == 1 or group < groups - 1 else steps * width,
            )


@njit(**JIT)
def float_product(x, first, count, depth, weights, stride, out, width):
    """Adds to out [count, width] the product of a part of x with float32 weights. x: [rows,
    columns], of which `count` rows from `first` and the first `depth` columns are read. weights,
    out: addresses; two rows of weights lie `stride` elements apart. width: a multiple of 16."""
    groups = (count + MOST_ROWS - 1) // MOST_ROWS
    columns = x.shape[1]
    for group in range(groups):
        start, stop = group * count // groups, (group + 1) * count // groups
        rows = stop - start
        source = np.int64(x.ctypes.data) + (first + start) * columns * 4
        to = out + start * width * 4
        column = 0
        while column < width:
            at = weights + column * 4
            end = to + column * 4
            if column + 64 <= width:
                tile(x, 64, rows, at, source, end, depth, stride, columns, width, 0)
                column += 64
            else:
                tile(x, 16, rows, at, source, end, depth, stride, columns, width, 0)
                column += 16


@njit(**JIT)
def exp(x):
    """Returns eˣ in float32 to 2 units in the last place; 0 below −87. Polynomial: Cephes' expf."""
    bounded = min(max(x, _LEAST), _MOST)
    shifted = fma(bounded, _LOG2_E, ROUNDER)
    power = as_bits(shifted) << np.uint32(23)
    n = shifted - ROUNDER
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, bounded))
    p = fma(fma(fma(fma(fma(_C7, r, _C6), r, _C5), r, _C4), r, _C3), r, _C2)
    p = fma(p, r * r, r) + _ONE
    return as_float(as_bits(p) + power) if x >= _LEAST else np.float32(0)


@njit(**JIT)
def inverse_rms(row, eps):
    """Returns 1 / √(mean of squares + eps) of a vector; the squares add up in 8 partial sums."""
    a = b = c = d = e = f = g = h = np.float32(0)
    width = len(row)
    stop = width - width % 8
    for k in range(0, stop, 8):
        a = fma(row[k], row[k], a)
        b = fma(row[k + 1], row[k + 1], b)
        c = fma(row[k + 2], row[k + 2], c)
        d = fma(row[k + 3], row[k + 3], d)
        e = fma(row[k + 4], row[k + 4], e)
        f = fma(row[k + 5], row[k + 5], f)
        g = fma(row[k + 6], row[k + 6], g)
        h = fma(row[k + 7], row[k + 7], h)
    for k in range(stop, width):
        a = fma(row[k], row[k], a)
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    return _ONE / np.sqrt(total / np.float32(width) + eps)


@njit(**JIT)
def norm(hidden, delta, adds, weight, eps, x, rows):
    """Adds delta (if `adds`) to hidden, the residual stream; sets x = RMSNorm(hidden) · weight."""
    width = len(weight)
    for m in range(rows):
        row = hidden[m]
        if adds:
            for k in range(width):
                row[k] += delta[m, k]
        scale = inverse_rms(row[:width], eps)
        for k in range(width):
            x[m, k] = weight[k] * (row[k] * scale)


@njit(**JIT)
def swiglu(gate_up, inner, width, rows):
    """Sets inner = silu(gate) · up; gate_up holds `width` columns of gate, then those of up."""
    for m in range(rows):
        for k in range(width):
            gate = gate_up[m, k]
            inner[m, k] = gate / (_ONE + exp(-gate)) * gate_up[m, width + k]


@njit(**JIT)
def turn_heads(qkv, first, heads, width, weight, eps, cosines, sines, position, m):
    """Applies RMSNorm (unless `weight` is empty) and rotary positions, in place, to `heads` heads
    of row m of qkv. first: the heads' first column. width: head_dim."""
    half = width // 2
    for head in range(heads):
        start = first + head * width
        if len(weight):
            scale = inverse_rms(qkv[m, start : start + width], eps)
            for k in range(width):
                qkv[m, start + k] = weight[k] * (qkv[m, start + k] * scale)
        for k in range(half):
            low, high = qkv[m, start + k], qkv[m, start + half + k]
            cosine, sine = cosines[position, k], sines[position, k]
            qkv[m, start + k] = low * cosine - high * sine
            qkv[m, start + half + k] = high * cosine + low * sine


@njit(**JIT)
def top_k(logits, width, k, ids, values, rows):
    """Writes the k largest of each row's first `width` logits to `values`, largest first, and their
    columns to `ids`; of equal logits the lower column comes first. Blocks whose largest logit does
    not exceed the k-th best so far are skipped."""
    for m in range(rows):
        count = 0
        row = logits[m]
        for start in range(0, width, _SCAN):
            stop = min(start + _SCAN, width)
            if count == k and stop - start == _SCAN:
                address = logits.ctypes.data + (m * logits.shape[1] + start) * 4
                if not block_max(address, _SCAN) > values[m, k - 1]:
                    continue
            for column in range(start, stop):
                value = row[column]
                if count < k or value > values[m, k - 1]:
                    count = min(count + 1, k)
                    place = count - 1
                    while place and value > values[m, place - 1]:
                        values[m, place], ids[m, place] = values[m, place - 1], ids[m, place - 1]
                        place -= 1
                    values[m, place] = value
                    ids[m, place] = column


@njit(**JIT)
def store(qkv, sizes, layer, norms, eps, turns, places, caches, q, rows):
    """Finishes q, k and v of a layer: adds biases, applies norms and rotary positions, writes k and
    v to the KV cache, and copies q to `q`. qkv: the product's output [n, …]. sizes: (heads,
    kv_heads, head_dim). norms: (bias, q's norm, k's norm), empty where the model has none. turns:
    cosines and sines of all positions. places: row_places and the page table. caches: keys and
    values in pages and in lanes (see ops.CpuCache)."""
    heads, kv_heads, width = sizes
    bias, q_norm, k_norm = norms
    cosines, sines = turns
    row_places, pages = places
    first = heads * width
    for m in range(rows):
        for column in range(len(bias)):
            qkv[m, column] += bias[column]
        slot = row_places[_SLOT, m]
        position = row_places[_POSITION, m]
        lane = row_places[_LANE, m]
        turn = max(position, 0) if slot >= 0 else 0
        turn_heads(qkv, first - first, heads, width, q_norm, eps, cosines, sines, turn, m)
        turn_heads(qkv, first, kv_heads, width, k_norm, eps, cosines, sines, turn, m)
        for column in range(first):
            q[m, column] = qkv[m, column]
        if slot < 0:
            continue
        keys, values, lane_keys, lane_values = caches
        size = keys.shape[4]
        if lane >= 0:
            keys = lane_keys
            values = lane_values
            holder = lane % SPAN
            at = position - row_places[_TRUNK, m]
        else:
            holder = pages[slot, position // size]
            at = position % size
        for to in range(holder, holder + 1 + max(lane, 0) // SPAN):
            for head in range(kv_heads):
                for k in range(width):
                    column = first + head * width + k
                    keys[layer, to, head, k, at] = qkv[m, column]
                    values[layer, to, head, at, k] = qkv[m, column + kv_heads * width]


@njit(**JIT)
def attend(q, out, sizes, layer, places, caches, rows):
    """Computes the attention of one layer: sets out = softmax(q·kᵀ/√head_dim)·v for each row; for
    padding rows out = 0. sizes: (heads, kv_heads, head_dim). places: where the rows lie
    (row_places), and the page table. caches: the keys and values (ops.CpuCache)."""
    row_places = places[0]
    start = np.int64(0)
    while start < rows:
        stop = start + 1
        while stop < rows and row_places[_SLOT, stop] == row_places[_SLOT, start]:
            stop += 1
        if row_places[_SLOT, start] < 0:
            clear(out[start:stop], stop - start)
        else:
            for head in range(sizes[1]):
                attend_head(q, out, sizes, layer, places, caches, head, (start, stop))
        start = stop


@njit(**JIT)
def attend_head(q, out, sizes, layer, places, caches, head, span):
    """Computes the attention of KV head `head`, and of its query heads, for the rows `span` (start,
    stop), which belong to one sequence."""
    heads, kv_heads, width = sizes
    group = heads // kv_heads
    row_places = places[0]
    page, padded = caches[0].shape[4], caches[1].shape[4]
    count = (span[1] - span[0]) * group
    scale = np.float32(1 / np.sqrt(width))
    queries = np.empty((count, width), np.float32)
    for n in range(count):
        column = (head * group + n % group) * width
        for k in range(width):
            queries[n, k] = q[span[0] + n // group, column + k] * scale
    scores = np.empty((count, page), np.float32)
    branch = np.empty((count, caches[2].shape[4]), np.float32)
    parts = np.empty((count, padded), np.float32)
    sums = np.zeros((count, padded), np.float32)
    state = np.zeros((3, count), np.float32)
    state[0] = _NONE
    work = queries, scores, branch, parts, state
    last = np.int64(0)
    for m in range(span[0], span[1]):
        last = max(last, row_places[_POSITION, m] // page)
    for index in range(last + 1):
        attend_page(group, layer, places, caches, head, span, index, work)
        for n in range(count):
            for k in range(padded):
                sums[n, k] = fma(sums[n, k], state[2, n], parts[n, k])
    for n in range(count):
        column = (head * group + n % group) * width
        for k in range(width):
            out[span[0] + n // group, column + k] = sums[n, k] / state[1, n]


@njit(**JIT)
def attend_page(group, layer, places, caches, head, span, index, work):
    """Computes attention of one KV head over page number `index`: sets `parts` to the weighted sums
    of the page's values for all queries of the rows `span`, and updates the softmax's state.

    work: (queries [count, head_dim], divided by √head_dim; scores [count, page]; branch [count,
    steps]; parts [count, head_dim]; state, see soften). The scores of tokens that a row reads from
    its lane (scratch memory of a branch) are put at their positions in the page; their weights are
    moved to `branch` for the product with the lane's values.
    """
    queries, scores, branch, parts, state = work
    row_places, pages = places
    count, page = scores.shape
    width, padded, steps = queries.shape[1], parts.shape[1], branch.shape[1]
    first = index * page
    none = np.int64(0)
    holder = pages[row_places[_SLOT, span[0]], index]
    depth = none
    for m in range(span[0], span[1]):  # depth: the most positions of the page that a row reads
        limit = row_places[_TRUNK, m]
        if row_places[_LANE, m] < 0:
            limit = row_places[_POSITION, m] + 1
        depth = max(depth, min(max(limit - first, 0), page))
    clear(scores, count)
    clear(parts, count)
    if depth:
        k_at = np.int64(caches[0][layer, holder, head].ctypes.data)
        to = np.int64(scores.ctypes.data)
        float_product(queries, none, count, width, k_at, page, to, page)
    for m in range(span[0], span[1]):
        begin, end = lane_span(row_places, m, first, page)
        if begin < end:
            n = (m - span[0]) * group
            at = row_places[_TRUNK, m] - first
            clear(branch[n : n + group], group)
            k_at = np.int64(caches[2][layer, row_places[_LANE, m] % SPAN, head].ctypes.data)
            to = np.int64(branch.ctypes.data) + n * steps * 4
            float_product(queries, n, group, width, k_at, steps, to, steps)
            for query in range(n, n + group):
                for step in range(begin, end):
                    scores[query, at + step] = branch[query, step]
    for n in range(count):
        soften(scores[n], state, n, row_places[_POSITION, span[0] + n // group] + 1 - first)
    for m in range(span[0], span[1]):
        begin, end = lane_span(row_places, m, first, page)
        n = (m - span[0]) * group
        at = row_places[_TRUNK, m] - first
        for query in range(n, n + group):
            for step in range(begin, end):
                branch[query, step - begin] = scores[query, at + step]
                scores[query, at + step] = 0
    to = np.int64(parts.ctypes.data)
    if depth:
        v_at = np.int64(caches[1][layer, holder, head].ctypes.data)
        float_product(scores, none, count, depth, v_at, padded, to, padded)
    for m in range(span[0], span[1]):
        begin, end = lane_span(row_places, m, first, page)
        if begin < end:
            n = (m - span[0]) * group
            v_at = np.int64(caches[3][layer, row_places[_LANE, m] % SPAN, head, begin].ctypes.data)
            float_product(branch, n, group, end - begin, v_at, padded, to + n * padded * 4, padded)


@njit(**JIT)
def lane_span(row_places, m, first, page):
    """Returns the range [from, to) of the tokens in row m's lane (a branch's scratch memory) whose
    positions lie on the page that begins at position `first`; (0, 0) for a row without a lane."""
    trunk = row_places[_TRUNK, m]
    if row_places[_LANE, m] < 0:
        return np.int64(0), np.int64(0)
    end = min(row_places[_POSITION, m] + 1, first + page) - trunk
    return np.int64(max(first - trunk, 0)), np.int64(end)


@njit(**JIT)
def soften(scores, state, n, visible):
    """Turns a page's scores of query n into softmax weights, exp(score − largest so far). Positions
    from `visible` on get no weight (if it is negative, no position gets any). state[:, n]: the
    largest score so far, the sum of the weights, and the factor on the weights of earlier pages."""
    page = len(scores)
    for j in range(max(visible, 0), page):
        scores[j] = _NONE
    old = state[0, n]
    best = max(old, block_max(np.int64(scores.ctypes.data), page))
    for j in range(page):
        scores[j] = exp(scores[j] - best)
    a = b = c = d = e = f = g = h = np.float32(0)
    for j in range(0, page, 8):
        a, b, c, d = a + scores[j], b + scores[j + 1], c + scores[j + 2], d + scores[j + 3]
        e, f, g, h = e + scores[j + 4], f + scores[j + 5], g + scores[j + 6], h + scores[j + 7]
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    decay = exp(old - best)
    state[0, n] = best
    state[2, n] = decay
    state[1, n] = fma(state[1, n], decay, total)
