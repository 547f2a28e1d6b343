"""A transformer's measured forwards: between contexts and sequences, labelled, and as probed. A
probe on one rank: what it measures and refuses, and the profile that it saves."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpissd.cli.arguments import parse
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, DeviceInfo
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.backend.profile import EmulatedBackend, Profile, forwards_of, load_profile
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stacks import AnyShard
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.derive import check_device, covered, derived_from
from mpissd.lab.predict.simulation import predict_row
from mpissd.lab.probe.command import ways
from mpissd.lab.probe.measure import FORWARD_ROWS, TRANSFORMER_ROWS, GroupProbe, contexts
from mpissd.lab.probe.report import TABLES, fit, profile_name, save_profile
from tests.scripts import DATASHEET

TINY = "gen:layers=2,hidden=64,ffn=96,heads=4,kv_heads=2,vocab=64"
WAITER = Waiter(30.0, spin=False)
BATCHES, CONTEXTS = (1, 8), (64, 500, 2000)


def job(tp: int = 1, backend: str = "emulated", **flags: Any) -> Job:
    given_flags = {"mode": "sd", "forward": "transformer", "target": TINY, "draft": TINY, **flags}
    config = RunConfig(backend=backend, **given_flags)
    return resolve(config, tp, backend=backend, memory_bytes=None)


SHARD, OPTIONS = job().target_shard, job().options


def truth(rows: int, context: int, batch: int) -> float:
    """Weights, a row's products, its scores, and the keys and values of the sequences it reads."""
    products = 1e-3 + 1e-5 * rows
    return products + 1e-8 * rows * context + 3e-7 * min(rows, batch) * context


def at(context: int) -> ForwardOptions:
    return replace(OPTIONS, context=context)


def entries(shard: AnyShard = SHARD) -> list[dict[str, Any]]:
    told = {"params": shard.num_params(OPTIONS), "kernel": "k", "most_rows": None}
    told["from"] = "measured"
    return [
        {**vars(shard.key(batch, at(context))), **told}
        | {"seconds": {str(n): truth(n, context, batch) for n in TRANSFORMER_ROWS}}
        for batch in BATCHES
        for context in CONTEXTS
    ]


def measured(forwards: list[dict[str, Any]]) -> Profile:
    return replace(load_profile(DATASHEET), forwards=forwards_of(forwards))


PROBED = measured(entries())


@given(st.sampled_from(TRANSFORMER_ROWS), st.integers(64, 2000), st.integers(1, 8))
def test_times_between_contexts_are_found(rows: int, context: int, batch: int) -> None:
    seconds = PROBED.forward_s(SHARD.cost(rows, batch, 4, at(context)))
    assert seconds == pytest.approx(truth(rows, context, batch), rel=1e-9)


@pytest.mark.parametrize(
    ("context", "batch", "is_derived"), [(1999, 7, False), (2001, 1, True), (500, 9, True)]
)
def test_beyond_measured_ones_it_is_derived(context: int, batch: int, *, is_derived: bool) -> None:
    """The job's mean context is its --context and half of its one round."""
    found = job(mode="ar", draft=None, context=context, batch_size=batch, rounds=1)
    label = f"derived: transformer {SHARD.shape.name} T=1 context={context} b={batch}, measured up"
    told = f"{label} to context=2000 b=8" if is_derived else None
    assert derived_from(PROBED, PROBED, found) == told


def test_a_probe_of_products_says_nothing_of_transformers_nor_of_another_model() -> None:
    gemm = job(mode="ar", draft=None, forward=None, fuse=True).target_shard
    cost = gemm.cost(1, 1, 2, ForwardOptions(fuse=True))
    assert PROBED.measured(cost) is None
    with pytest.raises(ConfigError, match=r"doesn't cover transformer gen:.* context=\d+ b=1: it"):
        check_device(PROBED, job(target=TINY.replace("96", "128"), rounds=1))
    check_device(PROBED, job(rounds=1))
    assert covered(PROBED) == {"forward": "transformer"}


def probed(backend: Backend, found: Job) -> tuple[list[dict[str, Any]], list[str]]:
    faults: list[str] = []
    group = GroupProbe(backend, MPI.COMM_SELF, WAITER, faults, "measured: here")
    rows, batches = ([1, 5], [1]) if backend.name == "numpy" else ([1, 2, 5, 24], [1, 8])
    model, options = found.needs[0].model, replace(found.options, context=2000)
    parts = found.target_shard, options, rows, batches, model
    return group.transformer(SoloGroup(found.tp), *parts), faults


def test_an_emulated_probe_finds_its_own_profile_again_and_the_predictor_uses_it() -> None:
    h200 = load_profile(DATASHEET)
    found = job(mode="ar", draft=None, target="8b", context=1500, batch_size=4, rounds=20)
    forwards, _ = probed(EmulatedBackend(h200), found)
    assert [(e["kv_tokens"] // e["sequences"], e["sequences"]) for e in forwards] == [
        (context, batch) for batch in (1, 8) for context in contexts(2000)
    ]
    profile = replace(h200, forwards=forwards_of(json.loads(json.dumps(forwards))))
    for rows in (1, 2, 5, 12):
        cost = found.target_shard.cost(rows, 4, 2, found.options)
        assert profile.forward_s(cost) == pytest.approx(h200.forward_s(cost), rel=0.003)
        assert profile.measured(cost) is not None
    costs = [DeviceCosts.from_profile(known, found) for known in (profile, h200)]
    rates = [predict_row(found, of, HostCosts())["expected_tok_per_s"] for of in costs]
    assert rates[0] == pytest.approx(rates[1], rel=0.003)


def test_a_probe_on_a_processor_names_the_kernel_and_finds_no_wrong_data() -> None:
    found = job(backend="numpy", mode="ar", draft=None, rounds=1)
    forwards, faults = probed(NumpyBackend(), found)
    assert faults == []
    assert {e["kernel"] for e in forwards} == {"numba"}
    assert all(s > 0 for e in forwards for s in e["seconds"].values())


def test_what_does_not_fit_beside_the_weights_is_not_probed() -> None:
    found = job(mode="ar", draft=None, target="8b", rounds=1)
    backend = EmulatedBackend(replace(load_profile("h200"), memory_bytes=18 * 10**9 + (1 << 30)))
    forwards, _ = probed(backend, found)
    contexts_of = {(e["sequences"], e["kv_tokens"] // e["sequences"]) for e in forwards}
    assert contexts_of == {(1, 64), (1, 500), (1, 2000), (8, 64), (8, 500), (1, 1000), (8, 1000)}


@pytest.mark.parametrize(("where", "factor"), [((...,), 2), ((-1, -1), 0)])
def test_a_wrong_sum_is_found(where: Any, factor: int) -> None:
    """One rank too many, or the last element forgotten."""

    class Wrong(SoloGroup):
        def all_reduce(self, array: Any) -> None:
            array[where] *= factor

    faults: list[str] = []
    group = GroupProbe(NumpyBackend(), MPI.COMM_SELF, WAITER, faults, "measured: here")
    group.all_reduces(Wrong(1, 0), 64)
    assert "all-reduce solo of 256 B" in faults[0]


def products_job(tp: int = 1, **flags: Any) -> Job:
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
    found, profile = products_job(2), load_profile(DATASHEET)
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
    found = products_job()
    tables = tables_of(DATASHEET, found)
    fitted = fit(found, 2, tables, load_profile(DATASHEET).peak_flops_per_s, [1], "modelled")
    data = {"name": name, "device_name": "NVIDIA H200", **fitted, "tables": tables}
    return save_profile(str(folder), name, data), data


def test_a_saved_profile_replays_what_was_measured(tmp_path: Path) -> None:
    path, data = saved(tmp_path)
    assert path == tmp_path / "profiles" / "box.json"
    profile, truth = load_profile(str(path)), load_profile(DATASHEET)
    shard = Shard(products_job().target)
    profile.require(shard.key(1, products_job().options), shard.num_params(products_job().options))
    for rows in FORWARD_ROWS:
        cost = shard.cost(rows, 1, 2, products_job().options)
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
    headed = products_job(lm_head=True, context=512, batch_size=3, pair="8b@4L/1b")
    name = profile_name(headed, DeviceInfo("NVIDIA H200 (emulated)", "emulated"))
    assert name == "NVIDIA-H200-llama-3.1-8b@4L-T1D0-fuse-head-ctx512x3"
    assert parse(["probe", f"--name={name}"]).config.name == name
    for name in ("", "a/b", "..", "x" * 121):
        with pytest.raises(ConfigError, match="name"):
            parse(["probe", f"--name={name}"])


def test_a_parallel_draft_is_probed_beside_ar() -> None:
    run = RunConfig(mode="sd", num_drafts=0, parallel_drafting=True)
    modes = [(way.mode, way.parallel_drafting) for way in ways(run)]
    assert modes == [("ar", False)] * 2 + [("sd", True)] * 2
