"""Keys and values in pages and lanes, and attention over them.

Keys lie transposed, [head_dim, positions], so that scores and sums are both small products whose
sums add in order (vectors.float_tile). A page's part of the softmax is merged into the sum of the
pages before it, in rising order of absolute positions.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mpissd.engine.model.transformer.numba_ops.products import JIT, clear, float_product
from mpissd.engine.model.transformer.numba_ops.rows import exp, turn_heads
from mpissd.engine.model.transformer.numba_ops.vectors import block_max, fma

_NONE = np.float32(-np.inf)
_SLOT, _POSITION, _LANE, _TRUNK = 0, 1, 2, 3


@njit(**JIT)
def store(qkv, sizes, layer, norms, eps, turns, places, caches, q, rows):
    """Finishes q, k and v of a layer: bias, norms and rotation; stores k and v, copies q out.

    qkv: the product. sizes: (heads, kv_heads, head_dim). norms: (bias, q's, k's), empty where there
    is none. turns: (cosines, sines) of each position. places: RowPlaces.rows and .pages. caches:
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
def attend(q, out, sizes, layer, places, caches, rows):
    """Sets out = softmax(q·kᵀ/√head_dim)·v for each row; 0 for padding."""
    seats = places[0]
    start = np.int64(0)
    while start < rows:
        stop = start + 1
        while stop < rows and seats[_SLOT, stop] == seats[_SLOT, start]:
            stop += 1
        if seats[_SLOT, start] < 0:
            clear(out[start:stop], stop - start)
        else:
            for head in range(sizes[1]):
                attend_head(q, out, sizes, layer, places, caches, head, (start, stop))
        start = stop


@njit(**JIT)
def attend_head(q, out, sizes, layer, places, caches, head, span):
    """Attends for one KV head and the rows of a span (start, stop), which are of one slot.

    The queries are the span's rows times the query heads of this KV head, row by row.
    """
    heads, kv_heads, width = sizes
    group, seats = heads // kv_heads, places[0]
    page, padded, steps = caches[0].shape[4], caches[1].shape[4], caches[2].shape[4]
    count = (span[1] - span[0]) * group
    queries = scaled(q, span[0], count, head, group, width)
    scores, own = np.empty((count, page), np.float32), np.empty((count, steps), np.float32)
    parts, sums = np.empty((count, padded), np.float32), np.zeros((count, padded), np.float32)
    state = np.zeros((3, count), np.float32)
    state[0] = _NONE
    work = queries, scores, own, parts, sums, state
    last = np.int64(0)
    for m in range(span[0], span[1]):
        last = max(last, seats[_POSITION, m] // page)
    for index in range(last + 1):
        attend_page(group, layer, places, caches, head, span, index, work)
    for n in range(count):
        column = (head * group + n % group) * width
        for k in range(width):
            out[span[0] + n // group, column + k] = sums[n, k] / state[1, n]


@njit(**JIT)
def scaled(q, start, count, head, group, width):
    """Returns `count` queries from row `start`, divided by √head_dim: [count, width]."""
    scale = np.float32(1 / np.sqrt(width))
    queries = np.empty((count, width), np.float32)
    for n in range(count):
        row, column = start + n // group, (head * group + n % group) * width
        for k in range(width):
            queries[n, k] = q[row, column + k] * scale
    return queries


@njit(**JIT)
def attend_page(group, layer, places, caches, head, span, index, work):
    """Adds one page's part to the sums of all queries of a span."""
    queries, scores, _, parts, sums, state = work
    seats, pages = places
    (count, page), width, padded = scores.shape, queries.shape[1], parts.shape[1]
    first, none = index * page, np.int64(0)
    depth = none
    for m in range(span[0], span[1]):
        depth = max(depth, cached(seats, m, first, page))
    clear(scores, count)
    clear(parts, count)
    holder = pages[seats[_SLOT, span[0]], index]
    if depth:
        k_at = np.int64(caches[0][layer, holder, head].ctypes.data)
        to = np.int64(scores.ctypes.data)
        float_product(queries, none, count, width, k_at, page, to, page)
    lane_scores(work, layer, seats, caches[2], head, span, first)
    n = none
    for m in range(span[0], span[1]):
        for _ in range(group):
            soften(scores[n], state, n, seats[_POSITION, m] + 1 - first)
            n += 1
    lane_weights(work, seats, span, first)
    if depth:
        v_at = np.int64(caches[1][layer, holder, head].ctypes.data)
        to = np.int64(parts.ctypes.data)
        float_product(scores, none, count, depth, v_at, padded, to, padded)
    lane_sums(work, layer, seats, caches[3], head, span, first)
    for n in range(count):
        for k in range(padded):
            sums[n, k] = fma(sums[n, k], state[2, n], parts[n, k])


@njit(**JIT)
def cached(seats, m, first, page):
    """Returns how many of a page's positions, from `first`, row m reads from its slot's cache."""
    limit = seats[_POSITION, m] + 1 if seats[_LANE, m] < 0 else seats[_TRUNK, m]
    return min(max(limit - first, 0), page)


@njit(**JIT)
def soften(scores, state, n, visible):
    """Turns a page's scores into weights, exp(score − largest so far).

    Only the first `visible` positions get weight (none if it is negative). state[:, n]: the largest
    score so far, the sum of the weights, and the factor of the weights before this page.
    """
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
    state[0, n], state[2, n] = best, decay
    state[1, n] = fma(state[1, n], decay, total)


@njit(**JIT)
def lane_span(seats, m, first, page):
    """Returns the steps [from, to) of row m's lane that lie on the page from position `first`."""
    trunk = seats[_TRUNK, m]
    if seats[_LANE, m] < 0:
        return np.int64(0), np.int64(0)
    end = min(seats[_POSITION, m] + 1, first + page) - trunk
    return np.int64(max(first - trunk, 0)), np.int64(end)


@njit(**JIT)
def lane_scores(work, layer, seats, keys, head, span, first):
    """Writes the scores of each lane row's own tokens on the page from position `first`."""
    queries, scores, own = work[0], work[1], work[2]
    group, steps = len(scores) // (span[1] - span[0]), own.shape[1]
    width, page = queries.shape[1], scores.shape[1]
    for m in range(span[0], span[1]):
        begin, end = lane_span(seats, m, first, page)
        if begin >= end:
            continue
        n, at = (m - span[0]) * group, seats[_TRUNK, m] - first
        clear(own[n : n + group], group)
        k_at = np.int64(keys[layer, seats[_LANE, m], head].ctypes.data)
        to = np.int64(own.ctypes.data) + n * steps * 4
        float_product(queries, n, group, width, k_at, steps, to, steps)
        for query in range(n, n + group):
            for step in range(begin, end):
                scores[query, at + step] = own[query, step]


@njit(**JIT)
def lane_weights(work, seats, span, first):
    """Moves the weights of each lane row's own tokens out of the page's, from its first step on."""
    scores, own = work[1], work[2]
    group = len(scores) // (span[1] - span[0])
    for m in range(span[0], span[1]):
        begin, end = lane_span(seats, m, first, scores.shape[1])
        n, at = (m - span[0]) * group, seats[_TRUNK, m] - first
        for query in range(n, n + group):
            for step in range(begin, end):
                own[query, step - begin] = scores[query, at + step]
                scores[query, at + step] = 0


@njit(**JIT)
def lane_sums(work, layer, seats, values, head, span, first):
    """Adds the values of each lane row's own tokens on the page from position `first`."""
    scores, own, parts = work[1], work[2], work[3]
    group, padded = len(scores) // (span[1] - span[0]), parts.shape[1]
    for m in range(span[0], span[1]):
        begin, end = lane_span(seats, m, first, scores.shape[1])
        if begin < end:
            n = (m - span[0]) * group
            v_at = np.int64(values[layer, seats[_LANE, m], head, begin].ctypes.data)
            to = np.int64(parts.ctypes.data) + n * padded * 4
            float_product(own, n, group, end - begin, v_at, padded, to, padded)
