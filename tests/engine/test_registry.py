"""Backends by name; the error for a missing one explains how to get it."""

from __future__ import annotations

import importlib.util

import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.backend.registry import choose, open_backend


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "mpissd.engine.backend.registry.importlib.util.find_spec",
        lambda name: None if name == "cupy" else find(name),
    )


def test_cupy_without_cupy_says_how_to_get_it(no_cupy: None) -> None:
    with pytest.raises(ConfigError, match="CuPy is not installed; pip install"):
        open_backend("cupy", device="h100", local_rank=0)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'numpi': did you mean 'numpy'"):
        choose("numpi")
    with pytest.raises(ConfigError, match="unknown backend 'jax'"):
        open_backend("jax", device="h100", local_rank=0)
    with pytest.raises(ConfigError, match="unknown device"):
        open_backend("emulated", device="h1000000", local_rank=0)
