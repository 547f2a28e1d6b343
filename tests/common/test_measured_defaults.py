"""K and fan-out of a shipped pair's text on a CPU: as measured there."""

from __future__ import annotations

import pytest

from mpissd.common import config
from mpissd.common.config import RunConfig
from mpissd.common.flags import parse_into
from mpissd.serve.config import ChatConfig

TEXT = {"pair": "smollm2", "prompt": "Why?"}
DEFAULT = RunConfig.lookahead, RunConfig.fan_out
MEASURED = 3, "uniform:2"


@pytest.fixture(autouse=True)
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)


def chosen(flags: dict[str, str]) -> tuple[int, str]:
    run = parse_into(RunConfig, flags)
    return run.lookahead, run.fan_out


def test_a_shipped_pair_takes_what_was_fastest_on_two_cores() -> None:
    for flags in ({}, {"mode": "ssd"}, {"backend": "numpy"}, {"pair": "SmolLM2"}):
        assert chosen({**TEXT, **flags}) == MEASURED
    assert chosen({"prompt": "Why?"}) == MEASURED  # the default pair
    assert parse_into(ChatConfig, {}).run.fan_out == MEASURED[1]


def test_elsewhere_the_defaults_stay() -> None:
    for flags in (
        {"pair": "8b/1b"},
        {**TEXT, "mode": "sd"},
        {**TEXT, "backend": "cupy"},
        {"pair": "smollm2", "workload": "gemm"},
    ):
        assert chosen(flags) == DEFAULT


def test_what_is_given_counts() -> None:
    assert chosen({**TEXT, "lookahead": "5"}) == (5, MEASURED[1])
    assert chosen({**TEXT, "fan_out": "list:4,4,4,4"}) == (3, "list:4,4,4,4")
