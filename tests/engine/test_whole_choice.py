"""Which models have a forward of few rows as one kernel, and on which GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.cupy_ops.whole_ops import WholeOps
from mpissd.engine.model.transformer.sources import config_of

SMALL, LARGE = 99 << 10, 227 << 10  # bytes of shared memory that a block may have


def gpu(capability: str = "9.0", room: int = LARGE) -> Any:
    return SimpleNamespace(
        info=SimpleNamespace(compute_capability=capability),
        launcher=lambda *, early: SimpleNamespace(shared_bytes=room),
    )


def model(**changed: Any) -> TransformerConfig:
    """Llama-3.2-1B, changed in its shape or beside it."""
    config = config_of("llama-3.2-1b")
    shape = {name: changed.pop(name) for name in set(changed) & set(vars(config.shape))}
    return replace(config, shape=replace(config.shape, **shape), **changed)


@pytest.mark.parametrize(
    "capability, room, expected",
    [
        ("8.0", LARGE, False),  # more than any has
        ("8.9", SMALL, False),
        ("9.0", LARGE, True),
        ("10.0", LARGE, True),
        ("12.0", SMALL, False),  # no room for a ring of weights
    ],
)
def test_the_gpu_decides(capability: str, room: int, expected: bool) -> None:
    assert WholeOps.suits(gpu(capability, room), model(), heads=32) == expected


@pytest.mark.parametrize(
    "changed, expected",
    [({}, True), ({"hidden": 2016}, False), ({"qk_norm": True}, False), ({"kind": "eagle"}, False)],
)
def test_the_model_decides(changed: dict[str, Any], expected: bool) -> None:
    assert WholeOps.suits(gpu(), model(**changed), heads=32) == expected


def test_a_rank_s_share_of_heads_is_never_one_kernel() -> None:
    """Of a model's 32 heads, a rank of two has 16."""
    assert not WholeOps.suits(gpu(), model(), heads=16)


def test_a_gpu_that_mps_divides_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert WholeOps.suits(gpu(), model(), heads=32)
    (tmp_path / "control").touch()
    assert not WholeOps.suits(gpu(), model(), heads=32)
