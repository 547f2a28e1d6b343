"""A row's floor, and the rank whose GPU a learner shares."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.presets import resolve_model
from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.backend.profile import EmulatedBackend, load_profile
from mpissd.engine.job import resolve
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.measure.row import floor_of, shares_gpu_of


def floor(device: str, batch: int, **numbers: Any) -> tuple[dict[str, Any], float | None, Any]:
    """(keys, seconds, cost) of the floor of an 8B with so many sequences of 8 rows."""
    config = RunConfig(mode="sd", pair="8b/1b", lookahead=7, batch_size=batch)
    job = resolve(config, 2, backend="emulated", memory_bytes=None)
    profile = dataclasses.replace(load_profile(device), **numbers)
    backend = EmulatedBackend(profile)
    rates = {
        "read_bytes_per_s": backend.read_bandwidth(1),
        "peak_flops_per_s": backend.peak_flops(),
    }
    told, seconds = floor_of(job, backend.itemsize, rates)
    cost = Shard(job.target, 2).cost(job.verify_rows, batch, 2, job.options)
    return told, seconds, (cost, profile)


@pytest.mark.parametrize(("batch", "bound"), [(1, "bytes"), (64, "flops")])
def test_an_emulated_floor_is_its_profile_s(batch: int, bound: str) -> None:
    told, seconds, (cost, profile) = floor("h100", batch)
    params = Shard(resolve_model("8b"), 2).num_params(ForwardOptions())
    assert seconds == profile.floor_s(cost)
    bytes_s = told["floor_bytes"] / told["read_bytes_per_s"]
    flops_s = told["floor_flops"] / told["peak_flops_per_s"]
    assert told["floor_flops"] == 2 * 8 * batch * params
    assert (flops_s > bytes_s) == (bound == "flops") and seconds == max(bytes_s, flops_s)


@pytest.mark.parametrize(("gpu", "shared"), [("GPU-b", 1), ("GPU-c", None), (None, None)])
def test_a_learner_shares_the_gpu_of_its_rank(gpu: str | None, shared: int | None) -> None:
    infos = [DeviceInfo("a GPU", "gpu", uuid=f"GPU-{name}") for name in "ab"]
    measured: Any = SimpleNamespace(lead=SimpleNamespace(learner=gpu and {"gpu": gpu}))
    assert shares_gpu_of(measured, infos) == shared
