"""One rank's share of a model: its widths, bytes and flops, sharded as in Megatron.

q, k, v, gate, up and the LM head are split by columns, o and down by rows; an all-reduce after o
and after down makes the hidden vector whole again. A `Shard` describes a model that is reduced to
its matrix products, in equal parts; head-sized drafts (shapes.py: EAGLE, MTP, Medusa, MLP) are not
split. A `TransformerShard` describes a whole transformer. If the parts cannot be equal, the first
ranks get one KV head more (with its query heads), or one block more of the FFN's or the LM head's
columns. Rank 0's share is never smaller than another rank's.
"""

from dataclasses import dataclass
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.presets import ModelShape
from mpissd.engine.backend.base import Cost, ForwardKey
from mpissd.engine.model.transformer.config import TransformerConfig

_BLOCKS = (64, 32, 16, 8, 4, 2)  # columns of a block, the unit in which ranks share a matrix
_BALANCED = 16  # With 16 blocks a rank, an extra block is at most 1/16 of a rank's load.
_SPLIT = 128  # positions in a split; a GPU computes attention split by split
WEIGHT_BYTES = 2  # bytes of a weight on a GPU: 16-bit floats
CPU_ITEMSIZE = 4


@dataclass(frozen=True)
class ForwardOptions:
    """Options of a forward: its matrix products, what it reads from the KV cache and returns."""

    fuse: bool = False  # compute q, k, v as one product, and gate, up as another
    lm_head: bool = False
    context: int = 0  # cached tokens that all rows of a sequence read; 0: no KV is read
    top_k: int = 1
    own_tokens: int = 1  # cached tokens after the context that a row reads for itself
    values: bool = False  # return the logits of the top-k tokens and their ids
    # The next four fields size the KV cache, and stay 0 for a model without one.
    capacity: int = 0  # the most tokens that one sequence may have in the cache
    lanes: int = 0  # number of lanes, scratch KV buffers of speculative branches
    steps: int = 0  # the most tokens of a lane (a branch's KV buffer)
    pool: int = 0  # the most tokens of all sequences together; 0: each may have `capacity`
    states: bool = False  # keep each position's last hidden state, for a draft that reads it


class _Costs:
    """Derives the cost of a forward from the counts that a subclass gives for one rank."""

    def cost(
        self: Any,
        rows: int,
        sequences: int,
        itemsize: int,
        options: ForwardOptions,
        most_rows: int | None = None,
    ) -> Cost:
        """Returns the cost of a forward of `rows` rows over `sequences` sequences on this rank.
        itemsize: bytes of an activation; in a transformer also of a key or value. most_rows: rows
        of the job's largest forward, which decides the kernel of all forwards (None: `rows`)."""
        params = self.num_params(options)
        columns = self.columns(options)
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
        """Returns 0: a model of bare matrix products keeps no partial attention sums."""
        return 0

    @property
    def kv_layers(self: Any) -> int:
        """The number of layers that keep keys and values."""
        return int(self.shape.num_layers)

    def kv_bytes(self: Any, context: int, sequences: int, itemsize: int = 2) -> int:
        """Returns the bytes on this rank of the K and V of sequences of `context` tokens each."""
        return int(sequences * context * self.kv_layers * 2 * self.kv_width * itemsize)

    def weight_bytes(self: Any, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of the weights that this rank holds in memory."""
        return int(self.read_bytes(self.num_params(options), itemsize))


@dataclass(frozen=True)
class Shard(_Costs):
    """The share that rank `rank` of `tp` ranks holds of a model of bare matrix products. q_width,
    kv_width, ffn, vocab: the number of this rank's columns of q, of k (and of v), of gate (and of
    up), and of the LM head. Raises ConfigError if `tp` does not divide the heads or the FFN, and
    for a head-sized draft (EAGLE, MTP, Medusa, MLP) with tp > 1."""

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
        return self.shape.q_width // self.tp

    @property
    def kv_width(self) -> int:
        return self.shape.kv_width // self.tp

    @property
    def ffn(self) -> int:
        return self.shape.ffn // self.tp

    @property
    def vocab(self) -> int:
        return self.shape.vocab_size // self.tp

    def _products(self, options: ForwardOptions) -> list[tuple[int, int]]:
        """Returns the (in, out) sizes of all matrix products of a forward on this rank."""
        hidden = self.shape.hidden
        qkv = [self.q_width, self.kv_width, self.kv_width]
        gate_up = [self.ffn] * (2 if self.shape.gated else 1)
        if options.fuse:
            qkv = [sum(qkv)]
            gate_up = [sum(gate_up)]
        before, after = ([(hidden, width) for width in widths] for widths in (qkv, gate_up))
        layer = [*before, (self.q_width, hidden), *after, (self.ffn, hidden)]
        around = [*self.before_layers(), *self.behind_layers(), *self.lm_heads(options)]
        return layer * self.shape.num_layers + around

    def before_layers(self) -> list[tuple[int, int]]:
        """Returns the (in, out) size of the product, if any, that joins a draft's inputs."""
        return [(self.shape.fused_width, self.shape.hidden)] * (self.shape.fused_width > 0)

    def behind_layers(self) -> list[tuple[int, int]]:
        """Returns the (in, out) size of each head's product in Medusa and MLPSpeculator drafts."""
        return [(self.shape.hidden, width) for width in self.shape.head_widths]

    def lm_heads(self, options: ForwardOptions) -> list[tuple[int, int]]:
        """Returns the (in, out) size of this rank's part of each LM head, in the order in which
        heads draft; empty without options.lm_head."""
        return [(width, self.vocab) for width in self.shape.lm_head_inputs] * options.lm_head

    def num_params(self, options: ForwardOptions) -> int:
        """Returns the number of weights that one forward reads on this rank."""
        return sum(k * n for k, n in self._products(options))

    def num_products(self, options: ForwardOptions) -> int:
        """Returns the number of matrix products that one forward issues."""
        return len(self._products(options))

    def key(self, sequences: int, options: ForwardOptions) -> ForwardKey:
        """Returns the key under which profiles store measured times of this kind of forward."""
        tokens = options.context * sequences
        return ForwardKey(self.shape.name, self.tp, options.fuse, options.lm_head, tokens)

    def kv_read(self, rows: int, sequences: int, options: ForwardOptions, _: int = 2) -> int:
        """Returns the bytes of keys and values, always in 16 bits, that a forward reads on this
        rank. Each sequence's prefix counts once for all of its rows, as a tree attention kernel
        reads it, and each row's own suffix (options.own_tokens) counts separately."""
        suffixes = rows * options.own_tokens if options.context else 0
        return self.kv_bytes(options.context, sequences) + self.kv_bytes(suffixes, 1)

    def read_bytes(self, params: int, itemsize: int) -> int:
        """Returns the bytes of `params` weights of `itemsize` bytes each."""
        return params * itemsize

    def flops(self, rows: int, options: ForwardOptions) -> int:
        """Returns the floating-point operations of a forward of `rows` rows on this rank."""
        return 2 * rows * self.num_params(options)

    def columns(self, options: ForwardOptions) -> int:
        """Returns the number of logits per row on this rank; 0 without an LM head."""
        return self.vocab * options.lm_head

    def cache_bytes(self, rows: int, sequences: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of the KV buffers that a forward of `rows` rows reads."""
        return self.kv_read(rows, sequences, options)


@dataclass(frozen=True)
class TransformerShard(_Costs):
    """The share of a transformer that rank `rank` of `tp` ranks holds. kv, q, ffn, vocab_range:
    slices of the outputs (rows of the weights) that this rank computes: kv of k_proj and of v_proj,
    q of q_proj, ffn of gate_proj and of up_proj, vocab_range of the LM head. The slices q and ffn
    also select this rank's inputs (columns) of o_proj and of down_proj. q_width, kv_width,
    ffn_width, vocab: the lengths of the slices. heads, kv_heads: the query heads and KV heads on
    this rank. Raises ConfigError if there are fewer KV heads than ranks."""

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
        return self.config.shape

    @property
    def kv(self) -> slice:
        heads = _range(self.shape.num_kv_heads, self.tp, self.rank, block=1)
        return slice(heads.start * self.shape.head_dim, heads.stop * self.shape.head_dim)

    @property
    def q(self) -> slice:
        group = self.shape.num_heads // self.shape.num_kv_heads
        return slice(self.kv.start * group, self.kv.stop * group)

    @property
    def ffn(self) -> slice:
        return _range(self.shape.ffn, self.tp, self.rank)

    @property
    def vocab_range(self) -> slice:
        return _range(self.config.head_vocab, self.tp, self.rank)

    @property
    def q_width(self) -> int:
        return int(self.q.stop - self.q.start)

    @property
    def kv_width(self) -> int:
        return int(self.kv.stop - self.kv.start)

    @property
    def ffn_width(self) -> int:
        return int(self.ffn.stop - self.ffn.start)

    @property
    def vocab(self) -> int:
        return int(self.vocab_range.stop - self.vocab_range.start)

    @property
    def num_heads_used(self) -> int:
        """The tokens that one forward drafts for a sequence; more than 1 for Medusa heads only."""
        return 1

    @property
    def heads(self) -> int:
        return self.q_width // self.shape.head_dim

    @property
    def kv_heads(self) -> int:
        return self.kv_width // self.shape.head_dim

    def layer_params(self) -> int:
        """Returns the number of weights of one layer on this rank, norms and biases included."""
        shape = self.shape
        columns = 2 * self.q_width + 2 * self.kv_width + 3 * self.ffn_width
        biases = (self.q_width + 2 * self.kv_width) * self.config.qkv_bias
        return shape.hidden * (columns + 2) + biases + 2 * shape.head_dim * self.config.qk_norm

    def num_params(self, options: ForwardOptions) -> int:
        """Returns how many weights a forward reads on this rank, embeddings not counted."""
        return self.shape.num_layers * self.layer_params() + self.shape.hidden * (self.vocab + 1)

    def num_products(self, options: ForwardOptions) -> int:
        """Returns the number of matrix products of a forward: qkv, attention, o, gate_up and down
        of each layer, and the LM head."""
        return 5 * self.shape.num_layers + 1

    def key(self, sequences: int, options: ForwardOptions) -> ForwardKey:
        tokens = options.context * sequences
        return ForwardKey(self.shape.name, self.tp, True, True, tokens, sequences)

    def kv_read(self, rows: int, sequences: int, options: ForwardOptions, itemsize: int = 2) -> int:
        """Returns the KV bytes that a forward reads on this rank. A sequence's prefix
        (options.context) counts once for all its rows; each row's own suffix counts separately."""
        shared = self.kv_bytes(options.context, min(rows, sequences), itemsize)
        return shared + self.kv_bytes(rows * options.own_tokens, 1, itemsize)

    def weight_bytes(self, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of weights in this rank's memory, the whole embedding included."""
        embedding = (self.shape.vocab_size + self.config.masks) * self.shape.hidden * itemsize
        return super().weight_bytes(options, itemsize) + embedding

    def read_bytes(self, params: int, itemsize: int) -> int:
        """Returns the bytes of `params` weights. itemsize: bytes of an activation; 4 means a CPU,
        where weights may be quantised."""
        is_cpu = itemsize == CPU_ITEMSIZE
        return int(params * self.config.bits) // 8 if is_cpu else params * WEIGHT_BYTES

    def cache_bytes(self, rows: int, sequences: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of this rank's KV cache, including lanes (scratch KV buffers of
        branches). itemsize: bytes of a key or value."""
        tokens = options.pool or sequences * options.capacity
        tokens += options.lanes * options.steps
        return self.kv_bytes(tokens, 1, itemsize)

    def scratch_bytes(self, rows: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of partial attention sums on a GPU: one for each row, head and split of
        the positions. itemsize: bytes of an activation; 4 means a CPU, which keeps none."""
        if itemsize > WEIGHT_BYTES:
            return 0
        splits = -(-options.capacity // _SPLIT)
        return rows * self.heads * splits * (self.shape.head_dim + 2) * 4

    def flops(self, rows: int, options: ForwardOptions) -> int:
        """Returns the floating-point operations of a forward of `rows` rows on this rank. The LM
        head counts once for each Medusa head."""
        repeated = (self.num_heads_used - 1) * self.shape.hidden * self.vocab
        scored = rows * (options.context + options.own_tokens)
        attended = 4 * scored * self.q_width * self.kv_layers
        return 2 * rows * (self.num_params(options) + repeated) + attended

    def columns(self, options: ForwardOptions) -> int:
        return self.vocab


@dataclass(frozen=True)
class StateShard(TransformerShard):
    """The share of a draft that reads its target's hidden states; one rank holds all of it.
    heads_used: how many Medusa heads a forward computes (0: all heads of the file)."""

    heads_used: int = 0

    @property
    def num_heads_used(self) -> int:
        return (self.heads_used or self.shape.num_layers) if self.config.kind == "medusa" else 1

    def layer_params(self) -> int:
        """Returns the number of weights of one layer, or of one Medusa head, norms included."""
        if self.config.kind == "eagle":
            return super().layer_params()
        return self.shape.hidden * (3 * self.shape.ffn + 1 + (self.config.kind == "medusa"))

    def num_params(self, options: ForwardOptions) -> int:
        hidden = self.shape.hidden
        if self.config.kind == "medusa":
            return self.num_heads_used * self.layer_params() + hidden * self.vocab
        return 2 * hidden * (hidden + 1) + self.layer_params() + hidden * (self.vocab + 1)

    def num_products(self, options: ForwardOptions) -> int:
        return {"medusa": 2 * self.num_heads_used + 1, "mlp": 5, "eagle": 8}[self.config.kind]

    @property
    def kv_layers(self) -> int:
        return int(self.config.kind == "eagle")

    def cache_bytes(self, rows: int, sequences: int, options: ForwardOptions, itemsize: int) -> int:
        """Returns the bytes of the KV cache and of the draft's and the target's hidden states."""
        states = 2 * sequences * (options.capacity + 1) * self.shape.hidden * itemsize
        return super().cache_bytes(rows, sequences, options, itemsize) + states


def _range(total: int, tp: int, rank: int, block: int | None = None) -> slice:
    """Returns the part of 0 … total − 1 that a rank holds. The range is cut into blocks; if they
    cannot be shared evenly, the first ranks get one block more. block: elements of a block (None:
    the largest of _BLOCKS that gives each rank at least _BALANCED blocks, else 1)."""
    if block is None:
        block = next((size for size in _BLOCKS if size * tp * _BALANCED <= total), 1)
    blocks, rest = divmod(-(-total // block), tp)
    start, stop = (block * (blocks * n + min(n, rest)) for n in (rank, rank + 1))
    return slice(min(start, total), min(stop, total))
