"""A command whose reader has left (`| head`) ends quietly, with 141 as other programs do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "results/h200-limit"


@pytest.mark.parametrize(
    "words",
    [
        ("mpissd", "--help"),
        ("mpissd", "plan", "--profile=h200"),
        ("mpissd", "predict", "--profile=h200", "--rounds=20"),
        ("mpissd", "tables", RESULTS),
        ("mpissd", "sweep", "--grid=mode=sd", "--dry_run", "--backend=emulated", "--world_size=2"),
        ("analysis", "--help"),
    ],
    ids=" ".join,
)
def test_nobody_reads_stdout(words: Sequence[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    launched = ("OMPI_", "PMI_", "SLURM_")
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if not name.startswith(launched)},
        stdin=subprocess.DEVNULL,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
