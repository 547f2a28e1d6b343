"""The operations of a transformer of which up to 32 rows are one persistent kernel (whole.py).

RMSNorm comes in two parts (arithmetic.cu), and q and k in the order of their rotation, so that
nothing stands between two products. More rows take separate kernels with the same bits (late.cu).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.engine.comm.group import Group
from mpissd.engine.model.transformer.cache import CacheSizes, Seats
from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.cupy_ops import attention
from mpissd.engine.model.transformer.cupy_ops.attention import Cache
from mpissd.engine.model.transformer.cupy_ops.launching import ceil_div
from mpissd.engine.model.transformer.cupy_ops.norms import (
    LATE_FILES,
    SKINNY_MACROS,
    Normed,
    normed,
)
from mpissd.engine.model.transformer.cupy_ops.ops import CupyOps
from mpissd.engine.model.transformer.cupy_ops.products import PackedWeight
from mpissd.engine.model.transformer.cupy_ops.whole import FIRST_CAPABILITY, Whole, counters
from mpissd.engine.model.transformer.cupy_ops.whole_plan import geometry
from mpissd.engine.model.transformer.ops import Layer, Part

_NORM_THREADS, _MAX_WIDTH = 512, 16384
_NORM_BYTES = 4 * _MAX_WIDTH // 16  # its tiles' squares
_ROTATE_FILES = (*attention.FILES, "arithmetic", "late_rotate")


def shares_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a daemon of CUDA's MPS may give parts of the GPU to other processes.

    The kernel's blocks wait for one another, so all of them have to be on the GPU at once.
    """
    return Path(environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


@dataclass(frozen=True)
class WholeCache(Cache):
    """A cache with what the kernel `whole` needs: see Whole.

    counters: uint32, set to 0 by the first norm of a forward. tables: on the device, by rows.
    """

    counters: Any = None
    tables: dict[int, Any] = field(default_factory=dict)


class WholeOps(CupyOps):
    """Operations of one model on one GPU of compute capability 9.0 or more."""

    kernel = "whole"

    def __init__(self, backend: Any, config: TransformerConfig, **sizes: Any) -> None:
        super().__init__(backend, config, **sizes)
        self._heads = int(sizes["heads"])
        self._whole = Whole(self._launcher, config, self._attention, backend.stop)

    @classmethod
    def suits(cls, backend: Any, config: TransformerConfig, heads: int) -> bool:
        """Returns whether these operations compute a model's `heads` heads: all of them, of a model
        and on a GPU that the kernel knows."""
        is_all = heads == config.shape.num_heads
        capability = int(str(backend.info.compute_capability).replace(".", ""))
        fits = not config.qk_norm and config.shape.hidden >= Whole.least_hidden and not config.kind
        if not (is_all and fits) or capability < FIRST_CAPABILITY or shares_gpu():
            return False
        room = backend.launcher(early=cls.early).shared_bytes
        return geometry(1, config.shape.head_dim, 0, room).fits

    def qkv_matrix(self, checkpoint: Checkpoint, parts: Sequence[Part]) -> PackedWeight:
        """Packs q, k and v so that a tile has 8 columns of a head's first half, and 8 that rotate
        with them."""
        sized = [(part, self._size(part)) for part in parts]
        return self._packer.heads(checkpoint, sized, self._config.shape.head_dim)

    def normed(self, rows: int, width: int) -> Normed:
        return normed(self._launcher, self.buffer(rows, width))

    def cache(self, sizes: CacheSizes, seats: Seats) -> WholeCache:
        made = self._attention.cache(sizes, seats)
        count = counters(sizes.layers, sizes.kv_heads)
        return WholeCache(**vars(made), counters=self._launcher.zeros((count,), np.int32))

    def keep(self, x: Normed, cache: Cache, states: Any, rows: int) -> None:
        args = (x.values, x.factors, *self._seated(cache, states), states)
        self._late("late_keep", rows, 256, args)

    def norm(self, hidden: Any, delta: Any | None, weight: Any, x: Normed, rows: int) -> None:
        self._norm(hidden, delta, weight, x, rows, None)

    def _norm(
        self, hidden: Any, delta: Any | None, weight: Any, x: Normed, rows: int, zeroed: Any
    ) -> None:
        sizes = np.int32(hidden.shape[1]), np.float32(self._config.norm_eps)
        words = np.int32(0 if zeroed is None else zeroed.size)
        args = (hidden, delta, weight, x.values, *x.state, *sizes, zeroed, words)
        kind = "float32" if delta is None else str(delta.dtype)
        self._late(f"late_norm_{kind}", rows, _NORM_THREADS, args)

    def qkv(self, x: Normed, layer: Layer, cache: Cache, number: int, q: Any, rows: int) -> None:
        self.product(x, layer.qkv, cache.qkv, rows)
        args = (
            cache.qkv,
            layer.qkv_bias,
            cache.turns,
            cache.words,
            np.int32(cache.seats.rows.shape[1]),
            *self._attention.arguments(cache, number),
            np.int32(self._heads),
            np.float32(self._attention.scale),
            q,
        )
        every = self._heads + 2 * cache.sizes.kv_heads
        kernel = self._launcher.function("late_rotate", _ROTATE_FILES, self._attention.macros)
        self._launcher.launch(kernel, (rows, ceil_div(every, 4)), (32, 4), args)

    def product(self, x: Any, weight: PackedWeight, out: Any, rows: int) -> None:
        if isinstance(x, Normed):
            self._products.multiply(x.values, weight, out, rows, x.factors)
        else:
            self._products.multiply(x, weight, out, rows)

    def gated(self, x: Normed, gate_up: PackedWeight, inner: Any, rows: int) -> None:
        self.product(x, gate_up, inner, rows)

    def at_once(self, group: Group, weights: Any, memory: Any, cache: Any, rows: int) -> bool:
        if group.size > 1 or not self._whole.suits(rows):
            return False
        self._whole.launch(weights, memory, cache, rows, self._first_norm)
        return True

    def _first_norm(self, hidden: Any, weight: Any, x: Normed, rows: int, counters: Any) -> None:
        self._norm(hidden, None, weight, x, rows, counters)

    def _late(self, name: str, rows: int, threads: int, args: tuple[Any, ...]) -> None:
        kernel = self._launcher.function(name, LATE_FILES, SKINNY_MACROS)
        self._launcher.launch(kernel, (rows,), (threads,), args, _NORM_BYTES)


def chosen(backend: Any, config: TransformerConfig, *, heads: int, **sizes: Any) -> CupyOps:
    """Returns the operations of a model's share of heads; raises as CupyOps."""
    kind = WholeOps if WholeOps.suits(backend, config, heads) else CupyOps
    return kind(backend, config, heads=heads, **sizes)
