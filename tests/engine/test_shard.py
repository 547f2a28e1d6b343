"""A rank's share of a model, uneven where it must be: widths and costs add up to the whole."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.errors import ConfigError
from mpissd.common.presets import ModelShape, resolve_model
from mpissd.engine.model.shard import ForwardOptions, Shard, TransformerShard
from mpissd.engine.model.transformer.checkpoint import tensors
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.sources import config_of

PLAIN = ForwardOptions()
HEAD = ForwardOptions(lm_head=True)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "eagle:8b", "medusa:8b"])
def test_the_shards_of_a_model_are_the_model(name: str) -> None:
    shape = resolve_model(name)
    whole = Shard(shape)
    lm_heads = sum(shape.lm_head_inputs) * shape.vocab_size
    assert whole.num_params(HEAD) == whole.num_params(PLAIN) + lm_heads
    for tp in (1, 2, 4, 8) if shape.head is None else (1,):
        shard = Shard(shape, tp)
        assert tp * shard.num_params(PLAIN) == whole.num_params(PLAIN)
        assert tp * shard.kv_bytes(100, 3) == whole.kv_bytes(100, 3)
        assert (tp * shard.q_width, tp * shard.kv_width) == (shape.q_width, shape.kv_width)


def test_what_a_forward_costs() -> None:
    shape = ModelShape("t", 3, 8, 4, 2, 2, 12, True, 10)
    options = ForwardOptions(lm_head=True, context=50)
    cost = Shard(shape, 2, 1).cost(rows=6, sequences=2, itemsize=2, options=options)
    layer = 8 * (4 + 2 + 2 + 4) + 8 * 6 * 3
    params = 3 * layer + 8 * 5
    assert cost.weight_bytes == 2 * params and cost.flops == 2 * 6 * params
    assert cost.kv_bytes == (2 * 50 + 6) * 3 * 2 * 2 * 2  # a prefix a sequence, a token a row
    assert (cost.rows, cost.tp, cost.all_reduce_bytes) == (6, 2, 6 * 8 * 2)
    assert cost.num_products == 3 * 7 + 1
    assert cost.num_all_reduces >= 2 * 3
    assert Shard(shape).cost(6, 2, 2, options).num_all_reduces == 0


def test_what_does_not_divide() -> None:
    shape = ModelShape("t", 1, 8, 4, 2, 2, 12, True, 10)
    with pytest.raises(ConfigError, match=r"num_heads=4 is not divisible by tp=3; .*: 1, 2, 4"):
        Shard(shape, 3)
    with pytest.raises(ConfigError, match=r"num_kv_heads=2 is not divisible by tp=4; .*: 1, 2"):
        Shard(shape, 4)


OPTIONS = ForwardOptions(lm_head=True, context=50, own_tokens=2, capacity=70, lanes=3, steps=4)


@st.composite
def configs(draw: st.DrawFn) -> TransformerConfig:
    kv_heads, head_dim = draw(st.integers(1, 9)), 2 * draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 4))
    ffn, vocab = draw(st.integers(16, 5000)), draw(st.integers(16, 50000))
    layers, hidden = draw(st.integers(1, 4)), draw(st.integers(1, 300))
    shape = ModelShape("t", layers, hidden, heads, kv_heads, head_dim, ffn, True, vocab)
    bias, norm = draw(st.booleans()), draw(st.booleans())
    head = draw(st.integers(16, vocab))
    return TransformerConfig(shape, "llama", qkv_bias=bias, qk_norm=norm, head_vocab=head)


@given(config=configs(), data=st.data())
def test_costs_add_up(config: TransformerConfig, data: st.DataObject) -> None:
    tp = data.draw(st.integers(1, config.shape.num_kv_heads))
    shards = [TransformerShard(config, tp, rank) for rank in range(tp)]
    whole = TransformerShard(config)
    stored = {name: math.prod(size) for name, size in tensors(config)}
    embedding = stored.pop("model.embed_tokens.weight")
    assert whole.num_params(OPTIONS) == sum(stored.values())
    # The norms, which each rank reads whole.
    hidden, layers = config.shape.hidden, config.shape.num_layers
    norms = layers * 2 * (hidden + config.shape.head_dim * config.qk_norm) + hidden
    matrices = [shard.num_params(OPTIONS) - norms for shard in shards]
    assert sum(matrices) == whole.num_params(OPTIONS) - norms
    for itemsize in (2, 4):
        costs = [shard.cost(6, 3, itemsize, OPTIONS) for shard in shards]
        told = whole.cost(6, 3, itemsize, OPTIONS)
        assert sum(cost.kv_bytes for cost in costs) == told.kv_bytes
        assert costs[0].weight_bytes == max(cost.weight_bytes for cost in costs)
        assert told.weight_bytes == 2 * whole.num_params(OPTIONS)
        kv = (3 * 70 + 3 * 4) * layers * 2 * config.shape.kv_width * itemsize
        memory = 2 * whole.num_params(OPTIONS) + itemsize * embedding + kv
        weights = whole.weight_bytes(OPTIONS, itemsize)
        assert weights + whole.cache_bytes(1, 3, OPTIONS, itemsize) == memory


def test_more_ranks_than_kv_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp=9 .* at most its 8 KV heads"):
        TransformerShard(config_of("8b"), 9)
