"""The doctor on a machine with GPUs: what CuPy and nvidia-smi tell, and what a run would choose.

python -m pytest -q -m gpu tests/gpu/test_doctor.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpissd.ops.doctor.facts import read_cuda, read_gpus
from tests.needs import lack

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


def num_gpus() -> int:
    return read_cuda(0).count


def test_cupy_and_nvidia_smi_name_the_same_gpu() -> None:
    view, (gpus, error) = read_cuda(0), read_gpus()
    assert view.error == "" and error == "" and view.count > 0
    assert view.runtime is not None and view.driver is not None
    assert view.name in {gpu.name for gpu in gpus}
    beyond = read_cuda(1000)
    assert beyond.error == "" and beyond.count > 0 and beyond.bus_id == ""


def test_two_target_ranks_of_one_host() -> None:
    if num_gpus() < 2:
        lack("two GPUs")
    code, table = doctor("--tp=2", "--mode=ar", "--pair=8b/1b")
    assert code == 0, table
    assert line(table, "all-reduce").startswith("ok")
    assert any(name in line(table, "all-reduce") for name in ("oneshot", "nccl")), table


def test_one_visible_gpu_for_two_ranks() -> None:
    code, table = doctor("--tp=2", "--mode=ar", "--pair=toy", CUDA_VISIBLE_DEVICES="0")
    assert code == 2 and "1 visible GPU(s)" in line(table, "CUDA")


def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    """The second rank counts the GPUs backwards, so its local rank 1 is GPU 0."""
    if num_gpus() < 2:
        lack("two GPUs")
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "rank = os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK'))\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = '1,0' if rank == '1' else '0,1'\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    code, table = doctor("--tp=2", "--mode=ar", "--pair=toy", PYTHONPATH=path)
    assert "ranks 0 and 1 share GPU-" in line(table, "GPUs")
    assert code == 0 and "staged" in line(table, "all-reduce"), table
