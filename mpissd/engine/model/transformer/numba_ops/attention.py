"""Keys and values in pages and lanes, and attention over them.

Keys lie transposed, [head_dim, positions], so that scores and sums are both small products whose
sums add in order (tiles.tile). A page's part of the softmax is merged into the sum of the
pages before it, in rising order of absolute positions.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mpissd.engine.model.transformer.numba_ops.products import JIT, clear, float_product
from mpissd.engine.model.transformer.numba_ops.rows import exp, turn_heads
from mpissd.engine.model.transformer.numba_ops.tiles import block_max, fma

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
    seats, pages = places
    first = heads * width
    for m in range(rows):
        for column in range(len(bias)):
            qkv[m, column] += bias[column]
        slot, position, lane = seats[_SLOT, m], seats[_POSITION, m], seats[_LANE, m]
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
            keys, values = lane_keys, lane_values
            holder, at = lane, position - seats[_TRUNK, m]
        else:
            holder, at = pages[slot, position // size], position % size
        for head in range(kv_heads):
            for k in range(width):
                column = first + head * width + k
                keys[layer, holder, head, k, at] = qkv[m, column]
                values[layer, holder, head, at, k] = qkv[m, column + kv_heads * width]


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

    The queries, divided by √head_dim, are the span's rows times the query heads of this KV head,
    row by row.
    """
    heads, kv_heads, width = sizes
    group, seats = heads // kv_heads, places[0]
    page, padded, steps = caches[0].shape[4], caches[1].shape[4], caches[2].shape[4]
    count, scale = (span[1] - span[0]) * group, np.float32(1 / np.sqrt(width))
    queries = np.empty((count, width), np.float32)
    for n in range(count):
        row, column = span[0] + n // group, (head * group + n % group) * width
        for k in range(width):
            queries[n, k] = q[row, column + k] * scale
    scores, own = np.empty((count, page), np.float32), np.empty((count, steps), np.float32)
    parts, sums = np.empty((count, padded), np.float32), np.zeros((count, padded), np.float32)
    state = np.zeros((3, count), np.float32)
    state[0] = _NONE
    work = queries, scores, own, parts, state
    last = np.int64(0)
    for m in range(span[0], span[1]):
        last = max(last, seats[_POSITION, m] // page)
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
    """Sets parts to one page's sums of values for all queries of a span, and updates their state.

    A lane row's own tokens have their scores and weights in the page's places of their positions,
    and are moved to `own` for their product with the lane's values.
    """
    queries, scores, own, parts, state = work
    seats, pages = places
    (count, page), width, padded, steps = (
        scores.shape,
        queries.shape[1],
        parts.shape[1],
        own.shape[1],
    )
    first, none = index * page, np.int64(0)
    holder, depth = pages[seats[_SLOT, span[0]], index], none
    for m in range(span[0], span[1]):  # the page's positions that some row reads from the cache
        limit = seats[_POSITION, m] + 1 if seats[_LANE, m] < 0 else seats[_TRUNK, m]
        depth = max(depth, min(max(limit - first, 0), page))
    clear(scores, count)
    clear(parts, count)
    if depth:
        k_at, to = (
            np.int64(caches[0][layer, holder, head].ctypes.data),
            np.int64(scores.ctypes.data),
        )
        float_product(queries, none, count, width, k_at, page, to, page)
    for m in range(span[0], span[1]):
        begin, end = lane_span(seats, m, first, page)
        if begin < end:
            n, at = (m - span[0]) * group, seats[_TRUNK, m] - first
            clear(own[n : n + group], group)
            k_at = np.int64(caches[2][layer, seats[_LANE, m], head].ctypes.data)
            to = np.int64(own.ctypes.data) + n * steps * 4
            float_product(queries, n, group, width, k_at, steps, to, steps)
            for query in range(n, n + group):
                for step in range(begin, end):
                    scores[query, at + step] = own[query, step]
    for n in range(count):
        soften(scores[n], state, n, seats[_POSITION, span[0] + n // group] + 1 - first)
    for m in range(span[0], span[1]):
        begin, end = lane_span(seats, m, first, page)
        n, at = (m - span[0]) * group, seats[_TRUNK, m] - first
        for query in range(n, n + group):
            for step in range(begin, end):
                own[query, step - begin] = scores[query, at + step]
                scores[query, at + step] = 0
    to = np.int64(parts.ctypes.data)
    if depth:
        v_at = np.int64(caches[1][layer, holder, head].ctypes.data)
        float_product(scores, none, count, depth, v_at, padded, to, padded)
    for m in range(span[0], span[1]):
        begin, end = lane_span(seats, m, first, page)
        if begin < end:
            n = (m - span[0]) * group
            v_at = np.int64(caches[3][layer, seats[_LANE, m], head, begin].ctypes.data)
            float_product(own, n, group, end - begin, v_at, padded, to + n * padded * 4, padded)


@njit(**JIT)
def lane_span(seats, m, first, page):
    """Returns the steps [from, to) of row m's lane that lie on the page from position `first`."""
    trunk = seats[_TRUNK, m]
    if seats[_LANE, m] < 0:
        return np.int64(0), np.int64(0)
    end = min(seats[_POSITION, m] + 1, first + page) - trunk
    return np.int64(max(first - trunk, 0)), np.int64(end)


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
