"""The interface of a transformer's operations, which each backend that computes implements.

Device arrays are opaque: weights, buffers and caches are made by the same object that reads them.
Every operation computes its first `rows` rows. A row's numbers depend neither on the other rows nor
on how many they are, nor on the pages and lanes that hold its K and V, bit for bit.
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
class Layer:
    """One layer's weights on this rank; an optional one is None where the family lacks it.

    A layer without attention has only the last three.
    """

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
    """A transformer's operations on one rank's device, for one model and its share of heads.

    Methods with a body are defaults.
    """

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

    def cache(self, sizes: CacheSizes, seats: RowPlaces) -> Array:
        """Returns the KV cache and its scratch memory; `seats` holds the places of a forward's rows
        in it, which operations read at every forward."""

    def clear(self, cache: Array) -> None:
        """Sets all keys and values to 0: attention may multiply unused ones by 0, and 0 · NaN is
        NaN."""

    def move(self, cache: Array, lane: int, slot: int, start: int, stop: int) -> None:
        """Copies a lane's first K and V of all layers to positions start … stop − 1 of a slot."""

    def states(self, slots: int, positions: int) -> Array:
        """Returns zeros for the hidden state in front of each position of each slot."""

    def keep(self, x: Array, cache: Array, states: Array, rows: int) -> None:
        """Sets states[slot][position + 1] = x for each trunk row; the last position has none."""

    def recall(self, states: Array, own: Array, cache: Array, hidden: Array, rows: int) -> None:
        """Sets hidden = states[slot][position]; own[slot][position] for a row after its trunk.

        A row without a slot gets zeros.
        """

    def begin(self, cache: Array, rows: int) -> None:
        """Brings the places of a forward's rows to the device; a forward's first operation."""

    def embed(self, table: Array, tokens: HostArray, hidden: Array, rows: int) -> None:
        """Sets hidden[m] = table[tokens[m] mod entries]: imposed tokens are of any vocabulary."""

    def norm(self, hidden: Array, delta: Array | None, weight: Array, x: Array, rows: int) -> None:
        """Adds delta (if any) to hidden, and sets x = RMSNorm(hidden) · weight."""

    def qkv(self, x: Array, layer: Layer, cache: Array, number: int, q: Array, rows: int) -> None:
        """Computes q, k and v of layer `number`, and stores k and v in the cache.

        Adds the bias, normalises each head of q and k, and rotates both, if the family does so.
        """

    def attend(self, cache: Array, number: int, q: Array, out: Array, rows: int) -> None:
        """Sets out = softmax(q·kᵀ/√head_dim)·v over the positions that each row may attend."""

    def product(self, x: Array, weight: Array, out: Array, rows: int) -> None:
        """Sets out = x·weightᵀ."""

    def gated(self, x: Array, gate_up: Array, inner: Array, rows: int) -> None:
        """Sets inner = silu(x·gateᵀ) · (x·upᵀ)."""

    def at_once(self, weights: Any, memory: Any, cache: Array, rows: int) -> bool:
        """Computes all layers and the LM head in one operation, after `embed`, if it can.

        weights: TransformerWeights. memory: Buffers. Returns whether it has done so.
        """
        return False

    def sum_ranks(self, group: Group, delta: Array, rows: int) -> None:
        """Sums delta over the ranks in rank order, in place: equal bits for any number of rows."""

    def top_k(self, logits: Array, k: int, ids: Array, values: Array, rows: int) -> None:
        """Writes the k largest logits of each row, largest first, and their columns.

        Of equal logits the lower column comes first. ids: int32 [rows, k]; values: float32.
        """

    def ids(self, ids: Ints) -> Array:
        """Returns the tokens of an LM head's outputs, as `chained` reads them."""
        return ids

    def chained(self, stage: Any) -> None:
        """Computes a chained.Stage between two forwards that the device chains."""

    def grow(self, sheet: Any, rows: int, draft: Any, ids: Array) -> None:
        """Computes a stage of growing.GrowthSheet between two forwards."""
        sheet.run(rows, draft, ids)

    def spread(self, group: Group, ints: HostArray, count: int) -> None:
        """Sets the first `count` ints of every rank to rank 0's."""
        every = np.empty((group.size, count), np.int32)
        group.all_gather(ints[:count], every)
        ints[:count] = every[0]

    def adopt(self, cache: Array, moves: Ints) -> None:
        """Copies accepted paths from their lanes into the trunk; moves: of one cache, like
        chained.Sheet.moves, read when it runs."""
        for lane, slot, start, count in moves.tolist():
            if lane >= 0:
                self.move(cache, lane, slot, start, start + count)

    def inherit(self, cache: Array, copies: Array) -> None:
        """Copies the beginnings of lanes to other lanes; copies: like trees.Shapes.copies."""

    def draws(self, logits: Array) -> Any:
        """Returns what draws tokens from these logits on the device; None: the host does."""
        return None

    def read(self, logits: Array, rows: Sequence[int]) -> Floats:
        """Returns these rows of the logits on the host, after the forward: float32 [n, columns]."""


def ops_of(
    backend: Backend,
    config: TransformerConfig,
    *,
    heads: int,
    kv_heads: int,
    page: int | None = None,
) -> Ops | None:
    """Returns the operations of this backend for a model's share of heads on one rank.

    page: positions of a page (None: the backend's own).
    None for a backend that computes nothing (emulated). Raises ConfigError if a library is missing.
    """
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
