"""The interface of a transformer's operations, which the NumPy and the CuPy backend implement.

Device arrays are opaque: only the object that makes weights, buffers and caches reads them. An
operation computes the first `rows` rows of a forward. A row's numbers depend neither on the other
rows, nor on how many there are, nor on which memory holds its keys and values, bit for bit.
"""

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
    """One layer's weights on this rank; None where the model family or kind of draft has none."""

    attention_norm: Array = None
    qkv: Array = None  # the weights of q, k and v as one matrix
    qkv_bias: Array | None = None
    q_norm: Array | None = None  # [head_dim], the weight of the RMSNorm of each query head
    k_norm: Array | None = None
    o: Array = None
    ffn_norm: Array = None
    gate_up: Array = None
    down: Array = None


class Ops(Protocol):
    """Interface of the operations of one transformer's forward, over one rank's share of heads."""

    kernel: str  # name of the product kernels, stored with measured times
    page: int  # positions of a KV page; attention is computed page by page
    computes_padding: bool  # whether padding rows are computed, too, as in a captured graph

    def matrix(self, parts: Sequence[Part]) -> Array:
        """Packs the weight of one matrix product, with the outputs of all `parts` joined."""

    def qkv_matrix(self, parts: Sequence[Part]) -> Array:
        """Packs the weights of q, k and v into one matrix, which the operation `qkv` reads."""
        return self.matrix(parts)

    def gate_up(self, gate: Part, up: Part) -> Array:
        """Packs the FFN's gate and up matrices into one, which the operation `gated` reads."""

    def table(self, embedding: Part) -> Array:
        """Returns the embedding table in the form that the operation `embed` reads."""

    def vector(self, values: Floats) -> Array:
        """Copies a norm's weight or a bias to the device."""

    def overwrite(self, old: Array, new: Array) -> None:
        """Overwrites `old` in place by `new`, a weight or a vector of the same kind and shape."""

    def buffer(self, rows: int, width: int) -> Array:
        """Allocates activations [rows, width], which one operation writes and another one reads."""

    def normed(self, rows: int, width: int) -> Array:
        """Allocates the output [rows, width] of the operation `norm`."""
        return self.buffer(rows, width)

    def hidden(self, rows: int) -> Array:
        """Allocates the residual stream, float32 [rows, hidden]."""

    def delta(self, rows: int) -> Array:
        """Allocates a product's sum over ranks, [rows, hidden], which the residual stream adds."""
        return self.hidden(rows)

    def logits(self, rows: int, width: int) -> Array:
        """Allocates logits, float32 [rows, width], which the LM head's product writes."""

    def cache(self, sizes: CacheSizes, row_places: RowPlaces) -> Array:
        """Allocates the KV cache, including its lanes (scratch memory of speculative branches).
        Each forward reads in `row_places` where its rows lie in the cache."""

    def clear(self, cache: Array) -> None:
        """Sets all keys and values to 0: attention may multiply them by 0, and 0 · NaN is NaN."""

    def move(self, cache: Array, lane: int, slot: int, start: int, stop: int) -> None:
        """Copies an accepted branch into its sequence in all layers, as Forwards.move does."""

    def states(self, slots: int, positions: int) -> Array:
        """Allocates the hidden state before each position, as zeros [slots, positions, hidden]."""

    def keep(self, x: Array, cache: Array, states: Array, rows: int) -> None:
        """Stores hidden states for a draft that reads them: states[slot][position + 1] = x for each
        row that is stored in its slot (and not in a lane), except at the last position."""

    def recall(self, target: Array, draft: Array, cache: Array, hidden: Array, rows: int) -> None:
        """Sets each row of `hidden` to the last hidden state before the row's position; 0 for
        padding. The state is read from `target` up to the row's trunk (the tokens before its
        branch), and from `draft` after the trunk."""

    def begin(self, cache: Array, rows: int) -> None:
        """Begins a forward: copies to the device where its rows lie in the KV cache."""

    def embed(self, table: Array, tokens: HostArray, hidden: Array, rows: int) -> None:
        """Sets hidden[m] = table[tokens[m] mod entries]; tokens of a trace may exceed the table."""

    def norm(self, hidden: Array, delta: Array | None, weight: Array, x: Array, rows: int) -> None:
        """Adds delta (if any) to hidden, the residual stream; sets x = RMSNorm(hidden) · weight."""

    def qkv(self, x: Array, layer: LayerWeights, cache: Array, n: int, q: Array, rows: int) -> None:
        """Computes q, k and v of layer `n` from the normalised input x, with biases and norms of
        heads if the model family has them; rotates q and k, and writes k and v to the cache."""

    def attend(self, cache: Array, number: int, q: Array, out: Array, rows: int) -> None:
        """Sets out = softmax(q·kᵀ/√head_dim)·v over a row's visible positions in layer `number`."""

    def product(self, x: Array, weight: Array, out: Array, rows: int) -> None:
        """Sets out = x·weightᵀ."""

    def gated(self, x: Array, gate_up: Array, inner: Array, rows: int) -> None:
        """Sets inner, the FFN's inner vector, to silu(x·gateᵀ) · (x·upᵀ)."""

    def at_once(self, group: Group, weights: Any, memory: Any, cache: Array, rows: int) -> bool:
        """Computes all layers and the LM head in one kernel, if this device, model and the ranks'
        `group` allow it; returns whether it did. weights, memory: the model's TransformerWeights
        and Buffers; memory.hidden is the input."""
        return False

    def sum_ranks(self, group: Group, delta: Array, rows: int) -> None:
        """Sums delta over the ranks in place. The order of the ranks is fixed, so that a row's sum
        has the same bits for any number of rows."""

    def top_k(self, logits: Array, k: int, ids: Array, values: Array, rows: int) -> None:
        """Writes each row's k largest logits, largest first, to `values` (float32 [rows, k]), and
        their columns to `ids` (int32 [rows, k]). Of equal logits the lower column comes first."""

    def ids(self, ids: Ints) -> Array:
        """Copies integers to the device, and returns the copy."""
        return ids

    def run_stage(self, stage: Any) -> None:
        """Runs a device_rounds.RoundStage, the small kernel between two forwards that makes the
        inputs of the second from the likeliest tokens of the first."""
        stage.run()

    def grow(self, sheet: Any, rows: int, draft: Any, ids: Array) -> None:
        """Makes the input of a draft's next step without the host: appends one token to each
        speculative branch. sheet: the branches (GrowthSheet, whose `run` does this on a host).
        rows: the number of branches, padded. draft: the draft's buffers. ids: the token of each
        column of its logits (None: column n is token n)."""
        sheet.run(rows, draft, ids)

    def spread(self, group: Group, ints: HostArray, count: int) -> None:
        """Broadcasts the first `count` elements of `ints` from rank 0 to all ranks, in place."""
        parts = np.empty((group.size, count), np.int32)
        group.all_gather(ints[:count], parts)
        ints[:count] = parts[0]

    def adopt(self, cache: Array, moves: Ints) -> None:
        """Copies accepted branches from lanes (scratch memory) to their sequences' slots. moves:
        int32 [sequences, 4], rows of (lane, slot, first position, number of tokens); lane < 0:
        nothing to copy."""
        for lane, slot, start, count in moves.tolist():
            if lane >= 0:
                self.move(cache, lane, slot, start, start + count)

    def inherit(self, cache: Array, copies: Array) -> None:
        """Copies keys and values from lane to lane (scratch memory of a branch). copies: int32 [n,
        3], rows of (source, destination, number of tokens); source < 0: nothing to copy."""

    def draws(self, logits: Array) -> Any:
        """Returns a sampler of tokens from `logits` on the device; None if the host samples."""
        return None

    def read(self, logits: Array, rows: Sequence[int]) -> Floats:
        """Copies these rows of the last forward's logits to the host, float32 [n, columns]."""


def ops_of(
    backend: Backend,
    config: TransformerConfig,
    *,
    heads: int,
    kv_heads: int,
    page: int | None = None,
) -> Ops | None:
    """Makes the operations of a transformer on this backend; returns None for the emulated backend,
    which computes nothing. heads, kv_heads: the query heads and KV heads on this rank. page:
    positions of a page of the KV cache (None: the backend's default). Raises ConfigError for a
    missing library, or another backend."""
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
