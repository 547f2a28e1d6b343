"""The studies that wait for a GPU: each step is tried, whatever fails, and the budget is kept."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import call, fake_tools

ROOT = Path(__file__).resolve().parents[2]
# What each script tries, in order, where nothing answers.
STEPS = {
    "heads": "distill drafts0 ar0 lookup0 drafts0.7 ar0.7 lookup0.7 figure",
    "drafts": "distill rate ar",
}
ON_CPU = {"GPU": "1", "BACKEND": "numpy", "PYTHONPATH": "/packages"}
FAKE = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
if words[0].endswith("rates.py"):
    print("a table")
if "/packages" not in os.environ["PYTHONPATH"].split(":"):  # where this machine has them
    sys.exit("lost")
sys.exit(int(os.environ.get("FAILS", "") in " ".join(words) and "FAILS" in os.environ))
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """The scripts and prompts, and a Python and an mpirun that do nothing."""
    for name in ("launch", "results", "tests/data/prompts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.npz"))
    fake_tools(tmp_path, FAKE)
    return tmp_path


def measure(box: Path, name: str, **env: str) -> subprocess.CompletedProcess[str]:
    tools = {"PYTHON": f"{box}/fakes/bin/python", "MPIRUN": f"{box}/fakes/bin/mpirun"}
    command = (f"results/{name}/measure.sh", "model.gguf", f"{box}/out")
    return call(box, *command, **tools, **ON_CPU, **env)


def tried(told: str) -> list[str]:
    return re.findall(r"^([\w.-]+): (?:0 rows, )?exit code \d+, \d+ s$", told, re.M)


@pytest.mark.parametrize("name", STEPS)
def test_all_steps_are_tried_and_a_table_comes_last(box: Path, name: str) -> None:
    done = measure(box, name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tried(done.stdout) == STEPS[name].split()
    assert "a table" in done.stdout.splitlines()[-3:]


@pytest.mark.parametrize("name", ["heads"])
def test_a_step_that_fails_does_not_keep_the_others_from_theirs(box: Path, name: str) -> None:
    done = measure(box, name, FAILS=" -m mpissd ")
    assert done.returncode == 1 and tried(done.stdout) == STEPS[name].split()


@pytest.mark.parametrize("name", STEPS)
def test_nothing_begins_once_the_budget_is_over(box: Path, name: str) -> None:
    done = measure(box, name, BUDGET_S="0")
    assert done.returncode == 1 and not tried(done.stdout), done.stdout
    assert done.stdout.count("SKIPPED") == len(STEPS[name].split())


def test_a_command_ends_with_its_time(tmp_path: Path) -> None:
    script = f". {ROOT}/results/study.sh; within 1 told slow sleep 600; within 5 told next true"
    done = call(tmp_path, "bash", "-c", script, out=str(tmp_path / "out"), BUDGET_S="99")
    assert "slow: exit code 124" in done.stdout and "next: exit code 0" in done.stdout
