"""A rank's share of a model: widths and costs add up to the whole."""

import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.presets import ModelShape, resolve_model
from mpissd.engine.model.shard import ForwardOptions, Shard

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
