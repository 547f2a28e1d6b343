"""The all-reduces of device arrays between two real ranks, on a device made of host memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import lack

ROOT = Path(__file__).parents[2]
SCRIPT = "tests/gpu/mpi_shard_check.py"


@pytest.mark.mpi
@pytest.mark.parametrize("backend, choices", [("host", "staged,device,auto"), ("numpy", "auto")])
def test_two_ranks_give_what_one_gives(backend: str, choices: str) -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    launcher = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
    if launcher is None:
        lack("an mpirun")
    options = [f"--backend={backend}", f"--all_reduce={choices}", "--models=toy-draft"]
    settings = {
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    done = subprocess.run(
        [launcher, "-np", "2", sys.executable, "-m", "mpi4py", SCRIPT, *options],
        env={**os.environ, **settings},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("passed") and "pass  " in done.stdout
