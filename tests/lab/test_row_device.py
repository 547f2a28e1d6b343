"""The device's share of a round: from calibration, from the rounds, and in the row."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from mpissd.lab.measure.row import device_means

WAITER = Waiter(30.0, spin=False)


def means(rounds_s: float | None, calibrated_s: float | None) -> dict[str, float | None]:
    """Of 4 rounds of 10 ms with forwards of 6, 6, 8 and 8."""
    ledger = np.array([[n, 10_000_000] for n in range(4)], np.int64)
    records = [6e-3, 6e-3, 8e-3, 8e-3]
    lead = SimpleNamespace(records=Records(records), ledger=ledger, all_reduce_s=rounds_s)
    measured = SimpleNamespace(lead=lead, profile=SimpleNamespace(all_reduce_s=calibrated_s))
    found: dict[str, float | None] = device_means(measured)
    return found


class Records:
    def __init__(self, t_target_s: list[float]) -> None:
        self.t_target_s = t_target_s

    def __len__(self) -> int:
        return len(self.t_target_s)


def test_the_parts_are_the_mean_round() -> None:
    assert means(None, 1e-3) == {"forward": 6000.0, "all_reduce": 1000.0, "idle": 3000.0}
    assert means(None, 0.0) == {"forward": 7000.0, "all_reduce": 0.0, "idle": 3000.0}


def test_what_was_timed_in_the_rounds_is_taken() -> None:
    assert means(8e-3, None) == {"forward": 5000.0, "all_reduce": 2000.0, "idle": 3000.0}


def test_unknown_all_reduces_leave_the_forward_unknown() -> None:
    assert means(None, None) == {"forward": None, "all_reduce": None, "idle": 3000.0}


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
