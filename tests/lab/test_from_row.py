"""A row's configuration, read from the row: its job, and its expected speed in another profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.engine.backend.profile import load_profile
from mpissd.lab.predict.costs import load_job
from mpissd.lab.predict.row import forecast_row, job_of_row
from mpissd.lab.predict.simulation import expected
from mpissd.lab.tables.load import load_rows

RESULTS = Path(__file__).parents[2] / "results"


def row_like(name: str, **wanted: Any) -> dict[str, Any]:
    for row in load_rows([RESULTS / name]):
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    raise AssertionError(f"{name}: no row with {wanted}")


@pytest.mark.parametrize("name", ["h200", "h200-sweep", "h200-tables"])
def test_a_row_says_its_whole_configuration(name: str) -> None:
    """With its own job's profile, the job that the row names has the mean that its run wrote."""
    checked = 0
    for row in load_rows([RESULTS / name]):
        path = RESULTS / name / "profiles" / f"{row['run_id']}.json"
        if not path.exists():
            continue
        checked += 1
        mean = float(expected(job_of_row(row), *load_job(str(path))).tok_per_s[0])
        assert mean == pytest.approx(row["expected_tok_per_s"], rel=6e-3), row["run_id"]
    assert checked > 10


def test_a_forecast_needs_the_profile_alone() -> None:
    """The row's own measurements and predictions change nothing."""
    row = row_like("emulated-predictions/runs.jsonl", device_name="NVIDIA H200 (emulated)")
    found = forecast_row(row, load_profile("h200"))
    keys = ("round_us", "phases_us", "predicted_tok_per_s", "expected_tok_per_s", "t_target_s")
    assert forecast_row(row | dict.fromkeys(keys), load_profile("h200")) == found
    assert found.tok_per_s is not None and not found.derived


def test_a_draft_on_another_device_needs_its_profile() -> None:
    name = "emulated-sweep/runs_h100_drafts.jsonl"
    row = row_like(name, mode="sd", draft_device_name="NVIDIA V100 32GB SXM2 (emulated)")
    target = load_profile("h100")
    assert "draft ran on NVIDIA V100" in (forecast_row(row, target).reason or "")
    slow = forecast_row(row, target, None, load_profile("v100-32")).tok_per_s
    fast = forecast_row(row | {"draft_device_name": row.device_name}, target).tok_per_s
    assert slow is not None and fast is not None and slow < fast


@pytest.mark.parametrize(
    ("name", "wanted", "reason"),
    [
        ("saguaro/runs.jsonl", {}, "markov"),
        ("h200-ssd/runs.jsonl", {"backup": "auto"}, "they adapt"),
        ("emulated-schedules/runs.jsonl", {"schedule": "pearl"}, "pearl"),
        ("emulated-schedules/runs.jsonl", {"draft": "medusa4-llama-3.1-8b"}, "several tokens"),
        ("h200/runs.jsonl", {"backend": "emulated"}, "ran on null device"),
        ("h200-tables/runs.jsonl", {"mode": "ar"}, "is of NVIDIA H100 80GB SXM"),
    ],
)
def test_what_has_no_forecast_says_why(name: str, wanted: dict[str, Any], reason: str) -> None:
    row = row_like(name, **wanted)
    found = forecast_row(row, load_profile("h100"))
    assert found.tok_per_s is None
    assert reason in (found.reason or "")


def test_a_derived_forward_is_labelled(tmp_path: Path) -> None:
    """The label is the profile's own: the source of the forward that the row needs."""
    row = row_like("h200-tables/runs.jsonl", mode="ar")
    told = json.loads((RESULTS / "h200" / "profiles" / "h200-8b-1b-T1.json").read_text())
    for source in ("measured: a probe", "derived: bytes over the read rate"):
        for entry in told["tables"]["forwards"]:
            entry["from"] = source
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(told))
        found = forecast_row(row, load_profile(str(path)))
        assert found.tok_per_s and found.derived == source.startswith("derived")
