"""Committed rows load, pass the gates of today and keep the digests of their configurations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpissd.common.flags import parse_into
from mpissd.common.row import Row
from mpissd.lab.gates import violations
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.sweep.plan import SweepConfig, planned
from tests.scripts import ROOT

RESULTS = ROOT / "results"
FILES = sorted([*RESULTS.rglob("*.jsonl"), *RESULTS.rglob("*.json")])
TABLES = sorted(RESULTS.glob("*/runs.jsonl"))
# Probes name their profiles after the device and -T, or lie in a folder of a probe.
JOBS = [
    path
    for path in sorted(RESULTS.glob("*/profiles/*.json"))
    if "-T" not in path.stem and not path.parts[-3].endswith("-probe")
]
SWEPT = ("h200-70b", "h200-pairs", "h200-sweep")
GRIDS = [grid for name in SWEPT for grid in sorted((RESULTS / name).glob("*.grid"))]


def label(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def test_every_line_is_json_and_every_row_and_profile_loads() -> None:
    """NaN and Infinity are no JSON: a value that was not measured is null."""
    for path in FILES:
        text = path.read_text()
        for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
            values = json.loads(line, parse_constant=lambda name, path=path: pytest.fail(str(path)))
            if "round_us" in values and "run_id" in values:
                assert Row.from_dict(values).run_id
    for path in JOBS:
        known = json.loads(path.read_text())
        assert HostCosts.from_dict(known["host"]).lead_launch > 0, path


@pytest.mark.parametrize("path", TABLES, ids=label)
def test_rows_of_runs_pass_the_gates(path: Path) -> None:
    for row in (Row.from_dict(json.loads(line)) for line in path.read_text().splitlines()):
        arrays = path.parent / "rounds" / f"{row.run_id}.npz"
        rounds = dict(np.load(arrays)) if arrays.exists() else {}
        assert violations(row, rounds) == [], row.run_id


@pytest.mark.parametrize("grid", GRIDS, ids=label)
def test_a_grid_makes_the_configurations_of_its_rows(grid: Path) -> None:
    """So that a sweep that was cut off continues, whatever flags were added since."""
    plan = planned(parse_into(SweepConfig, {"backend": "cupy", "grid": str(grid)}))
    lines = [line for path in grid.parent.glob("*.jsonl") for line in path.open()]
    known = {json.loads(line)["config_digest"] for line in lines}
    assert {point.digest for point in plan.points} <= known and len(plan.points) > 10
