"""The emulated backend: a forward lasts as modelled, on a queue, and nothing is computed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpissd.common.presets import resolve_model
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Cost
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.backend.profile import Profile, load_profile
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stepper import Stepper

WAITER = Waiter(60.0, spin=False)
FORWARD_S = 0.03


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
