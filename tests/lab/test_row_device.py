"""The device's share of a round: from calibration, from the rounds, and in the row."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpissd.common.presets import resolve_model
from mpissd.common.wait import Waiter
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.shard import ForwardOptions, Shard
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


def test_emulated_all_reduces_are_the_profile_s() -> None:
    """A profile that was probed on one rank knows none; its forwards may still be known."""
    cost = Shard(resolve_model("8b"), 2).cost(5, 1, 2, ForwardOptions())
    stepper: Any = SimpleNamespace(cost=lambda rows: cost, bucket=lambda rows: rows)
    h100 = load_profile("h100")
    unknown = replace(h100, all_reduce_latency_s=None, all_reduce_bytes_per_s=None)
    for profile, seconds in ((h100, 64 * h100.all_reduce_s(2, 5 * 4096 * 2)), (unknown, None)):
        session: Any = SimpleNamespace(
            job=SimpleNamespace(verify_rows=5), backend=EmulatedBackend(profile), group=SoloGroup(2)
        )
        assert calibrate._all_reduce_s(session, stepper) == seconds
