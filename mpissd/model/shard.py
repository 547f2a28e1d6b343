"""One rank's share of a model: widths, bytes, flops (Megatron-style column and row sharding).

q, k, v, gate, up and the LM head are split by columns, o and down by rows; an all-reduce after o
and after down makes the hidden vector whole again.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.backend.base import Cost, ForwardKey
from mpissd.errors import ConfigError
from mpissd.presets import ModelShape


@dataclass(frozen=True)
class ForwardOptions:
    """What a forward does beside its layers' products."""

    fuse: bool = False  # issue q,k,v as one product, and gate,up as one
    lm_head: bool = False
    context: int = 0  # tokens of KV cache read per sequence
    top_k: int = 1


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `tp`; raises ConfigError where heads, ffn or vocabulary don't divide."""

    shape: ModelShape
    tp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for what in ("num_heads", "num_kv_heads", "ffn"):
            check_divides(self.shape, what, self.tp)

    @property
    def q_width(self) -> int:
        """Columns of q here: heads · head_dim / T."""
        return self.shape.q_width // self.tp

    @property
    def kv_width(self) -> int:
        """Columns of k, and of v, here."""
        return self.shape.kv_width // self.tp

    @property
    def ffn(self) -> int:
        """Columns of gate, and of up, here."""
        return self.shape.ffn // self.tp

    @property
    def vocab(self) -> int:
        """Rows of the vocabulary here."""
        return self.shape.vocab_size // self.tp

    def layer_params(self) -> int:
        """Weights of one layer here."""
        products = 2 if self.shape.gated else 1
        attention = self.shape.hidden * (2 * self.q_width + 2 * self.kv_width)
        return attention + self.shape.hidden * self.ffn * (products + 1)

    def num_params(self, options: ForwardOptions) -> int:
        """Weights that one forward reads here."""
        head = self.shape.hidden * self.vocab if options.lm_head else 0
        return self.shape.num_layers * self.layer_params() + head

    def num_products(self, options: ForwardOptions) -> int:
        """Matrix products that one forward issues."""
        per_layer = self.shape.gemms_per_layer
        if options.fuse:
            per_layer = 4
        return self.shape.num_layers * per_layer + int(options.lm_head)

    def products(self, options: ForwardOptions) -> list[tuple[int, int]]:
        """(in, out) of each weight of one layer here, in order; then the LM head's, if any."""
        hidden, q, kv = self.shape.hidden, self.q_width, self.kv_width
        qkv, gate_up = [q, kv, kv], [self.ffn] * (2 if self.shape.gated else 1)
        if options.fuse:
            qkv, gate_up = [sum(qkv)], [sum(gate_up)]
        attention = [*((hidden, width) for width in qkv), (q, hidden)]
        feed_forward = [*((hidden, width) for width in gate_up), (self.ffn, hidden)]
        return attention + feed_forward + [(hidden, self.vocab)] * options.lm_head

    def key(self, sequences: int, options: ForwardOptions) -> ForwardKey:
        """Which forward this is, for measured tables."""
        read = options.context * sequences
        return ForwardKey(self.shape.name, self.tp, options.fuse, options.lm_head, read)

    def kv_bytes(self, context: int, sequences: int) -> int:
        """16-bit KV bytes that attention over `context` tokens reads here, for all sequences."""
        return sequences * context * self.shape.num_layers * 2 * self.kv_width * 2

    def cost(self, rows: int, sequences: int, itemsize: int, options: ForwardOptions) -> Cost:
        """Cost of a forward of `rows` rows over `sequences` sequences on this rank."""
        params = self.num_params(options)
        reduces = 2 * self.shape.num_layers + 2 * int(options.lm_head) if self.tp > 1 else 0
        return Cost(
            rows=rows,
            weight_bytes=params * itemsize,
            kv_bytes=self.kv_bytes(options.context, sequences),
            flops=2 * rows * params,
            num_products=self.num_products(options),
            num_all_reduces=reduces,
            all_reduce_bytes=rows * self.shape.hidden * itemsize,
            tp=self.tp,
            key=self.key(sequences, options),
        )


def check_divides(shape: ModelShape, what: str, tp: int) -> None:
    """Raises ConfigError where a dimension of `shape` is not divisible by T."""
    value = getattr(shape, what)
    if value % tp:
        divisors = [str(t) for t in range(1, 17) if value % t == 0]
        raise ConfigError(
            f"{shape.name}: {what}={value} is not divisible by tp={tp}; "
            f"allowed for it: {', '.join(divisors)}"
        )
