"""The script that measures what requests cost the lead goes on working as the driver changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_lead_s_costs_are_measured_with_a_fixed_way_and_with_auto() -> None:
    done = subprocess.run(
        [sys.executable, "results/serving-control/socket_cost.py", "--rounds=120"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["auto"], row["batch"]) for row in rows] == [
        (auto, batch) for auto in (False, True) for batch in (1, 4, 16)
    ]
    assert all(row["rounds"] == 20 and row["between"]["p50"] > 0 for row in rows)
