"""The doctor on a machine with GPUs: its devices, and too few of them.

python -m pytest -q -m gpu tests/gpu/test_doctor.py
"""

import pytest

from mpissd.ops.doctor import read_gpus
from tests.mpi.test_doctor import doctor, line

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
FLAGS = ("--mode=ar", "--pair=toy", "--backend=cupy")
FIRST = {"CUDA_VISIBLE_DEVICES": "0"}


def test_the_ranks_name_the_gpu_of_nvidia_smi() -> None:
    gpus, error = read_gpus()
    code, table = doctor("--tp=1", *FLAGS, env=FIRST)
    assert error == "" and code == 0
    assert any(gpu.partition(",")[0] in line(table, "rank 0", "ok") for gpu in gpus)
    assert "(device 0 of 1, CUDA_VISIBLE_DEVICES=0)" in line(table, "rank 0", "ok")


def test_one_visible_gpu_for_two_ranks() -> None:
    code, table = doctor("--tp=2", *FLAGS, env=FIRST)
    assert code == 2 and "share GPU-" in line(table, "session", "BAD")
