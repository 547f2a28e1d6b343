"""Operations on single rows: embedding, norms, rotary positions, SwiGLU, candidates."""

from __future__ import annotations

import numpy as np
from numba import njit

from mpissd.engine.model.transformer.numba_ops.products import JIT, rounded
from mpissd.engine.model.transformer.numba_ops.tiles import as_bits, as_float, block_max, fma

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUNDER = np.float32(12582912.0)  # 1.5 · 2²³: adding it rounds to a whole number
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)
_C2, _C3 = np.float32(5.0000001201e-1), np.float32(1.6666665459e-1)
_C4, _C5 = np.float32(4.1665795894e-2), np.float32(8.3334519073e-3)
_C6, _C7 = np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
_ONE = np.float32(1)
_SCAN = 64  # logits in a block, which is skipped if its largest cannot be among the k best


@njit(**JIT)
def exp(x):
    """Returns eˣ in float32 to 2 units in the last place; 0 below −87.

    Source of the polynomial: Cephes, expf.
    """
    bounded = min(max(x, _LEAST), _MOST)
    whole = fma(bounded, _LOG2_E, _ROUNDER)
    power = as_bits(whole) << np.uint32(23)
    whole -= _ROUNDER
    r = fma(whole, -_LN2_LOW, fma(whole, -_LN2_HIGH, bounded))
    p = fma(fma(fma(fma(fma(_C7, r, _C6), r, _C5), r, _C4), r, _C3), r, _C2)
    p = fma(p, r * r, r) + _ONE
    return as_float(as_bits(p) + power) if x >= _LEAST else np.float32(0)


@njit(**JIT)
def round_table(matrix, table):
    """Sets table (uint16) = matrix (float32) rounded to bfloat16."""
    for row in range(matrix.shape[0]):
        for column in range(matrix.shape[1]):
            table[row, column] = rounded(matrix[row, column])


@njit(**JIT)
def embed(table, tokens, hidden, rows):
    """Sets hidden[m] = the bfloat16 row tokens[m] of the table, modulo its entries."""
    for row in range(rows):
        token = tokens[row] % table.shape[0]
        for column in range(table.shape[1]):
            hidden[row, column] = as_float(np.uint32(table[token, column]) << np.uint32(16))


@njit(**JIT)
def keep(x, seats, states, rows):
    """Sets states[slot, position + 1] = x for trunk rows; seats: [4, n], see cache.RowPlaces."""
    for m in range(rows):
        slot, position = seats[0, m], seats[1, m] + 1
        if slot >= 0 and seats[2, m] < 0 and position < states.shape[1]:
            for column in range(states.shape[2]):
                states[slot, position, column] = x[m, column]


@njit(**JIT)
def recall(states, own, seats, hidden, rows):
    """Sets hidden[m] = states[slot, position], after the trunk of `own`; zeros without a slot."""
    for m in range(rows):
        slot, position = seats[0, m], seats[1, m]
        for column in range(states.shape[2]):
            value = np.float32(0)
            if slot >= 0:
                ahead = 0 <= seats[3, m] < position
                value = own[slot, position, column] if ahead else states[slot, position, column]
            hidden[m, column] = value


@njit(**JIT)
def inverse_rms(row, eps):
    """Returns 1 / √(mean of the squares + eps) of a vector, which adds up in 8 partial sums."""
    a = b = c = d = e = f = g = h = np.float32(0)
    width = len(row)
    whole = width - width % 8
    for k in range(0, whole, 8):
        a = fma(row[k], row[k], a)
        b = fma(row[k + 1], row[k + 1], b)
        c = fma(row[k + 2], row[k + 2], c)
        d = fma(row[k + 3], row[k + 3], d)
        e = fma(row[k + 4], row[k + 4], e)
        f = fma(row[k + 5], row[k + 5], f)
        g = fma(row[k + 6], row[k + 6], g)
        h = fma(row[k + 7], row[k + 7], h)
    for k in range(whole, width):
        a = fma(row[k], row[k], a)
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    return _ONE / np.sqrt(total / np.float32(width) + eps)


@njit(**JIT)
def norm(hidden, delta, adds, weight, eps, x, rows):
    """Adds delta to hidden (if `adds`), and sets x = RMSNorm(hidden) · weight."""
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
    """Sets inner = silu(gate) · up; gate_up holds gate's `width` columns, then up's."""
    for m in range(rows):
        for k in range(width):
            gate = gate_up[m, k]
            inner[m, k] = gate / (_ONE + exp(-gate)) * gate_up[m, width + k]


@njit(**JIT)
def turn_heads(qkv, first, heads, width, weight, eps, cosines, sines, position, m):
    """Normalises (if there is a weight) and rotates `heads` heads of a row from column `first`."""
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
def sum_parts(parts, delta, rows):
    """Sets delta[:rows] = the sum of parts [T, rows, width] in rising order of rank."""
    for m in range(rows):
        for k in range(parts.shape[2]):
            total = parts[0, m, k]
            for rank in range(1, parts.shape[0]):
                total += parts[rank, m, k]
            delta[m, k] = total


@njit(**JIT)
def top_k(logits, width, k, ids, values, rows):
    """Writes the k largest of each row's first `width` logits; of equal ones the lower comes first.

    Blocks whose largest logit does not exceed the k-th best so far are passed over.
    """
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
                    values[m, place], ids[m, place] = value, column
