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
        turn_heads(qkv, 0, heads, width, q_norm, eps, cosines, sines, position, m)
        first = heads * width
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


@njit(inline="always", **JIT)
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
        x = turned.ctypes.data + start * alloc * 4
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
    start = 0
    while start < rows:
        slot, stop = seats[_SLOT, start], start + 1
        while stop < rows and seats[_SLOT, stop] == slot:
            stop += 1
        if slot < 0:
            out[start:stop] = 0
        else:
            for head in range(sizes[1]):
                attend_head(q, out, sizes, layer, places, caches, head, start, stop)
        start = stop


@njit(**JIT)
def attend_head(q, out, sizes, layer, places, caches, head, start, stop):
    """Attends for one KV head and rows start … stop − 1, which are of one slot."""
    heads, kv_heads, width = sizes
    seats, pages = places
    keys, values = caches[0], caches[1]
    group, page, padded = heads // kv_heads, keys.shape[4], values.shape[4]
    count = (stop - start) * group
    turned = np.empty(count * width, np.float32)
    scale = np.float32(1 / np.sqrt(width))
    for n in range(count):
        at, step = turned_at(n, count, width)
        column = (head * group + n % group) * width
        for k in range(width):
            turned[at + k * step] = q[start + n // group, column + k] * scale
    scores, weights = np.empty((count, page), np.float32), np.empty(count * page, np.float32)
    parts, sums = np.empty((count, padded), np.float32), np.zeros((count, padded), np.float32)
    state = np.zeros((3, count), np.float32)  # largest score, sum of weights, decay on this page
    state[0] = _NONE
    last = 0
    for m in range(start, stop):
        last = max(last, seats[_POSITION, m] // page)
    slot = seats[_SLOT, start]
    for index in range(last + 1):
        deepest = 0
        for m in range(start, stop):
            deepest = max(deepest, cached(seats, m, index * page, page))
        scores[:], parts[:] = 0, 0
        holder = pages[slot, index]
        k_at = keys[layer, holder, head].ctypes.data
        v_at = values[layer, holder, head].ctypes.data
        if deepest:
            float_product(turned, count, width, width, k_at, page, scores.ctypes.data, page)
        lane_scores(q, scores, sizes, layer, seats, caches, head, start, stop, index * page)
        for n in range(count):
            soften(scores[n], state, n, seats, start + n // group, index * page)
            at, step = turned_at(n, count, page)
            visible = cached(seats, start + n // group, index * page, page)
            for j in range(deepest):
                weights[at + j * step] = scores[n, j] if j < visible else np.float32(0)
        if deepest:
            float_product(weights, count, page, deepest, v_at, padded, parts.ctypes.data, padded)
        lane_sums(scores, parts, sizes, layer, seats, caches, head, start, stop, index * page)
        for n in range(count):
            for k in range(width):
                sums[n, k] = fma(sums[n, k], state[2, n], parts[n, k])
    for n in range(count):
        column = (head * group + n % group) * width
        for k in range(width):
            out[start + n // group, column + k] = sums[n, k] / state[1, n]


@njit(inline="always", **JIT)
def cached(seats, m, first, page):
    """Returns how many of a page's positions, from `first`, row m reads from its slot's cache."""
    limit = seats[_POSITION, m] + 1 if seats[_LANE, m] < 0 else seats[_TRUNK, m]
    return min(max(limit - first, 0), page)


@njit(**JIT)
def soften(scores, state, n, seats, m, first):
    """Turns a page's scores into weights, exp(score − largest so far), and updates query n's state.

    Positions behind row m's own get weight 0.
    """
    page = len(scores)
    visible = min(max(seats[_POSITION, m] + 1 - first, 0), page)
    if visible == 0:
        scores[:] = 0
        state[2, n] = 1
        return
    scores[visible:] = _NONE
    old = state[0, n]
    best = max(old, block_max(scores.ctypes.data, page))
    a = b = c = d = np.float32(0)
    for j in range(page):
        scores[j] = exp(scores[j] - best)
    for j in range(0, page, 4):
        a, b, c, d = a + scores[j], b + scores[j + 1], c + scores[j + 2], d + scores[j + 3]
    decay = exp(old - best)
    state[0, n], state[2, n] = best, decay
    state[1, n] = fma(state[1, n], decay, (a + b) + (c + d))


@njit(inline="always", **JIT)
def lane_span(seats, m, first, page):
    """Returns the steps [from, to) of row m's lane that stand on the page from position `first`."""
    trunk = seats[_TRUNK, m]
    if seats[_LANE, m] < 0:
        return 0, 0
    return max(0, first - trunk), min(seats[_POSITION, m] + 1, first + page) - trunk


@njit(**JIT)
def lane_scores(q, scores, sizes, layer, seats, caches, head, start, stop, first):
    """Writes the scores of each lane row's own tokens on the page from position `first`."""
    heads, kv_heads, width = sizes
    group, page, keys = heads // kv_heads, scores.shape[1], caches[2]
    steps = keys.shape[4]
    turned = np.empty(group * width, np.float32)
    found = np.empty((group, steps), np.float32)
    scale = np.float32(1 / np.sqrt(width))
    for m in range(start, stop):
        begin, end = lane_span(seats, m, first, page)
        if begin >= end:
            continue
        for g in range(group):
            at, step = turned_at(g, group, width)
            for k in range(width):
                turned[at + k * step] = q[m, (head * group + g) * width + k] * scale
        found[:] = 0
        k_at = keys[layer, seats[_LANE, m], head].ctypes.data
        float_product(turned, group, width, width, k_at, steps, found.ctypes.data, steps)
        at = seats[_TRUNK, m] - first
        for g in range(group):
            for step in range(begin, end):
                scores[(m - start) * group + g, at + step] = found[g, step]


@njit(**JIT)
def lane_sums(scores, parts, sizes, layer, seats, caches, head, start, stop, first):
    """Adds the values of each lane row's own tokens on the page from position `first`."""
    heads, kv_heads, _ = sizes
    group, page, values = heads // kv_heads, scores.shape[1], caches[3]
    padded = values.shape[4]
    for m in range(start, stop):
        begin, end = lane_span(seats, m, first, page)
        if begin >= end:
            continue
        depth, at = end - begin, seats[_TRUNK, m] - first + begin
        weights = np.empty(group * depth, np.float32)
        for g in range(group):
            place, step = turned_at(g, group, depth)
            for j in range(depth):
                weights[place + j * step] = scores[(m - start) * group + g, at + j]
        v_at = values[layer, seats[_LANE, m], head, begin:].ctypes.data
        to = parts.ctypes.data + (m - start) * group * padded * 4
        float_product(weights, group, depth, depth, v_at, padded, to, padded)
