"""From a probe's tables to a profile: rates that give the measured times again, saved whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.probe.group import FORWARD_ROWS, GroupProbe
from mpissd.lab.probe.printed import print_table
from mpissd.lab.probe.profile import TABLES, check_name, fit, profile_name, save_profile
from mpissd.lab.probe.sample import Checks
from tests.datasheet import DATASHEET

WAITER = Waiter(30.0, spin=False)
H200 = DeviceInfo("NVIDIA H200 (emulated)", "emulated")


def job(tp: int = 1, **flags: Any) -> Job:
    config = RunConfig(**{"mode": "ar", "pair": "8b/1b", "fuse": True, **flags})
    return resolve(config, tp, backend="emulated", memory_bytes=None)


def tables_of(device: str, found: Job) -> dict[str, Any]:
    """The result of a probe of an emulated device."""
    backend, checks = EmulatedBackend(load_profile(device)), Checks()
    group = GroupProbe(backend, MPI.COMM_SELF, WAITER, checks, "modelled")
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
    found, profile = job(), load_profile(DATASHEET)
    numbers = fit(
        found,
        2,
        tables_of(DATASHEET, found),
        load_profile(DATASHEET).peak_flops_per_s,
        [10, 7, 9],
        "modelled",
    )
    values = {key: told["value"] for key, told in numbers["numbers"].items()}
    assert values["read_bytes_per_s"] == profile.read_bytes_per_s
    assert values["launch_s"] == profile.launch_s
    assert values["product_overhead_s"] == pytest.approx(profile.product_overhead_s, rel=1e-9)
    assert values["memory_bytes"] == 7
    assert all(told["from"].startswith("modelled") for told in numbers["numbers"].values())
    assert numbers["all_reduce"]["latency_s"] is None


def test_all_reduces_are_a_straight_line_through_the_smallest_and_the_largest() -> None:
    found = job(2)
    tables = tables_of(DATASHEET, found)
    profile = load_profile(DATASHEET)
    sizes = [8192, 1 << 19, 1 << 20]
    told = {str(n): profile.all_reduce_s(2, n) for n in sizes}
    tables["all_reduces"] = all_reduces(told)
    fitted = fit(found, 2, tables, load_profile(DATASHEET).peak_flops_per_s, [None], "modelled")
    reduce, numbers = fitted["all_reduce"], fitted["numbers"]
    assert reduce["latency_s"]["2"] == pytest.approx(6.5e-6, rel=1e-6)
    assert reduce["bytes_per_s"]["2"] == pytest.approx(145e9, rel=1e-6)
    overhead = numbers["product_overhead_s"]["value"]
    assert overhead == pytest.approx(profile.product_overhead_s, rel=1e-6)
    assert numbers["memory_bytes"]["value"] is None


@pytest.mark.parametrize(
    ("seconds", "latency", "rate"),
    [
        ({"8192": 0.0, "1048576": 0.0}, {}, {}),  # a null device: defined as free
        ({"8192": 4.0, "1048576": 2.0}, {"2": 4.0 - 8192 * 2 / 2**20}, {"2": 2**20 / 2}),
    ],
)
def test_odd_all_reduces_make_no_odd_rates(
    seconds: dict[str, float], latency: dict[str, float], rate: dict[str, float]
) -> None:
    found = job(2)
    tables = tables_of("null", found)
    tables["all_reduces"] = all_reduces(seconds)
    reduce = fit(found, 2, tables, None, [None], "m")["all_reduce"]
    assert (reduce["latency_s"], reduce["bytes_per_s"]) == (latency, rate)


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


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (job(), "NVIDIA-H200-llama-3.1-8b-T1D0-fuse"),
        (job(2, mode="sd", fuse=False), "NVIDIA-H200-llama-3.1-8b-llama-3.2-1b-T2D1"),
        (
            job(lm_head=True, context=512, batch_size=3, pair="8b@4L/1b"),
            "NVIDIA-H200-llama-3.1-8b@4L-T1D0-fuse-head-ctx512x3",
        ),
    ],
)
def test_a_name_tells_what_a_profile_covers(found: Job, name: str) -> None:
    assert profile_name(found, H200) == name
    check_name(name)


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 121])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name="):
        check_name(name)


def test_what_a_person_sees(capsys: pytest.CaptureFixture[str]) -> None:
    tables = tables_of(DATASHEET, job())
    told = {str(n): 1e-6 * n for n in (64, 4096)}
    links = {"name": "mpi", "idle_s": 5e-3, "seconds": told, "spread": {"64": 0.5, "4096": None}}
    seat = {"rank": 0, "role": "lead", "host": "node1", "device": "H200", "bus_id": "0000:17:00.0",
            "cores": 4}  # fmt: skip
    shown = tables | {"links": [links], "all_reduces": all_reduces(told)}
    print_table(shown, ["nccl: no"], [], [seat])
    said = capsys.readouterr().out
    for part in ("r(M)", "mpi after 0.005 s", "~64.0", "nccl, 2 ranks, graph",
                 "nccl: no", "0000:17:00.0", "3135.6 GB/s", "launch  empty"):  # fmt: skip
        assert part in said
    assert all(len(line) < 130 for line in said.splitlines())
