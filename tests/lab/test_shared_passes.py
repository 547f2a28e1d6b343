"""Which configurations of a sweep share a paused pass: those whose pauses are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.engine.job import Job, resolve
from mpissd.engine.session.calibrations import Calibrations
from mpissd.lab.measure import calibrate
from mpissd.lab.measure.forward_times import ForwardTimes, Rehearsed
from mpissd.lab.measure.host_costs import pause_of

TARGET = ForwardTimes({1: 4e-3, 5: 4e-3, 11: 4e-3}, 0.0)
QUICK = ForwardTimes({1: 533e-6, 11: 591e-6}, 0.0)  # at most 32 rows: products chained
SLOW = ForwardTimes({1: 680e-6, 11: 700e-6, 33: 730e-6}, 0.0)  # 33 rows and more: cuBLAS


class Backend:
    """What owns calibrations."""


def job(**flags: Any) -> Job:
    config = RunConfig(**{"pair": "8b/1b", "backend": "emulated", "lookahead": 10, **flags})
    return resolve(config, 1, backend="emulated", memory_bytes=None)


def host_costs_of(jobs: list[tuple[Job, ForwardTimes]], monkeypatch: Any) -> list[Any]:
    """The draft's pauses that each job's host costs were read off, one job after the other."""
    calibrations, backend = Calibrations(), Backend()

    def paused_pass(rank: Any, target: Any, draft: Any, *, ahead: bool) -> Any:
        return SimpleNamespace(pause=None if ahead else pause_of(draft)(1), rehearsed=Rehearsed())

    monkeypatch.setattr(calibrate, "paused_pass", paused_pass)
    monkeypatch.setattr(calibrate, "nap_of", lambda *_: 0.0)
    monkeypatch.setattr(calibrate, "host_costs", lambda session, leads, drafts, *_: drafts[0].pause)
    found = []
    for each, draft in jobs:
        world = SimpleNamespace(gather=lambda passes: [passes, passes])
        topology = SimpleNamespace(world=world, first_draft=1, num_drafts=each.config.drafts)
        session: Any = SimpleNamespace(
            job=each, calibrations=calibrations, topology=topology, backend=backend
        )
        rank: Any = SimpleNamespace(session=session, chained=None)
        found.append(calibrate._host_costs(rank, TARGET, draft)[0])
    return found


@pytest.mark.parametrize("ssd_first", [True, False])
def test_a_pass_over_other_pauses_is_not_shared(ssd_first: bool, monkeypatch: Any) -> None:
    """SSD grows 33 rows, so its draft runs another kernel than SD's of the same K: what its pauses
    are longer by is no host's (150 µs a step of 70B's SD at K = 10, 6.5% of its rounds)."""
    jobs = [(job(mode="sd"), QUICK), (job(mode="ssd"), SLOW)]
    told = host_costs_of(jobs[::-1] if ssd_first else jobs, monkeypatch)
    assert told == ([680e-6, 533e-6] if ssd_first else [533e-6, 680e-6])


def test_hit_laws_and_modes_of_equal_pauses_share_one(monkeypatch: Any) -> None:
    jobs = [job(mode="sd"), job(mode="ssd", fan_out="uniform:2"), job(mode="ssd", p_hit=0.5)]
    assert host_costs_of([(each, QUICK) for each in jobs], monkeypatch) == [533e-6] * 3
    assert len({calibrate._pass_key(each, TARGET, QUICK) for each in jobs}) == 1
