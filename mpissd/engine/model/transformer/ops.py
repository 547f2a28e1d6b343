"""The interface of a transformer's operations, which each backend that computes implements.

Device arrays are opaque: weights, buffers and caches are made by the same object that reads them.
An operation computes the first `rows` rows of a forward. A row's numbers depend neither on the
other rows, nor on how many there are, nor on which pages and lanes hold its K and V, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Array, Backend, HostArray
from mpissd.engine.comm.group import Group
from mpissd.engine.model.transformer.cache import CacheSizes, RowPlaces
from mpissd.engine.model.transformer.checkpoint import Floats, Part
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.sources import library

_MADE_BY = {"numpy": ("numba_ops.ops", "NumbaOps"), "cupy": ("cupy_ops.megakernel", "chosen")}


@dataclass
class LayerWeights:
    """One layer's weights on this rank; None: the family, or the kind of draft, lacks it."""

    attention_norm: Array = None
    qkv: Array = None  # q, k and v as one product
    qkv_bias: Array | None = None
    q_norm: Array | None = None  # [head_dim], the weight of each head's norm
    k_norm: Array | None = None
    o: Array = None
    ffn_norm: Array = None
    gate_up: Array = None
    down: Array = None


class Ops(Protocol):
    """A transformer's operations on one rank's device, for one model and its share of heads."""

    kernel: str  # name of the kernels, for profiles
    page: int  # positions of a page; attention is computed page by page
    computes_padding: bool  # whether a forward computes its whole bucket, as a captured graph does

    def matrix(self, parts: Sequence[Part]) -> Array:
        """Returns the packed weight of one product: the parts' outputs side by side."""

    def qkv_matrix(self, parts: Sequence[Part]) -> Array:
        """Returns the packed weight of q, k and v, which `qkv` reads."""
        return self.matrix(parts)

    def gate_up(self, gate: Part, up: Part) -> Array:
        """Returns the packed weight that `gated` reads."""

    def table(self, embedding: Part) -> Array:
        """Returns the embedding table, which `embed` reads."""

    def vector(self, values: Floats) -> Array:
        """Returns a norm's weight or a bias."""

    def overwrite(self, old: Array, new: Array) -> None:
        """Copies a weight or a vector into another one of the same kind and shape, in place."""

    def buffer(self, rows: int, width: int) -> Array:
        """Returns a buffer of activations between two operations."""

    def normed(self, rows: int, width: int) -> Array:
        """Returns a buffer that `norm` writes."""
        return self.buffer(rows, width)

    def hidden(self, rows: int) -> Array:
        """Returns a buffer of the residual stream (float32)."""

    def delta(self, rows: int) -> Array:
        """Returns a buffer for the sum over ranks that is added to the residual stream."""
        return self.hidden(rows)

    def logits(self, rows: int, width: int) -> Array:
        """Returns a buffer of logits (float32), which the LM head's product writes."""

    def cache(self, sizes: CacheSizes, row_places: RowPlaces) -> Array:
        """Returns the KV cache and its lanes; each forward reads the places of its rows in
        `row_places`."""

    def clear(self, cache: Array) -> None:
        """Sets all keys and values to 0: attention may multiply unused ones by 0, and 0 · NaN is
        NaN."""

    def move(self, cache: Array, lane: int, slot: int, start: int, stop: int) -> None:
        """Copies a lane's first K and V of all layers to positions start … stop − 1 of a slot."""

    def states(self, slots: int, positions: int) -> Array:
        """Returns zeros for the hidden state before each position, [slots, positions, hidden]."""

    def keep(self, x: Array, cache: Array, states: Array, rows: int) -> None:
        """Sets states[slot][position + 1] = x for each trunk row, except at the last position."""

    def recall(self, target: Array, draft: Array, cache: Array, hidden: Array, rows: int) -> None:
        """Sets hidden to the state before each row's position; zeros without a slot. The state is
        from `target` up to the row's trunk (forwards.Places), from `draft` after it."""

    def begin(self, cache: Array, rows: int) -> None:
        """Copies the places of a forward's rows to the device, as the forward's first operation."""

    def embed(self, table: Array, tokens: HostArray, hidden: Array, rows: int) -> None:
        """Sets hidden[m] = table[tokens[m] mod entries], as imposed tokens may be of any value."""

    def norm(self, hidden: Array, delta: Array | None, weight: Array, x: Array, rows: int) -> None:
        """Adds delta (if any) to hidden, and sets x = RMSNorm(hidden) · weight."""

    def qkv(self, x: Array, layer: LayerWeights, cache: Array, n: int, q: Array, rows: int) -> None:
        """Computes q, k and v of layer `n`, and stores k and v in the cache. Adds the bias,
        normalises each head of q and k, and rotates both, if the family does so."""

    def attend(self, cache: Array, number: int, q: Array, out: Array, rows: int) -> None:
        """Sets out = softmax(q·kᵀ/√head_dim)·v over the positions that each row may attend."""

    def product(self, x: Array, weight: Array, out: Array, rows: int) -> None:
        """Sets out = x·weightᵀ."""

    def gated(self, x: Array, gate_up: Array, inner: Array, rows: int) -> None:
        """Sets inner = silu(x·gateᵀ) · (x·upᵀ)."""

    def at_once(self, weights: Any, memory: Any, cache: Array, rows: int) -> bool:
        """Computes all layers and the LM head in one operation, if it can; returns whether it did.
        weights, memory: the stack's TransformerWeights and Buffers; memory.hidden is the input."""
        return False

    def sum_ranks(self, group: Group, delta: Array, rows: int) -> None:
        """Sums delta over the ranks in rank order, in place: equal bits for any number of rows."""

    def top_k(self, logits: Array, k: int, ids: Array, values: Array, rows: int) -> None:
        """Writes the k largest logits of each row, largest first, and their columns, to `values`
        (float32 [rows, k]) and `ids` (int32); of equal logits the lower column comes first."""

    def ids(self, ids: Ints) -> Array:
        """Returns host integers as an array of the device."""
        return ids

    def run_stage(self, stage: Any) -> None:
        """Computes a device_rounds.RoundStage between two forwards."""
        stage.run()

    def grow(self, sheet: Any, rows: int, draft: Any, ids: Array) -> None:
        """Computes a stage between two forwards of DeviceGrowth; arguments of GrowthSheet.run."""
        sheet.run(rows, draft, ids)

    def spread(self, group: Group, ints: HostArray, count: int) -> None:
        """Sets the first `count` ints of all ranks to rank 0's."""
        parts = np.empty((group.size, count), np.int32)
        group.all_gather(ints[:count], parts)
        ints[:count] = parts[0]

    def adopt(self, cache: Array, moves: Ints) -> None:
        """Copies accepted paths from lanes to slots; moves: of one cache, see Sheet.moves."""
        for lane, slot, start, count in moves.tolist():
            if lane >= 0:
                self.move(cache, lane, slot, start, start + count)

    def inherit(self, cache: Array, copies: Array) -> None:
        """Copies the first K and V of lanes to other lanes; copies: like trees.Shapes.copies."""

    def draws(self, logits: Array) -> Any:
        """Returns an object that samples from these logits on the device; None: the host does."""
        return None

    def read(self, logits: Array, rows: Sequence[int]) -> Floats:
        """Returns these rows of the logits on the host, float32 [n, columns], after a forward."""


def ops_of(
    backend: Backend,
    config: TransformerConfig,
    *,
    heads: int,
    kv_heads: int,
    page: int | None = None,
) -> Ops | None:
    """Returns the operations of this backend for a model's share of heads on one rank. page:
    positions of a page of the KV cache (None: the backend's default). Returns None for a backend
    that computes nothing (emulated). Raises ConfigError if a library is missing."""
    if backend.name == "emulated":
        return None
    if backend.name not in _MADE_BY:
        allowed = ", ".join(_MADE_BY)
        raise ConfigError(f"forward=transformer with backend={backend.name}: allowed: {allowed}")
    module, name = _MADE_BY[backend.name]
    if backend.name == "numpy":
        library("numba", "forward=transformer on a CPU")
    sizes = {"heads": heads, "kv_heads": kv_heads, "page": page}
    ops: Ops = getattr(import_module(f"{__package__}.{module}"), name)(backend, config, **sizes)
    return ops
