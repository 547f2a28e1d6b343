# mypy: ignore-errors
"""The kernel of `attend`: a program for each sequence and KV head, at the memory's rate.

Softmax over blocks of positions with a running maximum (Milakov and Gimelshein, 1805.02867).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ROWS = 16  # the fewest rows of a tensor-core product
BLOCK = 64  # positions at a time


@triton.jit(do_not_specialize=["seen"])
def _attend(
    q,
    k,
    v,
    out,
    seen,
    length,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """HEADS: query heads of a KV head. out = softmax(q kᵀ scale) v over `seen` positions."""
    which = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    places = (which * HEADS + row[:, None]) * D + column[None, :]
    queries = tl.load(q + places, mask=row[:, None] < HEADS, other=0.0)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, D), tl.float32)
    for start in range(0, seen, BLOCK):
        at = start + tl.arange(0, BLOCK)
        cached = (which * length + at[:, None]) * D + column[None, :]
        keys = tl.load(k + cached, mask=at[:, None] < seen, other=0.0)
        values = tl.load(v + cached, mask=at[:, None] < seen, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where(at[None, :] < seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrunk = tl.exp(largest - higher)
        total = total * shrunk + tl.sum(weights, 1)
        sums = sums * shrunk[:, None] + tl.dot(weights.to(values.dtype), values)
        largest = higher
    attended = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + places, attended, mask=row[:, None] < HEADS)


def attend(q: Any, keys: Any, values: Any, seen: int) -> Any:
    """Computes mpissd.learn.sample.attend; at most 16 query heads a KV head."""
    num, kv_heads, length, d = keys.shape
    q = q.contiguous()
    out = torch.empty_like(q)
    sizes = {"HEADS": q.shape[1] // kv_heads, "D": d, "ROWS": ROWS, "BLOCK": BLOCK}
    _attend[(num * kv_heads,)](q, keys, values, out, seen, length, d**-0.5, **sizes)
    return out.flatten(1)
