"""Costs: tables between measured points, a profile's forwards to the last bit, JSON and back, the
kernel's times that a job takes, host costs, and forwards at a T that was not measured. A predicted
row, the forecast of a row by another job's profile, and the errors of both, on committed rows."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.config import RunConfig
from mpissd.common.presets import resolve_model
from mpissd.engine.backend.base import ForwardKey
from mpissd.engine.backend.profile import (
    Curve,
    EmulatedBackend,
    Forward,
    HostEntry,
    Profile,
    load_profile,
)
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.plan.candidates import Choice, sharded, survey
from mpissd.lab.plan.plan import plan
from mpissd.lab.predict.costs import DeviceCosts, HostCosts, RowTable
from mpissd.lab.predict.derive import (
    BY_LAYERS,
    costs_at,
    derive,
    derived_from,
    entry_of,
    host_of,
    with_derived,
)
from mpissd.lab.predict.simulation import expected, predict_row
from mpissd.lab.tables.load import load_rows, row_files
from mpissd.lab.tables.uses import Family
from results.predictions import (
    errors_of,
    forecast_row,
    groups,
    job_of_row,
    main,
    meets,
    profile_of_another_job,
)
from tests.scripts import DATASHEET


def curve(points: dict[int, float]) -> Any:
    """A profile's forward, as a function of arrays."""
    return np.vectorize(Curve(tuple(points), tuple(points.values())))


@pytest.mark.parametrize("made", [RowTable.of, curve])
def test_a_table_is_straight_between_points_flat_before_and_goes_on_behind(made: Any) -> None:
    table = made({2: 1.0, 4: 2.0, 8: 3.0})
    assert table([1, 2, 3, 4, 6, 8, 10]).tolist() == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    assert made({4: 2.0})([1, 4, 99]).tolist() == [2.0, 2.0, 2.0]
    falling = made({2: 2.0, 4: 1.0})
    assert falling([4, 8]).tolist() == [1.0, 1.0]  # noise doesn't become a negative time


@pytest.mark.parametrize("device", ["h200", "v100-32"])
@pytest.mark.parametrize(("tp", "drafts"), [(1, 0), (4, 1)])
@pytest.mark.parametrize("options", [{}, {"lm_head": True, "context": 4096, "fuse": True}])
def test_profiles_are_emulated(device: str, tp: int, drafts: int, options: dict[str, int]) -> None:
    """Bit by bit: the emulated backend lets exactly this time pass."""
    config = RunConfig(
        mode="sd" if not drafts else "ssd", num_drafts=drafts, pair="70b/8b", batch_size=3,
        lookahead=6, **options,
    )  # fmt: skip
    job = resolve(config, tp, backend="emulated", memory_bytes=None)
    backend = EmulatedBackend(load_profile(device))
    costs = DeviceCosts.from_profile(backend.profile, job)
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


MODELS = {"llama-3.1-8b": 3e-3, "llama-3.2-1b": 0.5e-3}
FREE = HostCosts()


def two_kernels() -> Profile:
    """A device on which jobs of at most 32 rows take 3 ms and 0.5 ms a forward, others a third
    more."""
    tables: dict[ForwardKey, tuple[Forward, ...]] = {}
    for name, seconds in MODELS.items():
        shard = Shard(resolve_model(name.split("-")[-1]))
        params = shard.num_params(ForwardOptions())
        few, many = (
            Curve((1, 32, 256), (s, 1.1 * s, 1.5 * s), "measured: here")
            for s in (seconds, 4 / 3 * seconds)
        )
        kernels = Forward(params, few, "chain", 32), Forward(params, many, "cublas")
        tables[shard.key(1, ForwardOptions())] = kernels
    return replace(load_profile(DATASHEET), forwards=tables)


PROFILE = two_kernels()


def job(**flags: Any) -> Job:
    config = RunConfig(**{"pair": "8b/1b", "alpha": 0.8, **flags})
    return resolve(config, 1, backend="emulated", memory_bytes=None)


@pytest.mark.parametrize(
    ("flags", "verify", "draft"),
    [
        ({"mode": "ar"}, 3e-3, None),
        ({"mode": "ar", "batch_size": 33}, 4e-3, None),
        ({"mode": "sd", "lookahead": 31}, 3e-3, 0.5e-3),
        ({"mode": "sd", "lookahead": 32}, 4e-3, 2e-3 / 3),
        ({"mode": "ssd", "fan_out": "geometric:32"}, 3e-3, 0.5e-3),
        ({"mode": "ssd", "fan_out": "geometric:33"}, 3e-3, 2e-3 / 3),  # only the draft's rows
    ],
)
def test_one_kernel_for_all_rows(flags: dict[str, Any], verify: float, draft: float | None) -> None:
    costs = DeviceCosts.from_profile(PROFILE, job(**flags))
    assert float(costs.verify(1)) == verify
    if draft is not None:
        assert float(costs.draft_s(1)) == pytest.approx(draft)


def entry(mode: str, drafts: int, sample: float, **changes: Any) -> HostEntry:
    seconds = {**vars(FREE), "lead_sample": sample}
    known = HostEntry(mode, 1, drafts, 1, 4, seconds, "measured: here")
    return replace(known, **changes)


HOSTS = (
    entry("ar", 0, 1e-6),
    entry("sd", 0, 2e-6),
    entry("sd", 1, 3e-6),
    entry("ssd", 1, 4e-6),
    entry("ssd", 1, 5e-6, batch_size=8),
    entry("ssd", 1, 6e-6, tp=2, source="derived: from T=1"),
    entry("ssd", 1, 7e-6, lookahead=9),
)


@pytest.mark.parametrize(
    ("flags", "tp", "sample", "derived"),
    [
        ({"mode": "ar"}, 1, 1e-6, False),
        ({"mode": "ar"}, 2, 1e-6, True),
        ({"mode": "sd", "num_drafts": 0}, 1, 2e-6, False),
        ({"mode": "sd"}, 1, 3e-6, False),
        ({"mode": "ssd"}, 1, 4e-6, False),
        ({"mode": "ssd", "batch_size": 2}, 1, (4 + 1 / 7) * 1e-6, False),
        ({"mode": "ssd", "batch_size": 15}, 1, 6e-6, False),
        ({"mode": "ssd"}, 2, 6e-6, True),
        ({"mode": "ssd", "lookahead": 7}, 1, 7e-6, False),
    ],
)
def test_nearest_host_costs(flags: dict[str, Any], tp: int, sample: float, derived: bool) -> None:
    profile = replace(PROFILE, hosts=HOSTS)
    found = replace(job(**flags), tp=tp)
    assert host_of(profile, found).lead_sample == pytest.approx(sample)
    label = derived_from(profile, profile, found) or ""
    assert ("host costs of" in label or "derived: from T=1" in label) is derived
    assert host_of(PROFILE, found) == FREE and entry_of(PROFILE, found) is None


def test_a_transformers_host_costs_without_a_draft_rank_hold_at_any_t() -> None:
    """Its rounds are chained on the device."""
    whole = [entry("sd", drafts, 2e-6 - drafts * 1e-6, forward="transformer") for drafts in (0, 1)]
    products = [entry("sd", drafts, 3e-6, tp=2) for drafts in (0, 1)]
    profile = replace(PROFILE, hosts=(*whole, *products))
    for drafts, sample in ((0, 2e-6), (1, 3e-6)):
        found = replace(job(mode="sd", num_drafts=drafts, forward="transformer"), tp=2)
        assert host_of(profile, found).lead_sample == sample


def test_host_costs_lie_on_a_line_between_contexts_and_batches() -> None:
    points = {(1, 100): 1e-4, (8, 100): 8e-4, (1, 2100): 5e-4, (8, 2100): 12e-4}
    hosts = tuple(
        entry("sd", 0, seconds, batch_size=batch, context=context, forward="transformer")
        for (batch, context), seconds in points.items()
    )
    known = replace(PROFILE, hosts=hosts)
    for (batch, context), wanted in {**points, (1, 1100): 3e-4, (1, 20): 1e-4}.items():
        found = costs_at(known, hosts[0], batch, context).lead_sample
        assert found == pytest.approx(wanted), (batch, context)


PROFILES = Path(__file__).resolve().parents[2] / "results/h200/profiles"
FUSED = ForwardOptions(fuse=True)
EIGHT = RunConfig(pair="8b/1b", fuse=True)


def probed(name: str) -> Profile:
    return load_profile(str(PROFILES / f"{name}.json"))


def shard(pair: str, tp: int) -> Shard:
    config = RunConfig(pair=pair, mode="ar")
    return Shard(resolve(config, 1, backend="emulated", memory_bytes=None).target, tp)


def seconds(profile: Profile, of: Shard, rows: int) -> float:
    curve = profile.measured(of.cost(rows, 1, 2, FUSED))
    return curve(rows)


def test_a_survey_drops_no_t_silently() -> None:
    alone = probed("h200-8b-1b-T1D1")
    here = survey(EIGHT, alone, 4)
    judged = plan(here).judged
    assert {(c.tp, c.derived is None) for c in judged if c.mode != "ssd"} == {
        (1, True),
        (2, False),
        (3, False),
        (4, False),
    }
    assert not here.unjudged
    there = survey(EIGHT, replace(alone, device_name="Another device"), 4)
    assert [of.tp for of in there.shardings] == [1] and {f.tp for f in there.unjudged} == {2, 3, 4}
    assert "all-reduce over 4 ranks" in there.unjudged[Family("ar", 4, 0)]


@pytest.mark.parametrize(("have", "want"), [(2, 4), (4, 2)])
def test_near_to_what_was_measured_there(have: int, want: int) -> None:
    """70B on H200, probed with T = 2 and with T = 4, each with the all-reduces of both."""
    profiles = {2: probed("h200-70b-1b-T2D1"), 4: probed("h200-70b-T4")}
    rates = ("all_reduce_latency_s", "all_reduce_bytes_per_s")
    both = {name: getattr(profiles[2], name) | getattr(profiles[4], name) for name in rates}
    known = replace(profiles[have], **both)
    (derived,) = derive(known, shard("70b/1b", have), shard("70b/1b", want), 1, FUSED)
    for rows, most in {1: 0.016, 2: 0.016, 4: 0.016, 8: 0.016, 16: 0.05, 64: 0.016}.items():
        measured = seconds(profiles[want], shard("70b/1b", want), rows)
        assert derived.seconds(rows) == pytest.approx(measured, rel=most)


def test_two_ranks_take_the_measured_share_of_one() -> None:
    """In one kernel for few rows, two all-reduces a layer are part of it."""
    config = RunConfig(pair="70b/1b", mode="ar", forward="transformer", context=64)
    job = resolve(config, 2, backend="emulated", memory_bytes=None)
    shard, options = job.target_shard, job.options
    profile = with_derived(load_profile("h200"), shard, 1, options)
    (alone,) = profile.kernels(shard.key(1, options), shard.num_params(options), alone=True)
    for rows, within in ((8, 160), (32, 0)):
        cost = shard.cost(rows, 1, 2, options)
        curve, latency_s = profile.measured(cost), profile.all_reduce_s(2, 0)
        assert curve is not None and curve.source.startswith("derived: one rank's share")
        beside = (cost.num_all_reduces - within) * profile.all_reduce_s(2, cost.all_reduce_bytes)
        expected = alone.seconds(rows) + within * (latency_s - 1.2e-6) + beside
        assert curve(rows) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("pair", "tp"), [("70b/1b", 1), ("70b/1b", 4), ("8b/1b", 1), ("8b/1b", 2)])
def test_a_model_that_was_not_measured_takes_what_another_one_does(pair: str, tp: int) -> None:
    """Each H200 model by another one; from only the profile's numbers they were up to 64% off."""
    config = RunConfig(pair=pair, mode="ar", forward="transformer", context=512)
    job, full = resolve(config, tp, backend="emulated", memory_bytes=None), load_profile("h200")
    shard, name = job.target_shard, job.target.name
    tables = {
        table: {key: of for key, of in getattr(full, table).items() if key.model != name}
        for table in ("forwards", "shards")
    }
    bare = replace(full, **tables)
    without, known = (with_derived(each, shard, 1, job.options) for each in (bare, full))
    for rows in (1, 4, 8, 16):
        cost = shard.cost(rows, 1, 2, job.options)
        derived, measured = without.measured(cost), known.measured(cost)
        assert derived is not None and measured is not None and BY_LAYERS in derived.source
        assert derived(rows) == pytest.approx(measured(rows), rel=0.19)
    sharding = sharded(replace(config, mode="sd"), bare, tp, tp)
    assert BY_LAYERS in (sharding.label(Choice("sd", tp, 0, 1, 4, backup_lookahead=4)) or "")


HOST = HostCosts(lead_sample=6e-5, link=4e-5, step=4e-5, keys=6e-5, wake=6e-5)
RESULTS = Path(__file__).parents[2] / "results"
STUDY = RESULTS / "emulated-predictions"


def predict(device: str = "h100", host: HostCosts = HOST, **flags: Any) -> dict[str, Any]:
    config = RunConfig(**{"pair": "8b/1b", "backend": "emulated", **flags})
    job = resolve(config, 1, backend="emulated", memory_bytes=None)
    return predict_row(job, DeviceCosts.from_profile(load_profile(device), job), host)


def test_has_the_keys_of_a_row_and_is_json() -> None:
    row = predict(mode="ssd")
    json.dumps(row, allow_nan=False)
    rate = row["acceptance_length"] / row["round_us"]["mean"] * 1e6
    assert row["expected_tok_per_s"] == pytest.approx(rate, rel=1e-3)
    assert row["expected_tok_per_s"] == 2 * row["tok_per_s_per_gpu"]
    assert 0 < row["hit_rate"] < 1 and 1 <= row["acceptance_length"] <= 5
    null = predict("null", HostCosts(), mode="ssd")
    json.dumps(null, allow_nan=False)
    assert null["expected_tok_per_s"] is null["T_SD"] is None


@pytest.mark.parametrize("name", ["h200", "h200-tables"])
def test_a_row_holds_its_whole_configuration(name: str) -> None:
    """With its own job's profile, the job that the row names has the mean that its run wrote."""
    checked = 0
    for row in load_rows([RESULTS / name]):
        path = RESULTS / name / "profiles" / f"{row['run_id']}.json"
        if path.exists():
            checked += 1
            known = json.loads(path.read_text())
            device = DeviceCosts.from_points(**known["device"])
            host = HostCosts.from_dict(known["host"])
            mean = float(expected(job_of_row(row), device, host).tok_per_s[0])
            assert mean == pytest.approx(row["expected_tok_per_s"], rel=6e-3), row["run_id"]
    assert checked > 10


def test_a_draft_on_another_device_needs_its_profile() -> None:
    rows = load_rows([RESULTS / "emulated-sweep/runs_h100_drafts.jsonl"])
    other = "NVIDIA V100 32GB SXM2 (emulated)"
    row = next(row for row in rows if row.mode == "sd" and row.draft_device_name == other)
    target = load_profile("h100")
    assert "draft ran on NVIDIA V100" in (forecast_row(row, target).reason or "")
    slow = forecast_row(row, target, load_profile("v100-32")).tok_per_s
    fast = forecast_row(row | {"draft_device_name": row.device_name}, target).tok_per_s
    assert slow is not None and fast is not None and slow < fast


def test_rows_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """Another device's rows are left out; what cannot be judged is refused in one line."""
    assert main(f"{STUDY},{RESULTS / 'h200'}", "h200") == 0
    text = capsys.readouterr().out
    machines = re.findall(r"^\| (.*?) \| products", text, re.MULTILINE)
    assert set(machines) == {"NVIDIA H200", "emulated"}
    assert sum(map(int, re.findall(r"Without \(c\): (\d+) row", text))) == 152
    assert "the profile is of NVIDIA H200" in text
    assert main(str(RESULTS / "h200-growth")) == 0
    assert "Without (c): 79 rows" in capsys.readouterr().out  # and none with a forecast
    for words, message in ((("nowhere",), "no runs"), ((str(STUDY), "missing.json"), "missing")):
        assert main(*words) == 2
        assert message in capsys.readouterr().err


WITHOUT = {  # reasons why rows of GPUs have no forecast, and how many rows have each
    "a recording decides their tokens": 421,
    "the models' own text decides their tokens": 155,
    "they adapt": 30,
    "a retired schedule": 27,
    "num_drafts=2": 13,
    "ran other kernels": 172,
    "read lists of candidates": 25,
}


def test_every_row_of_a_gpu_is_judged_or_counted_with_its_reason() -> None:
    """Products and whole transformers meet their bars where nothing was derived. Servers' rows have
    no rounds."""
    paths = row_files(RESULTS)
    rows = [row for path in paths for row in load_rows([path]) if row.backend == "cupy"]
    judged, left = errors_of(rows, map(profile_of_another_job(None), rows))
    assert len(judged) + sum(left.values()) == len(rows)
    for reason, count in WITHOUT.items():
        assert sum(n for told, n in left.items() if reason in told) == count, (reason, left)
    assert sum(left.values()) == sum(WITHOUT.values())
    every = groups(judged)
    for machine in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        for forwards in ("products", "whole"):
            assert meets(every.loc[machine, forwards]), (machine, forwards)
    assert every.loc[("NVIDIA H200", "products"), ("rows", "")] > 900
    kinds = set(every.index.get_level_values("forwards"))
    assert kinds == {"products", "products, derived", "whole", "whole, derived"}
    derived = every.loc["NVIDIA H200", "whole, derived"]
    assert derived["without_luck", 0.5] < 0.09
