"""The doctor on a machine with GPUs: the reports of CuPy and nvidia-smi, and a run's choices.

python -m pytest -q -m gpu tests/gpu/test_doctor.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpissd.ops.doctor import read_cuda, read_gpus

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def doctor(*flags: str, **env: str) -> tuple[int, str]:
    """(exit code, table) of launch/doctor.sh."""
    done = subprocess.run(
        ["launch/doctor.sh", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done.returncode, done.stdout


def line(table: str, what: str) -> str:
    """The first line about `what`."""
    found = re.search(rf"^(ok|warn|BAD) +{re.escape(what)}  .*$", table, re.M)
    assert found, f"no {what}:\n{table}"
    return found[0]


def test_cupy_and_nvidia_smi_name_the_same_gpu() -> None:
    view, (gpus, error) = read_cuda(0), read_gpus()
    assert "error" not in view and error == "" and view["count"] > 0
    assert view["runtime"] > 0 and view["driver"] > 0
    assert view["name"] in {gpu.name for gpu in gpus}
    assert read_cuda(1000).keys() == {"cupy", "runtime", "driver", "count"}


def test_one_visible_gpu_for_two_ranks() -> None:
    code, table = doctor("--tp=2", "--mode=ar", "--pair=toy", CUDA_VISIBLE_DEVICES="0")
    assert code == 2 and "1 visible GPU(s)" in line(table, "session")
