"""A rank's share of a model: widths and costs add up to the whole."""

from __future__ import annotations

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


HEADS = {  # (products, LM heads, all-in-one weights without LM heads) of 8-wide targets
    "eagle": ([(16, 8)], [(8, 10)], 1),
    "mtp": ([(16, 8)], [(8, 10)], 1),
    "medusa3": ([(8, 8)] * 3, [(8, 10)] * 3, 0),
    "mlp6": ([(8, 6)], [(6, 10)], 0),
}
TINY = "gen:layers=5,hidden=8,ffn=12,heads=4,kv_heads=2,vocab=10"
LAYER = 8 * (8 + 4 + 4 + 8) + 3 * 8 * 12


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("lm_head", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_sized_draft_reads_its_own_products(kind: str, lm_head: bool, fuse: bool) -> None:
    around, heads, layers = HEADS[kind]
    shard, options = Shard(resolve_model(f"{kind}:{TINY}")), ForwardOptions(fuse, lm_head, 50)
    params = sum(k * n for k, n in around + heads * lm_head) + layers * LAYER
    products = len(around) + len(heads) * lm_head + layers * (4 if fuse else 7)
    assert shard.num_params(options) == params
    assert shard.num_products(options) == products
    cost = shard.cost(6, 3, 2, options)
    assert (cost.weight_bytes, cost.flops) == (2 * params, 12 * params)
    assert cost.kv_bytes == layers * (3 * 50 + 6) * 2 * 4 * 2 and cost.num_all_reduces == 0
