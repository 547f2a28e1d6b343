"""One rank's share of a model: its widths, bytes and flops, sharded as in Megatron.

q, k, v, gate, up and the LM head are split by columns, o and down by rows; an all-reduce after o
and after down makes the hidden vector whole again. Head-sized drafts (shapes.py) are not sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.presets import ModelShape
from mpissd.engine.backend.base import Cost, ForwardKey


@dataclass(frozen=True)
class ForwardOptions:
    """Options of a forward that decide its products, its inputs and its results."""

    fuse: bool = False  # issue q,k,v as one product, and gate,up as one
    lm_head: bool = False
    context: int = 0  # KV-cache tokens that the rows of a sequence share; 0: no KV is read
    top_k: int = 1
    own_tokens: int = 1  # KV-cache tokens that only this row reads, its own included
    values: bool = False  # read out the candidates' logits with their ids
    # These size a KV cache, and stay 0 for a model that has none.
    capacity: int = 0  # the most tokens that a sequence may have
    lanes: int = 0  # how many lanes have room for tokens of their own
    steps: int = 0  # tokens that each lane has room for
    pool: int = 0  # tokens of all sequences together; 0: each may have `capacity`
    states: bool = False  # keep each position's last hidden state, for a draft that reads it


@dataclass(frozen=True)
class Shard:
    """The share of a model that rank `rank` of `tp` holds.

    Raises ConfigError if `tp` does not divide the heads or the FFN, and for a head-sized draft with
    tp > 1.
    """

    shape: ModelShape
    tp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.shape.head is not None and self.tp > 1:
            raise ConfigError(f"{self.shape.name}: a head-sized draft at tp={self.tp}: allowed: 1")
        for what in ("num_heads", "num_kv_heads", "ffn"):
            if (value := getattr(self.shape, what)) % self.tp:
                divisors = [str(t) for t in range(1, 17) if value % t == 0]
                raise ConfigError(
                    f"{self.shape.name}: {what}={value} is not divisible by tp={self.tp}; "
                    f"allowed for it: {', '.join(divisors)}"
                )

    @property
    def q_width(self) -> int:
        """Columns of q on this rank: heads · head_dim / T."""
        return self.shape.q_width // self.tp

    @property
    def kv_width(self) -> int:
        """Columns of k, and of v, on this rank."""
        return self.shape.kv_width // self.tp

    @property
    def ffn(self) -> int:
        """Columns of gate, and of up, on this rank."""
        return self.shape.ffn // self.tp

    @property
    def vocab(self) -> int:
        """Vocabulary entries on this rank: V / T."""
        return self.shape.vocab_size // self.tp

    def layer_products(self, options: ForwardOptions) -> list[tuple[int, int]]:
        """Returns the (in, out) sizes of one layer's products on this rank, in forward order."""
        hidden, q, kv = self.shape.hidden, self.q_width, self.kv_width
        qkv, gate_up = [q, kv, kv], [self.ffn] * (2 if self.shape.gated else 1)
        if options.fuse:
            qkv, gate_up = [sum(qkv)], [sum(gate_up)]
        before, after = ([(hidden, width) for width in widths] for widths in (qkv, gate_up))
        return [*before, (q, hidden), *after, (self.ffn, hidden)]

    def before_layers(self) -> list[tuple[int, int]]:
        """Returns the (in, out) sizes of the product that joins a head-sized draft's inputs.

        Only EAGLE and MTP drafts have one; the list is empty otherwise.
        """
        return [(self.shape.fused_width, self.shape.hidden)] * (self.shape.fused_width > 0)

    def behind_layers(self) -> list[tuple[int, int]]:
        """Returns the (in, out) sizes of each head's product (Medusa, MLPSpeculator)."""
        return [(self.shape.hidden, width) for width in self.shape.head_widths]

    def lm_heads(self, options: ForwardOptions) -> list[tuple[int, int]]:
        """Returns the (in, out) sizes of each LM head's shard, in drafting order."""
        return [(width, self.vocab) for width in self.shape.lm_head_inputs] * options.lm_head

    def _read(self, options: ForwardOptions) -> tuple[int, int]:
        layer, num_layers = self.layer_products(options), self.shape.num_layers
        around = [*self.before_layers(), *self.behind_layers(), *self.lm_heads(options)]
        params = num_layers * sum(k * n for k, n in layer) + sum(k * n for k, n in around)
        return params, num_layers * len(layer) + len(around)

    def num_params(self, options: ForwardOptions) -> int:
        """Returns the number of weights that one forward reads on this rank."""
        return self._read(options)[0]

    def num_products(self, options: ForwardOptions) -> int:
        """Returns the number of matrix products that one forward issues."""
        return self._read(options)[1]

    def key(self, sequences: int, options: ForwardOptions) -> ForwardKey:
        """Returns the key of this kind of forward in tables of measured times."""
        read = options.context * sequences
        return ForwardKey(self.shape.name, self.tp, options.fuse, options.lm_head, read)

    def kv_bytes(self, context: int, sequences: int) -> int:
        """Returns the bytes of 16-bit KV cache that `sequences` contexts take on this rank."""
        return sequences * context * self.shape.num_layers * 2 * self.kv_width * 2

    def kv_read(self, rows: int, sequences: int, options: ForwardOptions) -> int:
        """Returns the KV bytes that a forward reads on this rank.

        Each sequence's prefix counts once for all of its rows, as a tree attention kernel reads it,
        and each row's own suffix counts separately.
        """
        own = rows * options.own_tokens if options.context else 0
        return self.kv_bytes(options.context, sequences) + self.kv_bytes(own, 1)

    def weight_bytes(self, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of weights that this rank keeps."""
        return self.num_params(options) * itemsize

    def cache_bytes(self, rows: int, sequences: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of the KV buffers that a forward of `rows` rows reads."""
        return self.kv_read(rows, sequences, options)

    def scratch_bytes(self, rows: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns 0: bare products keep no sums."""
        return 0

    def cost(
        self,
        rows: int,
        sequences: int,
        itemsize: int,
        options: ForwardOptions,
        most_rows: int | None = None,
    ) -> Cost:
        """Returns the cost of a forward of `rows` rows over `sequences` sequences on this rank.

        itemsize: bytes of a weight. most_rows: rows of the job's largest forward, which decides the
        kernel of all forwards (None: this is the largest).
        """
        params = self.num_params(options)
        reduces = 2 * self.shape.num_layers + 2 * int(options.lm_head) if self.tp > 1 else 0
        return Cost(
            rows=rows,
            weight_bytes=params * itemsize,
            kv_bytes=self.kv_read(rows, sequences, options),
            flops=2 * rows * params,
            num_products=self.num_products(options),
            num_all_reduces=reduces,
            all_reduce_bytes=rows * self.shape.hidden * itemsize,
            tp=self.tp,
            key=self.key(sequences, options),
            most_rows=most_rows,
            params=params,
            candidates=options.top_k,
            columns=self.vocab * options.lm_head,
        )
