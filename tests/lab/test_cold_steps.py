"""Draft steps behind a verification: what they take beyond steps back to back is a host cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from mpissd.lab.measure import cold
from mpissd.lab.measure.host_costs import ForwardTimes
from mpissd.lab.predict.costs import HostCosts
from tests.lab.test_transformer_profile import job

HOT, COLD, WARM = 1e-4, 4e-4, 2e-4
HOST = HostCosts(draft_assemble=1e-5, step=2e-5)


class Caches:
    """Forwards of two models: a draft step takes longer the fewer steps lie behind the target."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, stepper: str, rows: int, session: Any) -> float:
        if stepper == "target":
            self.steps.append(0)
            return 1.0
        self.steps[-1] += 1
        return {1: COLD, 2: WARM}.get(self.steps[-1], HOT)


def found(monkeypatch: pytest.MonkeyPatch, kind: str = "cpu", **flags: Any) -> tuple[Any, Caches]:
    caches = Caches()
    monkeypatch.setattr(cold, "_forward_s", caches)
    session = SimpleNamespace(
        job=job(backend="numpy", lookahead=4, **flags),
        backend=SimpleNamespace(info=SimpleNamespace(kind=kind)),
        topology=SimpleNamespace(world=MPI.COMM_SELF, tp=1, num_drafts=0),
        barrier=lambda: None,
    )
    target, draft = (SimpleNamespace(stepper=name) for name in ("target", "draft"))
    rank: Any = SimpleNamespace(session=session, target=target, draft=draft)
    times = ForwardTimes({1: HOT, 4: 2 * HOT}, 0.0)
    return cold.with_cold_steps(rank, times, HOST), caches


def test_what_a_round_s_steps_take_beyond_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    host, caches = found(monkeypatch, num_drafts=0)
    beyond = COLD + WARM - 2 * HOT
    assert host.draft_assemble == pytest.approx(HOST.draft_assemble + beyond)
    assert host.step == HOST.step and set(caches.steps) == {4}


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("cpu", {"mode": "ssd"}), ("emulated", {}), ("cpu", {"forward": None})],
    ids=["growth", "no caches", "products"],
)
def test_elsewhere_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, kind: str, flags: dict[str, Any]
) -> None:
    host, caches = found(monkeypatch, kind, **flags)
    assert host is HOST and not caches.steps
