"""Costs: tables between measured points, the profile's forwards to the last bit, JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.job import resolve
from mpissd.engine.model.shard import Shard
from mpissd.engine.model.stepper import Stepper
from mpissd.lab.predict.costs import DeviceCosts, HostCosts, RowTable
from mpissd.lab.predict.grid import padded
from mpissd.lab.predict.simulation import steps_seen

Points = st.dictionaries(st.integers(1, 500), st.floats(0, 1), min_size=1, max_size=6)


def test_a_table_is_straight_between_points_flat_before_and_goes_on_behind() -> None:
    table = RowTable.of({8: 3.0, 2: 1.0, 4: 2.0})
    assert table([1, 2, 3, 4, 6, 8, 10]).tolist() == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    assert table(6).shape == ()
    assert RowTable.of({4: 2.0})([1, 4, 99]).tolist() == [2.0, 2.0, 2.0]
    falling = RowTable.of({2: 2.0, 4: 1.0})
    assert falling([4, 8]).tolist() == [1.0, 1.0]  # noise doesn't become a negative time


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((), ()), ((1,), ()), ((0, 1), (1.0, 1.0)), ((2, 1), (1.0, 1.0)), ((1, 1), (1.0, 1.0)),
     ((1,), (-1.0,)), ((1,), (math.nan,)), ((1,), (math.inf,))],
)  # fmt: skip
def test_a_table_refuses_what_is_none(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="row table"):
        RowTable(rows, seconds)


@pytest.mark.parametrize("device", ["h200", "v100-32"])
@pytest.mark.parametrize(("tp", "drafts"), [(1, 0), (4, 1)])
@pytest.mark.parametrize("options", [{}, {"lm_head": True, "context": 4096, "fuse": True}])
def test_a_profile_s_forwards_are_the_emulated_backend_s(
    device: str, tp: int, drafts: int, options: dict[str, int]
) -> None:
    """Bit by bit: the emulated backend lets exactly this time pass."""
    config = RunConfig(
        mode="sd" if not drafts else "ssd", num_drafts=drafts, pair="70b/8b", batch_size=3,
        lookahead=6, **options,
    )  # fmt: skip
    job = resolve(config, tp, backend="emulated", memory_bytes=None)
    backend = EmulatedBackend(load_profile(device))
    costs = DeviceCosts.from_profile(backend.profile, job)
    assert job.draft is not None
    wide = job.target_buckets()[-1]
    for rows in job.target_buckets():
        cost = Shard(job.target, tp).cost(rows, 3, backend.itemsize, job.options, wide)
        program = backend.program(lambda: None, cost)
        assert float(costs.verify(rows)) == program.elapsed_s()
    wide, k = job.draft_buckets()[-1], job.draft_options.top_k
    for rows in job.draft_buckets():
        both = [
            Shard(job.draft).cost(
                rows, 3, backend.itemsize, replace(job.draft_options, top_k=n), wide
            )
            for n in (1, k)
        ]
        single, lists = (backend.program(lambda: None, cost).elapsed_s() for cost in both)
        assert float(costs.draft_s(rows)) == single and float(costs.glue_s(rows, k)) == lists


def test_a_glue_takes_straight_lines_over_its_candidates() -> None:
    device = DeviceCosts.from_points({1: 1.0}, {1: 2.0}, {1: {1: 2.0}, 5: {1: 4.0, 9: 12.0}})
    assert device.glue_s(1, 3) == 3.0 and device.glue_s(5, 3) == 5.0
    assert device.glue_s(np.array([1, 1, 1, 9]), [1, 5, 9, 5]).tolist() == [2.0, 4.0, 4.0, 12.0]
    assert device.draft_s(1) == 2.0
    assert DeviceCosts.from_points({1: 1.0}, {1: 2.0}).glue_s(1, 7) == 2.0
    one = DeviceCosts.from_points({1: 1.0}, {1: 2.0}, {4: {1: 2.5}})
    assert one.glue_s(1, 4) == 2.5 and one.glue_s(1, 9) == 2.5


def test_costs_survive_json() -> None:
    listed = DeviceCosts.from_points({1: 1e-3}, {1: 2e-4}, {4: {1: 3e-4, 5: 4e-4}})
    assert DeviceCosts.from_dict(json.loads(json.dumps(listed.to_dict()))) == listed
    assert hash(listed) != hash(dataclasses.replace(listed, lists=()))  # sweeps keep by it
    with pytest.raises(ConfigError, match="device costs"):
        DeviceCosts.from_dict({**listed.to_dict(), "lists": 3})
    device = DeviceCosts.from_points({1: 1e-3, 16: 1.1e-3}, {1: 2e-4})
    assert DeviceCosts.from_dict(json.loads(json.dumps(device.to_dict()))) == device
    alone = DeviceCosts.from_points({1: 1e-3})
    assert DeviceCosts.from_dict(json.loads(json.dumps(alone.to_dict()))) == alone
    host = HostCosts(link=2e-5, step=3e-5)
    assert HostCosts.from_dict(json.loads(json.dumps(host.to_dict()))) == host


def test_costs_older_than_the_upload_count_it_in_the_launch() -> None:
    old = {k: v for k, v in HostCosts(lead_launch=2e-5).to_dict().items() if k != "lead_upload"}
    assert HostCosts.from_dict(old) == HostCosts(lead_launch=2e-5, lead_upload=0.0)


def test_bad_costs_are_one_line() -> None:
    good = HostCosts().to_dict()
    with pytest.raises(ConfigError, match=r"did you mean 'link'\?"):
        HostCosts.from_dict({**good, "lnk": 1.0})
    with pytest.raises(ConfigError, match="missing link"):
        HostCosts.from_dict({k: v for k, v in good.items() if k != "link"})
    with pytest.raises(ConfigError, match=r"wake=-1\.0"):
        HostCosts.from_dict({**good, "wake": -1.0})
    with pytest.raises(ConfigError, match="wake: 'soon'"):
        HostCosts.from_dict({**good, "wake": "soon"})
    for bad in ({}, {"verify": 3}, {"verify": {"x": 1.0}}, {"verify": {"1": None}}):
        with pytest.raises(ConfigError, match=r"device costs|row table"):
            DeviceCosts.from_dict(bad)


@pytest.mark.parametrize(("batch", "lookahead"), [(1, 0), (1, 7), (3, 4), (6, 2), (8, 3)])
def test_buckets_are_the_stepper_s(batch: int, lookahead: int) -> None:
    mode = "ssd" if lookahead else "ar"
    config = RunConfig(mode=mode, pair="toy", batch_size=batch, lookahead=lookahead)
    job = resolve(config, 1, backend="emulated", memory_bytes=None)
    stepper = Stepper(
        EmulatedBackend(load_profile("null")), SoloGroup(), Shard(job.target), job.options,
        buckets=job.target_buckets(), num_sequences=batch, seed=0,
    )  # fmt: skip
    rows = np.arange(1, job.verify_rows + 1)
    expected = [stepper.bucket(n) for n in rows.tolist()]
    assert padded(rows[None], np.array([[batch, job.verify_rows]])).tolist() == [expected]


def test_polls_stand_between_whole_steps() -> None:
    waited = np.array([-1.0, 0.0, 0.1, 1.0, 1.1, 99.0])
    assert steps_seen(waited, np.array(1.0), 4).tolist() == [0, 0, 1, 1, 2, 4]
    assert steps_seen(waited, np.array(0.0), 4).tolist() == [0, 0, 4, 4, 4, 4]
