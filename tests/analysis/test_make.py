"""make figures and make report: which command they are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("target", "what"), [("figures", "all"), ("report", "report")])
def test_a_target_is_one_command(target: str, what: str) -> None:
    done = subprocess.run(
        ["make", "-n", target, "PYTHON=/a b/python", "ARGS=--out=x --results=r"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert f"'/a b/python' -m analysis {what} --out=x --results=r" in done.stdout
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert f"make {target} " in told.stdout
