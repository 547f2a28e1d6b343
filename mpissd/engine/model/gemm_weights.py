"""One rank's random weights of a GEMM-only transformer: a slice of the whole model's matrices.

The weight scales preserve the variance, so that values neither overflow nor vanish in 80 layers.
Several stacks that differ only in their buffers (rows, sequences, outputs) may share the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpissd.engine.backend.base import Backend, WeightPart
from mpissd.engine.model.shard import ForwardOptions, Shard

TABLE_ENTRIES = 1024
_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(7)
_MATRICES = 7
# LM head n has this key − 2n; the product below it, in a head-sized draft, this key − 2n − 1.
_HEAD_KEY = 0x7FFF0000
_TABLE_KEY = 0x7FFF0001
_FUSION_KEY = 0x7FFF0002


@dataclass
class Layer:
    """Weights of one layer; with the option `fuse`, qkv and gate_up hold one weight each."""

    qkv: list[Any]
    o: Any
    gate_up: list[Any]
    down: Any


class GemmWeights:
    """One rank's weights: fusion product, layers, heads, LM heads, and embedding table."""

    def __init__(
        self, backend: Backend, shard: Shard, options: ForwardOptions, *, max_rows: int, seed: int
    ) -> None:
        """Makes the weights; `max_rows`, of their largest forward, decides a GPU's layout."""
        self.backend, self.shard, self.options = backend, shard, options
        self._seed, self.max_rows = seed, max_rows
        backend.plan_rows(max_rows)
        self.layers = [self._layer(n) for n in range(shard.shape.num_layers)]
        self.fusion = [self._whole(_FUSION_KEY, *size) for size in shard.before_layers()]
        self.heads = [
            self._whole(_HEAD_KEY - 2 * n - 1, *size)
            for n, size in enumerate(shard.behind_layers())
        ]
        self.lm_heads = [
            self._whole(_HEAD_KEY - 2 * n, *size) for n, size in enumerate(shard.lm_heads(options))
        ]
        backend.plan_rows(None)
        entry = shard.shape.fused_width or shard.shape.hidden
        self.table = backend.table(TABLE_ENTRIES, entry, self.key(_TABLE_KEY))

    @property
    def kernel(self) -> str:
        """Names of the kernels that multiply by these weights, joined by "+" if they differ."""
        inside = [
            w for layer in self.layers for w in (*layer.qkv, layer.o, *layer.gate_up, layer.down)
        ]
        every = [*inside, *self.fusion, *self.heads, *self.lm_heads]
        return "+".join(sorted({self.backend.kernel(weight) for weight in every}))

    def key(self, which: int) -> int:
        """Returns the random key of matrix `which`, which determines its elements."""
        return (self._seed * 0x9E3779B9 + which * 0x85EBCA77) & 0xFFFFFFFF

    def _columns(self, layer: int, which: int, width: int) -> WeightPart:
        """Describes this rank's column shard [hidden, width] of a matrix of `layer`."""
        hidden, rank = self.shard.shape.hidden, self.shard.rank
        key = self.key(layer * _MATRICES + which + 1)
        return WeightPart(key, 0, hidden, rank * width, (rank + 1) * width, hidden**-0.5)

    def _rows(self, layer: int, which: int, width: int) -> WeightPart:
        """Describes this rank's row shard [width, hidden] of a matrix of `layer`.

        Its scale is that of the whole matrix, which has width · T rows.
        """
        hidden, rank = self.shard.shape.hidden, self.shard.rank
        key = self.key(layer * _MATRICES + which + 1)
        scale = (width * self.shard.tp) ** -0.5
        return WeightPart(key, rank * width, (rank + 1) * width, 0, hidden, scale)

    def _layer(self, n: int) -> Layer:
        q, kv, ffn = self.shard.q_width, self.shard.kv_width, self.shard.ffn
        qkv = [self._columns(n, _Q, q), self._columns(n, _K, kv), self._columns(n, _V, kv)]
        up = [self._columns(n, _UP, ffn)] if self.shard.shape.gated else []
        return Layer(
            qkv=self._weights(qkv),
            o=self.backend.weight([self._rows(n, _O, q)]),
            gate_up=self._weights([self._columns(n, _GATE, ffn), *up]),
            down=self.backend.weight([self._rows(n, _DOWN, ffn)]),
        )

    def _weights(self, parts: list[WeightPart]) -> list[Any]:
        if self.options.fuse:
            return [self.backend.weight(parts)]
        return [self.backend.weight([part]) for part in parts]

    def _whole(self, which: int, rows: int, width: int) -> Any:
        """Makes a weight outside the layers: all rows, and this rank's `width` columns."""
        rank = self.shard.rank
        columns = (rank * width, (rank + 1) * width)
        return self.backend.weight([WeightPart(self.key(which), 0, rows, *columns, rows**-0.5)])
