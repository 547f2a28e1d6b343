"""A probe on one rank: what it measures and refuses, and the profile that it saves."""

import json
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpissd.cli.arguments import parse
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.presets import ModelShape
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.backend.profile import EmulatedBackend, load_profile
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.probe.measure import FORWARD_ROWS, GroupProbe
from mpissd.lab.probe.report import TABLES, fit, profile_name, save_profile
from tests.scripts import DATASHEET

WAITER = Waiter(30.0, spin=False)
TINY = ModelShape("tiny", 2, 64, 2, 2, 32, 96, True, 128)


def probe(backend: Any) -> tuple[GroupProbe, list[str]]:
    faults: list[str] = []
    return GroupProbe(backend, MPI.COMM_SELF, WAITER, faults, "measured: here"), faults


@pytest.mark.parametrize(("where", "factor"), [((...,), 2), ((-1, -1), 0)])
def test_a_wrong_sum_is_found(where: Any, factor: int) -> None:
    """One rank too many, or the last element forgotten."""

    class Wrong(SoloGroup):
        def all_reduce(self, array: Any) -> None:
            array[where] *= factor

    group, faults = probe(NumpyBackend())
    group.all_reduces(Wrong(1, 0), 64)
    assert "all-reduce solo of 256 B" in faults[0]


def job(tp: int = 1, **flags: Any) -> Job:
    config = RunConfig(**{"mode": "ar", "pair": "8b/1b", "fuse": True, **flags})
    return resolve(config, tp, backend="emulated", memory_bytes=None)


def tables_of(device: str, found: Job) -> dict[str, Any]:
    """The result of a probe of an emulated device."""
    backend = EmulatedBackend(load_profile(device))
    group = GroupProbe(backend, MPI.COMM_SELF, WAITER, [], "modelled")
    shard, own = Shard(found.target, found.tp), SoloGroup(found.tp)
    tables: dict[str, Any] = {name: [] for name in TABLES}
    rate = {"bytes": 1 << 30, "read_bytes_per_s": backend.read_bandwidth(1 << 30)}
    tables["bandwidths"] = [{"rank": 0, **rate}]
    tables["forwards"] = [group.forwards(own, shard, found.options, FORWARD_ROWS, 1)]
    return tables | {"launches": [group.empty()]}


def all_reduces(seconds: dict[str, float], ranks: int = 2) -> list[dict[str, Any]]:
    spread = dict.fromkeys(seconds, 0.0)
    identity = {"name": "nccl", "ranks": ranks, "graph": True, "from": "measured"}
    return [{**identity, "seconds": seconds, "spread": spread}]


def test_the_rates_of_an_emulated_device_come_out_again() -> None:
    """All-reduces are a straight line through the smallest and the largest."""
    found, profile = job(2), load_profile(DATASHEET)
    tables, peak = tables_of(DATASHEET, found), profile.peak_flops_per_s
    alone = fit(found, 2, tables, peak, [10, None, 9], "modelled")
    assert alone["all_reduce"]["latency_s"] is None
    assert alone["numbers"]["memory_bytes"]["value"] is None
    known = {str(n): profile.all_reduce_s(2, n) for n in (8192, 1 << 19, 1 << 20)}
    fitted = fit(found, 2, tables | {"all_reduces": all_reduces(known)}, peak, [10, 7], "modelled")
    values = {key: number["value"] for key, number in fitted["numbers"].items()}
    assert values["read_bytes_per_s"] == profile.read_bytes_per_s
    assert values["launch_s"] == profile.launch_s and values["memory_bytes"] == 7
    assert values["product_overhead_s"] == pytest.approx(profile.product_overhead_s, rel=1e-9)
    assert all(n["from"].startswith("modelled") for n in fitted["numbers"].values())
    assert fitted["all_reduce"]["latency_s"]["2"] == pytest.approx(6.5e-6, rel=1e-6)
    assert fitted["all_reduce"]["bytes_per_s"]["2"] == pytest.approx(145e9, rel=1e-6)


def saved(folder: Path, name: str = "box") -> tuple[Path, dict[str, Any]]:
    (folder / "profiles").mkdir(exist_ok=True)
    found = job()
    tables = tables_of(DATASHEET, found)
    fitted = fit(found, 2, tables, load_profile(DATASHEET).peak_flops_per_s, [1], "modelled")
    data = {"name": name, "device_name": "NVIDIA H200", **fitted, "tables": tables}
    return save_profile(str(folder), name, data), data


def test_a_saved_profile_replays_what_was_measured(tmp_path: Path) -> None:
    path, data = saved(tmp_path)
    assert path == tmp_path / "profiles" / "box.json"
    profile, truth = load_profile(str(path)), load_profile(DATASHEET)
    shard = Shard(job().target)
    profile.require(shard.key(1, job().options), shard.num_params(job().options))
    for rows in FORWARD_ROWS:
        cost = shard.cost(rows, 1, 2, job().options)
        assert profile.forward_s(cost) == truth.forward_s(cost)
    uncovered = shard.cost(8, 1, 2, ForwardOptions(lm_head=True))
    assert profile.forward_s(uncovered) == pytest.approx(truth.forward_s(uncovered), rel=1e-6)
    assert json.loads(path.read_text())["kind"] == "device"
    assert data["tables"]["bandwidths"]  # kept for the reader, not read


def test_a_profile_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    path, data = saved(tmp_path)
    before = path.read_text()
    data["numbers"]["launch_s"]["value"] = float("nan")
    with pytest.raises(ConfigError, match="at least 0"):
        save_profile(str(tmp_path), "box", data)
    assert path.read_text() == before and [*path.parent.iterdir()] == [path]
    again, _ = saved(tmp_path)  # in the place of the old one
    assert again == path and [*path.parent.iterdir()] == [path]
    with pytest.raises(ConfigError, match="cannot be written"):
        save_profile(str(tmp_path / "nowhere"), "box", data)


def test_a_name_tells_what_a_profile_covers() -> None:
    headed = job(lm_head=True, context=512, batch_size=3, pair="8b@4L/1b")
    name = profile_name(headed, DeviceInfo("NVIDIA H200 (emulated)", "emulated"))
    assert name == "NVIDIA-H200-llama-3.1-8b@4L-T1D0-fuse-head-ctx512x3"
    assert parse(["probe", f"--name={name}"]).config.name == name
    for name in ("", "a/b", "..", "x" * 121):
        with pytest.raises(ConfigError, match="name"):
            parse(["probe", f"--name={name}"])
