"""A predicted row, the forecast of a row by another job's profile, and the errors of both.

On committed rows; sampling is kept apart from the model.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.job import resolve
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.row import predict_row
from mpissd.lab.predict.simulation import expected
from mpissd.lab.tables.load import load_rows, row_files
from results.predictions import (
    ALL,
    errors_of,
    forecast_row,
    groups,
    job_of_row,
    main,
    meets,
    profile_of_another_job,
)

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


def row_like(name: str, **wanted: Any) -> dict[str, Any]:
    for row in load_rows([RESULTS / name]):
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    raise AssertionError(f"{name}: no row with {wanted}")


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
    name = "emulated-sweep/runs_h100_drafts.jsonl"
    row = row_like(name, mode="sd", draft_device_name="NVIDIA V100 32GB SXM2 (emulated)")
    target = load_profile("h100")
    assert "draft ran on NVIDIA V100" in (forecast_row(row, target).reason or "")
    slow = forecast_row(row, target, load_profile("v100-32")).tok_per_s
    fast = forecast_row(row | {"draft_device_name": row.device_name}, target).tok_per_s
    assert slow is not None and fast is not None and slow < fast


def test_rows_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """Another device's rows are left out; what cannot be judged is refused in one line."""
    assert main(f"{STUDY},{RESULTS / 'h200'}", "h200") == 0
    text = capsys.readouterr().out
    machines = re.findall(r"^\| (.*?) \|.* all \|", text, re.MULTILINE)
    assert set(machines) == {"NVIDIA H200", "emulated"}
    assert sum(map(int, re.findall(r"Without \(c\): (\d+) row", text))) == 152
    assert "the profile is of NVIDIA H200" in text
    for words, message in ((("nowhere",), "no runs"), ((str(STUDY), "missing.json"), "missing")):
        assert main(*words) == 2
        assert message in capsys.readouterr().err


WITHOUT = {  # reasons why rows of GPUs have no forecast, and how many rows have each
    "a recording decides their tokens": 127,
    "the models' own text decides their tokens": 106,
    "they adapt": 30,
    "pearl keeps candidates": 9,
    "amusd keeps candidates": 9,
    "num_drafts=2": 13,
    "serve late hits": 9,
    "ran other kernels": 67,
    "read lists of candidates": 25,
}


def test_every_row_of_a_gpu_is_judged_or_counted_with_its_reason() -> None:
    """Products and whole transformers meet their bars where nothing was derived. Servers' rows have
    no rounds."""
    paths = [p for p in row_files(RESULTS) if b'"schema"' in p.open("rb").readline()]
    rows = [row for path in paths for row in load_rows([path]) if row.backend == "cupy"]
    judged, left = errors_of(rows, map(profile_of_another_job(None), rows))
    assert len(judged) + sum(left.values()) == len(rows)
    for reason, count in WITHOUT.items():
        assert sum(n for told, n in left.items() if reason in told) == count, (reason, left)
    assert sum(left.values()) == sum(WITHOUT.values())
    every = groups(judged)
    for machine in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        for forwards in ("products", "whole"):
            assert meets(every.loc[machine, forwards, ALL]), (machine, forwards)
    assert every.loc[("NVIDIA H200", "products", ALL), ("rows", "")] > 900
    kinds = set(every.index.get_level_values("forwards"))
    assert kinds == {"products", "products, derived", "whole", "whole, derived"}
    derived = every.loc["NVIDIA H200", "whole, derived", ALL]
    assert derived["without_luck", 0.5] < 0.09
