"""Shared fixtures of the GPU tests: one backend a module, and a reason if there is no GPU."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.needs import lack


def why_no_gpu() -> str | None:
    """Name what these tests need and this machine lacks, or None."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"a usable GPU ({error})"
    return None if count else "a GPU"


@pytest.fixture(scope="module")
def gpu() -> None:
    """Skips where there is no GPU."""
    if what := why_no_gpu():
        lack(what)


@pytest.fixture(scope="module")
def backend(gpu: None) -> Iterator[Any]:
    """The cupy backend on GPU 0, with graphs if nvmath-python is installed."""
    from mpissd.engine.backend.cupy_backend import CupyBackend

    opened = CupyBackend(0)
    yield opened
    opened.close()
