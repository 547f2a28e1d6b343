"""Backends: NumPy's is the oracle of the others, an emulated one computes nothing, names."""

import importlib.util
import time

import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Cost
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.backend.profile import EmulatedBackend, Profile
from mpissd.engine.backend.registry import choose, open_backend

WAITER = Waiter(60.0, spin=False)
FORWARD_S = 0.03
NUMPY = NumpyBackend()


def test_reads_that_others_disturb_do_not_lower_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was busy while its rate was measured gave a floor above its forwards."""
    seconds = iter(range(1, 10**6))
    clock = [0.0]

    def tick() -> float:
        clock[0] += 1e-3 if next(seconds) % 5 == 1 else 4e-3
        return clock[0]

    monkeypatch.setattr("mpissd.engine.backend.numpy_backend.time.perf_counter", tick)
    assert NUMPY.read_bandwidth(10**6) == pytest.approx(1e6 / 1e-3)


def cost(num_products: int) -> Cost:
    return Cost(1, 0, 0, 0, num_products, 0, 0, 1)


@pytest.fixture
def backend() -> EmulatedBackend:
    """Every product takes 30 ms."""
    return EmulatedBackend(
        Profile("slow", "A slow box", 1e12, 1e12, FORWARD_S, 0.0, None, {}, {}, {})
    )


def never() -> None:
    raise AssertionError("a body ran")


def test_launches_queue_as_on_a_stream(backend: EmulatedBackend) -> None:
    one, two = backend.program(never, cost(1)), backend.program(never, cost(2))
    start = time.perf_counter()
    one.launch()
    two.launch()  # queued after the first
    one.wait(WAITER)
    assert time.perf_counter() - start >= FORWARD_S
    two.wait(WAITER)
    assert time.perf_counter() - start >= 3 * FORWARD_S
    assert (one.elapsed_s(), two.elapsed_s()) == (FORWARD_S, 2 * FORWARD_S)


def test_cupy_without_cupy_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "mpissd.engine.backend.registry.importlib.util.find_spec",
        lambda name: None if name == "cupy" else find(name),
    )
    with pytest.raises(ConfigError, match="CuPy is not installed; pip install"):
        open_backend("cupy", device="h100", local_rank=0)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'numpi': did you mean 'numpy'"):
        choose("numpi")
    with pytest.raises(ConfigError, match="unknown backend 'jax'"):
        open_backend("jax", device="h100", local_rank=0)
    with pytest.raises(ConfigError, match="unknown device"):
        open_backend("emulated", device="h1000000", local_rank=0)
