"""Where the operations of whole.cu leave what others read (see `ARRIVE` there)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpissd.engine.model.transformer.cupy_ops.launching import Launcher, ceil_div
from mpissd.engine.model.transformer.cupy_ops.norms import TILE, Normed


@dataclass(frozen=True)
class Between:
    """Float16 [rows, width] of a layer: attended, behind o, the FFN's inner values, behind down."""

    attended: Any
    middle: Any
    inner: Any
    x: Any


@dataclass(frozen=True)
class Places:
    """The places of layers of even and of odd number.

    first: what the first norm writes: x of the layer in front of layer 0, and the norms of all.
    arrivals: both parts of `of`, as they lie in memory. scratch: what a forward sets to 0xFF before
    it begins; None: nothing. parts: of attention's splits, by their names in struct Model, where
    they are not those of the cache.
    """

    of: tuple[Between, Between]
    first: Normed
    arrivals: Any = None
    scratch: Any = None
    parts: dict[str, Any] = field(default_factory=dict)


def standing(memory: Any) -> Places:
    """Returns the buffers of a stack, which each layer uses again."""
    x = memory.x.values
    between = Between(memory.attended, x, memory.inner, x)
    return Places((between, between), memory.x)


def arriving(
    launcher: Launcher, rows: int, layers: int, width: int, attended: int, inner: int
) -> Places:
    """Allocates places of their own for so many rows."""
    norms, tiles = 2 * layers + 1, width // TILE
    layer = rows * (2 * width + attended + inner)  # float16
    words = [ceil_div(4 * n, 16) * 4 for n in (norms * rows * tiles, norms * rows, rows, rows)]
    scratch = launcher.empty((layer + sum(words),), np.float32)
    every, start = list[Any](), 0
    for length in (layer, *words):
        every.append(scratch[start : start + length])
        start += length
    arrivals = every[0].view(np.float16)
    squares = every[1][: norms * rows * tiles].reshape(norms, rows, tiles)
    powers = every[2][: norms * rows].reshape(norms, rows)
    of = (
        _parts(arrivals[:layer], rows, width, attended, inner),
        _parts(arrivals[layer:], rows, width, attended, inner),
    )
    first = Normed(of[1].x, squares, every[3], powers, every[4])
    return Places(of, first, arrivals, scratch)


def awaited_parts(launcher: Launcher, cache: Any, rows: int, attended: int) -> dict[str, Any]:
    """Returns places for the parts of attention's splits, with all bits set.

    A forward leaves them so.
    """
    splits, head = cache.splits, cache.sizes.head_dim
    queries = rows * attended // head
    made = {
        "partial": launcher.empty((queries * splits * head,), np.float32),
        "tops": launcher.empty((queries * splits * 2,), np.float32),
    }
    for array in made.values():
        launcher.upload(np.full(array.shape, -1, np.int32).view(np.float32), array)
    return made


def _parts(values: Any, rows: int, width: int, attended: int, inner: int) -> Between:
    parts, start = list[Any](), 0
    for size in (attended, width, inner, width):
        parts.append(values[start : start + rows * size].reshape(rows, size))
        start += rows * size
    return Between(*parts)
