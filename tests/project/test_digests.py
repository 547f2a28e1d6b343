"""Committed rows keep the digests of their configurations, whatever flags are added or moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpissd.common.flags import parse_into
from mpissd.lab.sweep.commands import planned
from mpissd.lab.sweep.configs import SweepConfig

RESULTS = Path(__file__).resolve().parents[2] / "results"
MEASURED = ("h200-70b", "h200-pairs", "h200-sweep")
GRIDS = [grid for name in MEASURED for grid in sorted((RESULTS / name).glob("*.grid"))]
FLAGS = {"backend": "cupy"}


def digests(folder: Path) -> set[str]:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return {json.loads(line)["config_digest"] for line in lines}


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.parent.name}-{grid.stem}")
def test_a_grid_makes_the_configurations_of_its_rows(grid: Path) -> None:
    plan = planned(parse_into(SweepConfig, {**FLAGS, "grid": str(grid)}))
    known = digests(grid.parent)
    assert all(point.digest in known for point in plan.points) and len(plan.points) > 10


def test_another_value_of_a_flag_makes_another_digest() -> None:
    grid = RESULTS / "h200-70b" / "t2.grid"
    known = digests(grid.parent)
    for name, value in (("graph", "false"), ("warmup_rounds", "11"), ("draft_device", "h200")):
        plan = planned(parse_into(SweepConfig, {**FLAGS, "grid": str(grid), name: value}))
        drafting = [point for point in plan.points if point.config and point.config.mode != "ar"]
        assert drafting and not {point.digest for point in drafting} & known, name
