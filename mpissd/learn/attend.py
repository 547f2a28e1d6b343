"""Attention of one new position of many sequences over a static cache."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch.nn.functional as F

Tensor = Any


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: int) -> Tensor:
    """Returns [n, heads · d]: q [n, heads, d] over the first `seen` of keys, values [n, kv, L, d].

    On a GPU with Triton the query heads of a KV head read its cache once, in one block of rows.
    """
    is_block = q.shape[-1] in (16, 32, 64, 128) and q.shape[1] <= 16 * keys.shape[1]
    if q.is_cuda and is_block and has_triton():
        from mpissd.learn.triton_attend import attend as fast

        return fast(q, keys, values, seen)
    rows = q.unflatten(1, (keys.shape[1], -1))  # query heads of a KV head, as rows
    return F.scaled_dot_product_attention(rows, keys[:, :, :seen], values[:, :, :seen]).flatten(1)


@functools.cache
def has_triton() -> bool:
    """Whether Triton, which comes with PyTorch for GPUs, is installed."""
    return importlib.util.find_spec("triton") is not None
