"""K and fan-out of a shipped pair's text on a CPU: as measured there, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.common import default_flags
from mpissd.common.config import RunConfig
from mpissd.common.flags import parse_into
from mpissd.lab.sweep.configs import SweepConfig
from mpissd.serve.config import ChatConfig

TEXT = {"pair": "smollm2", "prompt": "Why?"}
DEFAULT = RunConfig.lookahead, RunConfig.fan_out
MEASURED = 3, "uniform:2"


@pytest.fixture(autouse=True)
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_flags, "find_spec", lambda name: None)


def chosen(flags: dict[str, str]) -> tuple[int, str]:
    config = parse_into(RunConfig, flags)
    return config.lookahead, config.fan_out


def test_a_shipped_pair_takes_what_was_fastest_on_two_cores() -> None:
    for flags in ({}, {"mode": "ssd"}, {"backend": "numpy"}, {"pair": "SmolLM2"}):
        assert chosen({**TEXT, **flags}) == MEASURED
    assert chosen({"prompt": "Why?"}) == MEASURED  # the default pair
    assert parse_into(ChatConfig, {}).run.fan_out == MEASURED[1]


def test_the_pair_is_known_under_another_name_of_its_target(tmp_path: Path) -> None:
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    told = {"model_type": "llama", "vocab_size": 49152, **shape, **heads}
    for layers, expected in ((30, MEASURED), (32, DEFAULT)):
        path = tmp_path / f"of-{layers}.json"
        path.write_text(json.dumps({**told, "num_hidden_layers": layers}))
        flags = {"workload": "text", "target": str(path), "prompt": "Why?"}
        assert chosen({**flags, "draft": "smollm2-draft"}) == expected
        assert chosen({**flags, "draft": str(path)}) == DEFAULT


@pytest.mark.parametrize(
    "flags",
    [
        {"pair": "8b/1b"},
        {**TEXT, "mode": "sd"},
        {**TEXT, "backend": "cupy"},
        {"pair": "smollm2", "workload": "gemm"},
        {"pair": "smollm2", "forward": "transformer"},
    ],
    ids=["another pair", "sd", "a GPU", "products", "imposed laws"],
)
def test_elsewhere_the_defaults_stay(flags: dict[str, str]) -> None:
    assert chosen(flags) == DEFAULT


def test_what_is_given_counts() -> None:
    assert chosen({**TEXT, "lookahead": "5"}) == (5, MEASURED[1])
    assert chosen({**TEXT, "fan_out": "list:4,4,4,4"}) == (3, "list:4,4,4,4")


def test_a_gpu_s_auto_keeps_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = object()
    monkeypatch.setattr(default_flags, "find_spec", lambda name: found if name == "cupy" else None)
    assert chosen(dict(TEXT)) == DEFAULT
    assert chosen({**TEXT, "backend": "numpy"}) == MEASURED


def test_a_schedule_says_what_is_grown() -> None:
    flags = {**TEXT, "workload": "text", "schedule": "pearl"}
    assert default_flags.with_measured(flags) == flags


def test_a_sweep_compares_at_the_same_defaults() -> None:
    config = parse_into(SweepConfig, {**TEXT, "grid": "mode=sd,ssd"})
    assert (config.run.lookahead, config.run.fan_out) == DEFAULT
