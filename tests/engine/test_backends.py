"""Backends: NumPy's is the oracle of the others, an emulated one computes nothing, names."""

from __future__ import annotations

import importlib.util
import time

import numpy as np
import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.presets import resolve_model
from mpissd.common.wait import Waiter
from mpissd.engine.backend import weights
from mpissd.engine.backend.base import Cost, WeightPart
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.backend.profile import Profile, load_profile
from mpissd.engine.backend.registry import choose, open_backend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stepper import Stepper

WAITER = Waiter(60.0, spin=False)
FORWARD_S = 0.03
NUMPY = NumpyBackend()


def test_a_fused_weight_is_its_parts_side_by_side() -> None:
    parts = [WeightPart(key, 3, 11, 2, 2 + width, 0.5) for key, width in ((1, 4), (2, 6))]
    fused = NUMPY.weight(parts)
    assert fused.shape == (8, 10) and fused.flags.c_contiguous and fused.dtype == np.float32
    assert np.array_equal(fused[:, :4], weights.part(parts[0]))
    assert np.array_equal(fused[:, 4:], NUMPY.weight(parts[1:]))


def test_tokens_look_up_rows_around_the_end_of_the_table() -> None:
    table, out = NUMPY.table(8, 3, 5), NUMPY.activation(4, 3)
    NUMPY.gather(table, np.array([0, 7, 8, 128255], np.int32), out)
    assert np.array_equal(out, table[[0, 7, 0, 128255 % 8]])


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_falls_and_ties_go_to_the_smaller_id(k: int) -> None:
    values = np.array([[1, 5, 5, 0, 5], [2, 2, 2, 2, 2], [-1, -2, -3, -4, 9]], np.float32)
    ids, found = NUMPY.top_buffers(3, k)
    NUMPY.top_k(values, k, ids, found)
    want = [[1, 2, 4, 0, 3], [0, 1, 2, 3, 4], [4, 0, 1, 2, 3]]
    assert ids.tolist() == [row[:k] for row in want]
    assert np.array_equal(found, np.take_along_axis(values, ids, axis=1))
    host = NUMPY.host_ints(20)
    NUMPY.read_out(ids, host)
    assert host[: 3 * k].tolist() == ids.ravel().tolist() and (host[3 * k :] == 0).all()


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


def test_a_forward_is_over_when_its_time_is(backend: EmulatedBackend) -> None:
    program = backend.program(never, cost(1))
    start = time.perf_counter()
    program.launch()
    assert not program.done() or time.perf_counter() - start >= FORWARD_S
    program.wait(WAITER)
    assert time.perf_counter() - start >= FORWARD_S
    assert program.done() and program.elapsed_s() == FORWARD_S


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


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_70b_steps_on_a_laptop(tp: int) -> None:
    """Nothing is allocated, and a forward lasts as long as the profile sets for the shard."""
    profile = load_profile("h100")
    backend, options = EmulatedBackend(profile), ForwardOptions(lm_head=True, context=4096)
    shard = Shard(resolve_model("70b"), tp)
    stepper = Stepper(
        backend, SoloGroup(tp), shard, options, buckets=[1, 8], num_sequences=1, seed=0
    )
    stepper.upload(5, np.zeros(0, np.int32))
    stepper.launch()
    with pytest.raises(NotImplementedError, match="holds no numbers"):
        stepper.results()
    assert stepper.elapsed_s() == profile.forward_s(shard.cost(8, 1, 2, options))
    assert stepper.elapsed_s() > profile.forward_s(shard.cost(8, 1, 2, ForwardOptions()))
    stepper.close()


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
