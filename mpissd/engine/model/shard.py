"""One rank's share of a model: its widths, bytes and flops, sharded as in Megatron.

q, k, v, gate, up and the LM head are split by columns, o and down by rows; an all-reduce after o
and after down makes the hidden vector whole again. A `Shard` is of bare products, of which all
ranks have equal parts; head-sized drafts (shapes.py) are not sharded. A `TransformerShard` has
contiguous ranges of matrices, unevenly where it must be: the first ranks get one KV head more
(with its query heads), or one block more of the FFN or of the LM head. Rank 0 is never smaller than
another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.presets import ModelShape
from mpissd.engine.backend.base import Cost, ForwardKey
from mpissd.engine.model.transformer.config import TransformerConfig

_BLOCKS = (64, 32, 16, 8, 4, 2)  # columns that kernels like to have together
_BALANCED = 16  # blocks a rank, from which on one more is no burden
_SPLIT = 128  # positions of a split of the attention on a GPU
WEIGHT_BYTES = 2  # weights have 16 bits on GPUs
CPU_ITEMSIZE = 4


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


class _Costs:
    """The costs of a share, from its widths."""

    def cost(
        self: Any,
        rows: int,
        sequences: int,
        itemsize: int,
        options: ForwardOptions,
        most_rows: int | None = None,
    ) -> Cost:
        """Returns the cost of a forward of `rows` rows over `sequences` sequences on this rank.

        itemsize: bytes of an activation, and of a transformer's keys and values. most_rows: rows of
        the job's largest forward, which decides the kernel of all forwards (None: this is it).
        """
        params, columns = self.num_params(options), self.columns(options)
        return Cost(
            rows=rows,
            weight_bytes=self.read_bytes(params, itemsize),
            kv_bytes=self.kv_read(rows, sequences, options, itemsize),
            flops=self.flops(rows, options),
            num_products=self.num_products(options),
            num_all_reduces=2 * self.shape.num_layers + 2 * (columns > 0) if self.tp > 1 else 0,
            all_reduce_bytes=rows * self.shape.hidden * itemsize,
            tp=self.tp,
            key=self.key(sequences, options),
            most_rows=most_rows,
            params=params,
            candidates=options.top_k,
            columns=columns,
        )

    def scratch_bytes(self, rows: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of sums that a forward keeps; bare products keep none."""
        return 0


@dataclass(frozen=True)
class Shard(_Costs):
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

    def kv_read(self, rows: int, sequences: int, options: ForwardOptions, _: int = 2) -> int:
        """Returns the KV bytes that a forward reads on this rank, 16 bits on any device.

        Each sequence's prefix counts once for all of its rows, as a tree attention kernel reads it,
        and each row's own suffix counts separately.
        """
        own = rows * options.own_tokens if options.context else 0
        return self.kv_bytes(options.context, sequences) + self.kv_bytes(own, 1)

    def weight_bytes(self, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of weights that this rank keeps."""
        return self.read_bytes(self.num_params(options), itemsize)

    def read_bytes(self, params: int, itemsize: int) -> int:
        """Returns the bytes of the weights that a forward reads."""
        return params * itemsize

    def flops(self, rows: int, options: ForwardOptions) -> int:
        """Returns the operations of a forward of `rows` rows."""
        return 2 * rows * self.num_params(options)

    def columns(self, options: ForwardOptions) -> int:
        """Returns the logits of a row on this rank; 0 without an LM head."""
        return self.vocab * options.lm_head

    def cache_bytes(self, rows: int, sequences: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of the KV buffers that a forward of `rows` rows reads."""
        return self.kv_read(rows, sequences, options)


@dataclass(frozen=True)
class TransformerShard(_Costs):
    """The share of a transformer that rank `rank` of `tp` holds.

    Raises ConfigError if `tp` is above the number of KV heads.
    """

    config: TransformerConfig
    tp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.tp > self.shape.num_kv_heads:
            raise ConfigError(
                f"{self.shape.name}: tp={self.tp} with forward=transformer: allowed: at most its "
                f"{self.shape.num_kv_heads} KV heads"
            )

    @property
    def shape(self) -> ModelShape:
        """The whole model's widths and depth."""
        return self.config.shape

    @property
    def kv(self) -> slice:
        """This rank's rows of the whole k_proj and v_proj."""
        heads = _range(self.shape.num_kv_heads, self.tp, self.rank, block=1)
        return slice(heads.start * self.shape.head_dim, heads.stop * self.shape.head_dim)

    @property
    def q(self) -> slice:
        """This rank's rows of the whole q_proj, and columns of o_proj."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        return slice(self.kv.start * group, self.kv.stop * group)

    @property
    def ffn(self) -> slice:
        """This rank's rows of gate_proj and up_proj, and columns of down_proj."""
        return _range(self.shape.ffn, self.tp, self.rank)

    @property
    def vocab_range(self) -> slice:
        """This rank's rows of the LM head."""
        return _range(self.config.head_vocab, self.tp, self.rank)

    @property
    def q_width(self) -> int:
        """Columns of q on this rank."""
        return int(self.q.stop - self.q.start)

    @property
    def kv_width(self) -> int:
        """Columns of k, and of v, on this rank."""
        return int(self.kv.stop - self.kv.start)

    @property
    def ffn_width(self) -> int:
        """Columns of gate, and of up, on this rank."""
        return int(self.ffn.stop - self.ffn.start)

    @property
    def vocab(self) -> int:
        """Rows of the LM head on this rank."""
        return int(self.vocab_range.stop - self.vocab_range.start)

    @property
    def num_heads_used(self) -> int:
        """Tokens of a sequence that one forward drafts."""
        return 1

    @property
    def kv_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.shape.num_layers

    @property
    def heads(self) -> int:
        """Query heads on this rank."""
        return self.q_width // self.shape.head_dim

    @property
    def kv_heads(self) -> int:
        """KV heads on this rank."""
        return self.kv_width // self.shape.head_dim

    def layer_params(self) -> int:
        """Returns the number of weights of one layer on this rank, norms and biases included."""
        shape, kv = self.shape, self.kv_width
        matrices = 2 * self.q_width + 2 * kv + 3 * self.ffn_width
        biases = (self.q_width + 2 * kv) * self.config.qkv_bias
        return shape.hidden * (matrices + 2) + biases + 2 * shape.head_dim * self.config.qk_norm

    def num_params(self, options: ForwardOptions) -> int:
        """Returns the number of weights that one forward reads on this rank, its LM head included.

        The few rows of the embedding that it reads are left out.
        """
        behind = self.shape.hidden * (self.vocab + 1)
        return self.shape.num_layers * self.layer_params() + behind

    def num_products(self, options: ForwardOptions) -> int:
        """Returns the number of matrix products that one forward issues; attention counts as one.

        q, k and v are one product, gate and up another.
        """
        return 5 * self.shape.num_layers + 1

    def key(self, sequences: int, options: ForwardOptions) -> ForwardKey:
        """Returns the key of this kind of forward in tables of measured times."""
        read = options.context * sequences
        return ForwardKey(self.shape.name, self.tp, True, True, read, sequences)

    def kv_bytes(self, context: int, sequences: int, itemsize: int = 2) -> int:
        """Returns the bytes of the keys and values of `sequences` contexts on this rank."""
        return sequences * context * self.kv_layers * 2 * self.kv_width * itemsize

    def kv_read(self, rows: int, sequences: int, options: ForwardOptions, itemsize: int = 2) -> int:
        """Returns the KV bytes that a forward reads on this rank.

        Each sequence's prefix counts once for all of its rows, and each row's own suffix counts
        separately. With fewer rows than sequences, only `rows` prefixes are read.
        """
        shared = self.kv_bytes(options.context, min(rows, sequences), itemsize)
        return shared + self.kv_bytes(rows * options.own_tokens, 1, itemsize)

    def weight_bytes(self, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of weights and embedding that this rank keeps.

        Every rank keeps the whole embedding: a CPU in float32, of the tokens that it has read.
        """
        embedding = self.shape.vocab_size * self.shape.hidden * itemsize
        return self.read_bytes(self.num_params(options), itemsize) + embedding

    def read_bytes(self, params: int, itemsize: int) -> int:
        """Returns the bytes of the weights that a forward reads.

        itemsize: of activations; 4 on CPUs, which keep ggml's blocks as they are stored.
        """
        is_cpu = itemsize == CPU_ITEMSIZE
        return int(params * self.config.bits) // 8 if is_cpu else params * WEIGHT_BYTES

    def cache_bytes(self, rows: int, sequences: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of the KV cache that this rank keeps, with the scratch of lanes.

        itemsize: bytes of a key or value.
        """
        tokens = options.pool or sequences * options.capacity
        tokens += options.lanes * options.steps
        return self.kv_bytes(tokens, 1, itemsize)

    def scratch_bytes(self, rows: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes in which a GPU's attention keeps the sums of each row's splits."""
        if itemsize > WEIGHT_BYTES:  # a CPU has none
            return 0
        splits = -(-options.capacity // _SPLIT)
        return rows * self.heads * splits * (self.shape.head_dim + 2) * 4

    def flops(self, rows: int, options: ForwardOptions) -> int:
        """Returns the operations of a forward; each Medusa head computes its row of the LM head,
        which is read once."""
        more = (self.num_heads_used - 1) * self.shape.hidden * self.vocab
        scored = rows * (options.context + options.own_tokens)
        attended = 4 * scored * self.q_width * self.kv_layers
        return 2 * rows * (self.num_params(options) + more) + attended

    def columns(self, options: ForwardOptions) -> int:
        """Returns the logits of a row on this rank."""
        return self.vocab


@dataclass(frozen=True)
class StateShard(TransformerShard):
    """The whole of a draft that reads hidden states, with the costs of its forwards.

    heads_used: Medusa heads that a forward computes (0: all of the file).
    """

    heads_used: int = 0

    @property
    def num_heads_used(self) -> int:
        """Tokens of a sequence that one forward drafts: one, or one for each Medusa head."""
        is_medusa = self.config.kind == "medusa"
        return (self.heads_used or self.shape.num_layers) if is_medusa else 1

    def layer_params(self) -> int:
        """Returns the number of weights of one layer, or of one Medusa head; norms included."""
        if self.config.kind == "eagle":
            return super().layer_params()
        return self.shape.hidden * (3 * self.shape.ffn + 1 + (self.config.kind == "medusa"))

    def num_params(self, options: ForwardOptions) -> int:
        """Returns the number of weights that one forward reads, its LM head included once."""
        hidden = self.shape.hidden
        behind = hidden * (self.vocab + 1)
        if self.config.kind == "medusa":
            return self.num_heads_used * self.layer_params() + hidden * self.vocab
        return 2 * hidden * (hidden + 1) + self.layer_params() + behind

    def num_products(self, options: ForwardOptions) -> int:
        """Returns the number of matrix products that one forward issues."""
        return {"medusa": 2 * self.num_heads_used + 1, "mlp": 5, "eagle": 8}[self.config.kind]

    @property
    def kv_layers(self) -> int:
        """Layers that keep keys and values: EAGLE's."""
        return int(self.config.kind == "eagle")

    def cache_bytes(self, rows: int, sequences: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of keys, values and the states of both models, by slot."""
        states = 2 * sequences * (options.capacity + 1) * self.shape.hidden * itemsize
        return super().cache_bytes(rows, sequences, options, itemsize) + states


def _range(total: int, tp: int, rank: int, block: int | None = None) -> slice:
    """Returns a rank's share of 0..total: whole blocks, of which the first ranks get one more."""
    if block is None:
        block = next((size for size in _BLOCKS if size * tp * _BALANCED <= total), 1)
    each, more = divmod(-(-total // block), tp)
    start, stop = (block * (each * n + min(n, more)) for n in (rank, rank + 1))
    return slice(min(start, total), min(stop, total))
