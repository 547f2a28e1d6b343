"""The device's share of a round: from calibration, from the rounds, and in the row."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from mpissd.common.presets import resolve_model
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Cost
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.backend.profile import Profile, load_profile
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stepper import Stepper
from mpissd.lab.measure import calibrate

WAITER = Waiter(30.0, spin=False)


class SleepyGroup(Group):
    """Two ranks whose all-reduce takes 2 ms."""

    capturable = False

    def __init__(self) -> None:
        super().__init__(2, 0)
        self.arrays: list[Any] = []

    def all_reduce(self, array: Any) -> None:
        self.arrays.append(array)
        time.sleep(2e-3)

    def all_gather(self, local: Any, gathered: Any) -> None:
        raise AssertionError("no forward gathers hidden vectors")


def test_a_chain_is_as_many_all_reduces_as_a_forward_has() -> None:
    group, cost = SleepyGroup(), Cost(8, 0, 0, 0, 0, 4, 0, 2)
    seconds = calibrate.chain_s(NumpyBackend(), group, 64, cost, WAITER)
    assert seconds >= 4 * 2e-3
    assert len(group.arrays) % 4 == 0 and group.arrays[0].shape == (8, 64)


@pytest.mark.parametrize(("square", "peak"), [(1e9, 4e9), (9e9, 9e9), (None, None)])
def test_the_peak_is_the_fastest_thing_measured(square: float | None, peak: float | None) -> None:
    """Forwards of 2 and 8 Gflop in 1 and 2 seconds; one without a measured time doesn't count."""
    stepper = object.__new__(Stepper)
    stepper.cost = lambda rows: Cost(rows, 0, 0, rows * 10**9, 1, 0, 0, 1)  # type: ignore[method-assign]
    backend = NumpyBackend()
    backend.peak_flops = lambda: square  # type: ignore[method-assign]
    times = {2: 1.0, 8: 2.0, 64: 0.0}
    assert calibrate._peak_flops(SimpleNamespace(backend=backend), stepper, times) == peak


def all_reduce_s(profile: Profile, tp: int) -> Any:
    """The calibration of an emulated 8B on T ranks, 5 rows."""
    backend = EmulatedBackend(profile)
    shard = Shard(resolve_model("8b"), tp)
    stepper = Stepper(
        backend, SoloGroup(tp), shard, ForwardOptions(), buckets=[5], num_sequences=1, seed=0
    )
    session = SimpleNamespace(
        job=SimpleNamespace(verify_rows=5), backend=backend, group=SoloGroup(tp), waiter=WAITER
    )
    return calibrate._all_reduce_s(session, stepper)


def test_emulated_all_reduces_are_the_profile_s() -> None:
    profile = load_profile("h100")
    assert all_reduce_s(profile, 2) == 64 * profile.all_reduce_s(2, 5 * 4096 * 2) > 0
    assert all_reduce_s(profile, 1) == 0.0


def test_a_profile_of_one_rank_knows_no_all_reduce() -> None:
    """Its measured forwards may still be known."""
    import dataclasses

    unknown = dataclasses.replace(
        load_profile("h100"), all_reduce_latency_s=None, all_reduce_bytes_per_s=None
    )
    assert all_reduce_s(unknown, 1) == 0.0
    cost = Shard(resolve_model("8b"), 2).cost(5, 1, 2, ForwardOptions())
    stepper = object.__new__(Stepper)
    stepper.cost = lambda rows: cost  # type: ignore[method-assign]
    stepper.bucket = lambda rows: rows  # type: ignore[method-assign]
    session = SimpleNamespace(
        job=SimpleNamespace(verify_rows=5), backend=EmulatedBackend(unknown), group=SoloGroup(2)
    )
    assert calibrate._all_reduce_s(session, stepper) is None
