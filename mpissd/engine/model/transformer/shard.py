"""One rank's share of a transformer: contiguous ranges of its matrices, their bytes and flops.

Split as in Megatron, and unevenly where it must be: the first ranks get one KV head more (with its
query heads), or one block more of the FFN or of the LM head. Rank 0 is never smaller than another.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.presets import ModelShape
from mpissd.engine.backend.base import Cost, ForwardKey
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.transformer.config import TransformerConfig

_BLOCKS = (64, 32, 16, 8, 4, 2)  # columns that kernels like to have together
_BALANCED = 16  # blocks a rank, from which on one more is no burden
_SPLIT = 128  # positions of a split of the attention on a GPU
WEIGHT_BYTES = 2  # weights have 16 bits on GPUs
CPU_ITEMSIZE = 4


@dataclass(frozen=True)
class TransformerShard:
    """The share of a transformer that rank `rank` of `tp` holds.

    It has the costs of shard.Shard. Raises ConfigError if `tp` is above the number of KV heads.
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
        return self._read_bytes(self.num_params(options), itemsize) + embedding

    def _read_bytes(self, params: int, itemsize: int) -> int:
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

    def cost(
        self,
        rows: int,
        sequences: int,
        itemsize: int,
        options: ForwardOptions,
        most_rows: int | None = None,
    ) -> Cost:
        """Returns the cost of a forward of `rows` rows over `sequences` sequences on this rank.

        itemsize: bytes of an activation, key or value. most_rows: rows of the job's largest
        forward, which decides the kernel of all forwards (None: this is the largest).
        """
        params, layers = self.num_params(options), self.shape.num_layers
        scored = rows * (options.context + options.own_tokens)
        # Each Medusa head computes its row of the LM head, which is read once.
        computed = params + (self.num_heads_used - 1) * self.shape.hidden * self.vocab
        return Cost(
            rows=rows,
            weight_bytes=self._read_bytes(params, itemsize),
            kv_bytes=self.kv_read(rows, sequences, options, itemsize),
            flops=2 * rows * computed + 4 * scored * self.q_width * self.kv_layers,
            num_products=self.num_products(options),
            num_all_reduces=2 * layers + 2 if self.tp > 1 else 0,
            all_reduce_bytes=rows * self.shape.hidden * itemsize,
            tp=self.tp,
            key=self.key(sequences, options),
            most_rows=most_rows,
            params=params,
            candidates=options.top_k,
            columns=self.vocab,
        )


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
