"""Models over two real ranks, on the CPU and on a device made of host memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import lack

ROOT = Path(__file__).parents[2]
PRODUCTS, TRANSFORMER = "tests/gpu/mpi_shard_check.py", "tests/gpu/mpi_transformer_check.py"


@pytest.mark.mpi
@pytest.mark.parametrize("backend, choices", [("host", "staged,device,auto"), ("numpy", "auto")])
def test_two_ranks_give_what_one_gives(backend: str, choices: str) -> None:
    passes(PRODUCTS, f"--backend={backend}", f"--all_reduce={choices}", "--models=toy-draft")


@pytest.mark.mpi
def test_two_ranks_give_a_transformers_logits() -> None:
    passes(TRANSFORMER, "--backend=numpy", "--tokens=12")


def passes(script: str, *options: str) -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    launcher = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
    if launcher is None:
        lack("an mpirun")
    settings = {
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    done = subprocess.run(
        [launcher, "-np", "2", sys.executable, "-m", "mpi4py", script, *options],
        env={**os.environ, **settings},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("passed") and "pass  " in done.stdout
