"""Keys and values in pages and lanes, and attention over them.

Keys lie transposed, [head_dim, positions], so that scores and sums are both small products whose
sums add in order (vectors.float_tile). A page's part of the softmax is merged into the sum of the
pages before it, in rising order of absolute positions.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mpissd.engine.model.transformer.numba_ops.products import JIT
from mpissd.engine.model.transformer.numba_ops.rows import exp, turn_heads
from mpissd.engine.model.transformer.numba_ops.vectors import (
    MOST_ROWS,
    block_max,
    float_tile_16,
    float_tile_64,
    fma,
)

_NONE = np.float32(-np.inf)
_SLOT, _POSITION, _LANE, _TRUNK = 0, 1, 2, 3


@njit(**JIT)
def store(qkv, sizes, layer, norms, eps, turns, places, caches, q, rows):
    """Finishes q, k and v of a layer: bias, norms and rotation; stores k and v, copies q out.

    qkv: the product. sizes: (heads, kv_heads, head_dim). norms: (bias, q's, k's), empty where there
    is none. turns: (cosines, sines) of each position. places: (rows, pages) of the Seats. caches:
    (keys, values, lanes' keys, lanes' values).
    """
    heads, kv_heads, width = sizes
    bias, q_norm, k_norm = norms
    cosines, sines = turns
    for m in range(rows):
        for column in range(len(bias)):
            qkv[m, column] += bias[column]
        position = max(places[0][_POSITION, m], 0) if places[0][_SLOT, m] >= 0 else 0
        first = heads * width
        turn_heads(qkv, first - first, heads, width, q_norm, eps, cosines, sines, position, m)
        turn_heads(qkv, first, kv_heads, width, k_norm, eps, cosines, sines, position, m)
        for column in range(first):
            q[m, column] = qkv[m, column]
        if places[0][_SLOT, m] >= 0:
            append(qkv[m, first:], sizes, layer, m, places, caches)


@njit(**JIT)
def append(kv, sizes, layer, m, places, caches):
    """Stores the k and v of row m, in its slot's page or in its lane."""
    _, kv_heads, width = sizes
    rows, pages = places
    keys, values, lane_keys, lane_values = caches
    position, lane = rows[_POSITION, m], rows[_LANE, m]
    size = keys.shape[4]
    holder, at = (lane, position - rows[_TRUNK, m]) if lane >= 0 else (
        pages[rows[_SLOT, m], position // size], position % size
    )  # fmt: skip
    if lane >= 0:
        keys, values = lane_keys, lane_values
    for head in range(kv_heads):
        for k in range(width):
            keys[layer, holder, head, k, at] = kv[head * width + k]
            values[layer, holder, head, at, k] = kv[(kv_heads + head) * width + k]


@njit(**JIT)
def groups_of(count):
    """Returns the number of even groups of at most MOST_ROWS in which `count` rows are computed."""
    return (count + MOST_ROWS - 1) // MOST_ROWS


@njit(**JIT)
def turned_at(n, count, depth):
    """Returns (place, step): vector n of `count` has its element k at place + step · k."""
    groups = groups_of(count)
    group = ((n + 1) * groups - 1) // count
    start, stop = group * count // groups, (group + 1) * count // groups
    return start * depth + n - start, stop - start


@njit(**JIT)
def float_product(turned, count, alloc, depth, weights, stride, out, width):
    """Adds to out [count, width] the product of `count` turned vectors with float32 weights.

    turned: vectors of `alloc` elements, as turned_at says, of which the first `depth` count.
    weights, out: addresses; a row of weights has `stride` elements. width: a multiple of 16.
    """
    groups = groups_of(count)
    for group in range(groups):
        start, stop = group * count // groups, (group + 1) * count // groups
        x = np.int64(turned.ctypes.data) + start * alloc * 4
        y = out + start * width * 4
        column = 0
        while column + 64 <= width:
            at = column * 4
            float_tile_64(stop - start, weights + at, x, y + at, depth, stride, width, 0)
            column += 64
        while column < width:
            at = column * 4
            float_tile_16(stop - start, weights + at, x, y + at, depth, stride, width, 0)
            column += 16


@njit(**JIT)
def attend(q, out, sizes, layer, places, caches, rows):
    """Sets out = softmax(q·kᵀ/√head_dim)·v for each row; 0 for padding."""
    seats = places[0]
    start = np.int64(0)
    while start < rows:
        stop = start + 1
        while stop < rows and seats[_SLOT, stop] == seats[_SLOT, start]:
            stop += 1
        if seats[_SLOT, start] < 0:
            clear(out[start:stop])
        else:
            for head in range(sizes[1]):
                attend_head(q, out, sizes, layer, places, caches, head, (start, stop))
        start = stop


@njit(**JIT)
def clear(array):
    """Sets a matrix to 0."""
    for row in range(array.shape[0]):
        for column in range(array.shape[1]):
            array[row, column] = 0


@njit(**JIT)
def attend_head(q, out, sizes, layer, places, caches, head, span):
    """Attends for one KV head and the rows of a span (start, stop), which are of one slot.

    The queries are the span's rows times the query heads of this KV head, row by row.
    """
    heads, kv_heads, width = sizes
    group, seats = heads // kv_heads, places[0]
    page, padded = caches[0].shape[4], caches[1].shape[4]
    count = (span[1] - span[0]) * group
    turned = np.empty(count * width, np.float32)
    turn_queries(q, turned, span[0], count, head, group, width)
    weights, state = np.empty(count * page, np.float32), np.zeros((3, count), np.float32)
    scores = np.empty((count, page), np.float32)
    parts, sums = np.empty((count, padded), np.float32), np.zeros((count, padded), np.float32)
    state[0] = _NONE
    work = turned, scores, weights, parts, sums, state
    last = np.int64(0)
    for m in range(span[0], span[1]):
        last = max(last, seats[_POSITION, m] // page)
    for index in range(last + 1):
        attend_page(q, sizes, layer, places, caches, head, span, index, work)
    for n in range(count):
        column = (head * group + n % group) * width
        for k in range(width):
            out[span[0] + n // group, column + k] = sums[n, k] / state[1, n]


@njit(**JIT)
def turn_queries(q, turned, start, count, head, group, width):
    """Lays `count` queries from row `start` out as turned_at says, divided by √head_dim."""
    scale = np.float32(1 / np.sqrt(width))
    for n in range(count):
        at, step = turned_at(n, count, width)
        column = (head * group + n % group) * width
        for k in range(width):
            turned[at + k * step] = q[start + n // group, column + k] * scale


@njit(**JIT)
def attend_page(q, sizes, layer, places, caches, head, span, index, work):
    """Adds one page's part to the sums of all queries of a span."""
    turned, scores, weights, parts, sums, state = work
    seats, pages = places
    count, page = scores.shape
    group, width, first = sizes[0] // sizes[1], sizes[2], index * page
    depth = np.int64(0)
    for m in range(span[0], span[1]):
        depth = max(depth, cached(seats, m, first, page))
    clear(scores)
    clear(parts)
    holder = pages[seats[_SLOT, span[0]], index]
    if depth:
        k_at = np.int64(caches[0][layer, holder, head].ctypes.data)
        to = np.int64(scores.ctypes.data)
        float_product(turned, count, width, width, k_at, page, to, page)
    lane_scores(q, scores, sizes, layer, seats, caches[2], head, span, first)
    for n in range(count):
        m = span[0] + n // group
        soften(scores[n], state, n, seats[_POSITION, m] + 1 - first)
        turn_weights(scores[n], weights, n, count, depth, cached(seats, m, first, page))
    if depth:
        v_at = np.int64(caches[1][layer, holder, head].ctypes.data)
        to, padded = np.int64(parts.ctypes.data), parts.shape[1]
        float_product(weights, count, page, depth, v_at, padded, to, padded)
    lane_sums(scores, parts, sizes, layer, seats, caches[3], head, span, first)
    for n in range(count):
        for k in range(width):
            sums[n, k] = fma(sums[n, k], state[2, n], parts[n, k])


@njit(**JIT)
def turn_weights(scores, weights, n, count, depth, visible):
    """Lays query n's first `visible` weights out as turned_at says, and zeros up to `depth`."""
    at, step = turned_at(n, count, len(scores))
    for j in range(visible):
        weights[at + j * step] = scores[j]
    for j in range(visible, depth):
        weights[at + j * step] = 0


@njit(**JIT)
def cached(seats, m, first, page):
    """Returns how many of a page's positions, from `first`, row m reads from its slot's cache."""
    limit = seats[_POSITION, m] + 1 if seats[_LANE, m] < 0 else seats[_TRUNK, m]
    return min(max(limit - first, 0), page)


@njit(**JIT)
def soften(scores, state, n, visible):
    """Turns a page's scores into weights, exp(score − largest so far).

    Only the first `visible` positions get weight (none if it is negative). state[:, n]: the largest
    score so far, the sum of the weights, and what the weights before this page are multiplied by.
    """
    page = len(scores)
    for j in range(max(visible, 0), page):
        scores[j] = _NONE
    old = state[0, n]
    best = max(old, block_max(np.int64(scores.ctypes.data), page))
    for j in range(page):
        scores[j] = exp(scores[j] - best)
    a = b = c = d = np.float32(0)
    for j in range(0, page, 4):
        a, b, c, d = a + scores[j], b + scores[j + 1], c + scores[j + 2], d + scores[j + 3]
    decay = exp(old - best)
    state[0, n], state[2, n] = best, decay
    state[1, n] = fma(state[1, n], decay, (a + b) + (c + d))


@njit(**JIT)
def lane_span(seats, m, first, page):
    """Returns the steps [from, to) of row m's lane that stand on the page from position `first`."""
    trunk = seats[_TRUNK, m]
    if seats[_LANE, m] < 0:
        return np.int64(0), np.int64(0)
    end = min(seats[_POSITION, m] + 1, first + page) - trunk
    return np.int64(max(first - trunk, 0)), np.int64(end)


@njit(**JIT)
def lane_scores(q, scores, sizes, layer, seats, keys, head, span, first):
    """Writes the scores of each lane row's own tokens on the page from position `first`."""
    group, width = sizes[0] // sizes[1], sizes[2]
    page, steps = scores.shape[1], keys.shape[4]
    turned = np.empty(group * width, np.float32)
    found = np.empty((group, steps), np.float32)
    for m in range(span[0], span[1]):
        begin, end = lane_span(seats, m, first, page)
        if begin >= end:
            continue
        turn_queries(q, turned, m, group, head, group, width)
        clear(found)
        k_at = np.int64(keys[layer, seats[_LANE, m], head].ctypes.data)
        to = np.int64(found.ctypes.data)
        float_product(turned, group, width, width, k_at, steps, to, steps)
        at = seats[_TRUNK, m] - first
        for g in range(group):
            for step in range(begin, end):
                scores[(m - span[0]) * group + g, at + step] = found[g, step]


@njit(**JIT)
def lane_sums(scores, parts, sizes, layer, seats, values, head, span, first):
    """Adds the values of each lane row's own tokens on the page from position `first`."""
    group, page, padded = sizes[0] // sizes[1], scores.shape[1], values.shape[4]
    for m in range(span[0], span[1]):
        begin, end = lane_span(seats, m, first, page)
        if begin >= end:
            continue
        depth, at = end - begin, seats[_TRUNK, m] - first + begin
        query = (m - span[0]) * group
        weights = np.empty(group * depth, np.float32)
        for g in range(group):
            turn_weights(scores[query + g, at : at + depth], weights, g, group, depth, depth)
        v_at = np.int64(values[layer, seats[_LANE, m], head, begin].ctypes.data)
        to = np.int64(parts.ctypes.data) + query * padded * 4
        float_product(weights, group, depth, depth, v_at, padded, to, padded)
