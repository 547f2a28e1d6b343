"""The calibration of collectives, which a row subtracts from its forwards."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mpissd.common.presets import resolve_model
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.measure import calibrate


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
