"""Any workload over a transformer's forward decides what it decides over products alone."""

from __future__ import annotations

from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.records import outcome_digest
from mpissd.engine import Decoder
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.shard import Shard
from mpissd.engine.model.transformer.shard import TransformerShard

MODEL = "gen:layers=2,hidden=64,ffn=128,heads=4,kv_heads=2,head_dim=16,vocab=97"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    ("sd", {"num_drafts": 0, "alpha": 0.9}),
    ("sd", {"batch_size": 3}),
    ("sd", {"backup": "fast"}),
    ("ssd", {"batch_size": 3, "context": 70}),
    ("ssd", {"batch_size": 2, "lookahead": 3}),
    ("ssd", {"workload": "markov", "vocab": 20, "temperature": 0.8, "batch_size": 2}),
]


def config(mode: str, **flags: Any) -> RunConfig:
    models = {"target": MODEL, "draft": MODEL, "backend": "numpy", "rounds": 5}
    return RunConfig(mode=mode, **{**models, **flags})


def job_of(mode: str, tp: int = 1, **flags: Any) -> Job:
    return resolve(config(mode, **flags), tp, backend="numpy", memory_bytes=None)


def digest(told: RunConfig) -> str:
    """Of 40 rounds, eight times the tokens after which positions begin again."""
    with Decoder(told) as decoder:
        for _ in range(40):
            decoder.step()
        return outcome_digest(decoder.records.sequences())


@pytest.mark.parametrize(("mode", "flags"), CASES, ids=lambda told: str(told))
def test_outcomes_do_not_depend_on_the_forward(mode: str, flags: dict[str, Any]) -> None:
    assert digest(config(mode, forward="transformer", **flags)) == digest(config(mode, **flags))


def test_a_job_s_shards_and_costs_are_those_of_its_forward() -> None:
    products = job_of("ssd", context=500, lm_head=True)
    whole = job_of("ssd", context=500, forward="transformer")
    assert isinstance(products.target_shard, Shard) and isinstance(products.draft_shard, Shard)
    assert isinstance(whole.target_shard, TransformerShard)
    assert isinstance(whole.draft_shard, TransformerShard)
    assert products.options.capacity == 0 and products.placement(drafts=False) is None
    # Five rounds of at most K + 1 tokens behind the context, and one verification.
    assert whole.longest == 525 and whole.capacity == 530 == whole.options.capacity
    # Of .8, .8², … some 2.4 are accepted: three tokens a round, half of them on average; of AR one.
    assert whole.options.context == 500 + 5 * 3 // 2 and whole.options.lm_head
    assert job_of("ar", context=500, forward="transformer").options.context == 500 + 5 // 2
    assert (whole.draft_options.lanes, whole.draft_options.steps) == (15, 4)
    assert whole.draft_options.top_k == 4 and whole.draft_options.own_tokens == 3
    costs = [
        job.target_shard.cost(5, 1, 4, job.options).kv_bytes  # float32, and the rows' own tokens
        for job in (whole, job_of("ssd", context=1000, forward="transformer"))
    ]
    token = 2 * 2 * 2 * 16 * 4
    assert costs == [token * (507 + 5), token * (1007 + 5)]


def test_shares_may_be_uneven_but_not_empty() -> None:
    model = MODEL.replace("heads=4,kv_heads=2", "heads=6,kv_heads=3")
    for tp in (1, 2, 3):
        shard = job_of("ar", tp, target=model, forward="transformer").target_shard
        assert isinstance(shard, TransformerShard) and shard.kv_heads == -(-3 // tp)
    with pytest.raises(ConfigError, match=r"tp=4 .*: allowed: at most its 3 KV heads"):
        job_of("ar", 4, target=model, forward="transformer")
    with pytest.raises(ConfigError, match="num_heads=6 is not divisible by tp=4"):
        job_of("ar", 4, target=model)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"fuse": True}, "fuse with forward=transformer: allowed: forward=gemm"),
        ({"draft": f"eagle:{MODEL}"}, "with forward=transformer: allowed: a whole model"),
    ],
)
def test_what_a_transformer_cannot_do_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job_of("ssd", forward="transformer", **flags)


def test_text_needs_a_transformer_that_computes() -> None:
    with pytest.raises(ConfigError, match="forward=gemm with workload=text: allowed: transformer"):
        config("ar", workload="text", forward="gemm")
    with pytest.raises(ConfigError, match="workload=text with backend=emulated: allowed: numpy"):
        told = config("ar", workload="text", prompt_ids="1")
        resolve(told, 1, backend="emulated", memory_bytes=None)
