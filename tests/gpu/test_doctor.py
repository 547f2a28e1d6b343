"""The doctor on a machine with GPUs: its devices, and too few of them.

python -m pytest -q -m gpu tests/gpu/test_doctor.py
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpissd.ops.doctor import read_gpus

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


def test_the_ranks_name_the_gpu_of_nvidia_smi() -> None:
    gpus, error = read_gpus()
    code, table = doctor("--tp=1", "--mode=ar", "--pair=toy", "--backend=cupy")
    assert error == "" and code == 0
    assert any(gpu.partition(",")[0] in line(table, "rank 0") for gpu in gpus)


def test_one_visible_gpu_for_two_ranks() -> None:
    code, table = doctor("--tp=2", "--mode=ar", "--pair=toy", CUDA_VISIBLE_DEVICES="0")
    assert code == 2 and "share GPU-" in line(table, "session")
