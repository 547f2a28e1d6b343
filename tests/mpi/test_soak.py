"""A long run on the null device: every rank's memory is flat, no clock drifts from another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.mpi.harness import DIRECT, Job, Started, needs_mpi
from tests.needs import needs_linux

pytestmark = [
    *needs_mpi,
    needs_linux,
]
FLAGS = "--mode=ssd --pair=toy --backend=emulated --device=null --progress=off".split()
MOST_GROWTH = 1 << 20


@pytest.mark.parametrize(
    ("np_", "rounds"), [(3, 6000), pytest.param(2, 1_000_000, marks=pytest.mark.long)]
)
def test_memory_is_flat_and_clocks_agree(np_: int, rounds: int, tmp_path: Path) -> None:
    told = [str(tmp_path), *FLAGS, f"--rounds={rounds}", f"--out={tmp_path / 'out'}"]
    command = ["bash", "-c", DIRECT, "mpirun", str(np_), "tests.mpi.soak_job", *told]
    with Started(command, deadline_s=120 + 3e-3 * rounds) as started:
        job = Job(*started.finish(), tmp_path / "out")
    for rank in range(np_):
        warm, last = json.loads((tmp_path / f"rank.{rank}").read_text())
        assert last - warm < MOST_GROWTH, f"rank {rank}: {last - warm} bytes"
    found, row = job.arrays, job.row
    assert row["num_rounds"] == len(found["round_s"]) == len(found["draft_rounds"]) == rounds
    lead, draft = (found[f"{role}_ledger_ns"] for role in ("lead", "draft"))
    assert (lead[:, 0] == draft[:, 0]).all() and (np.diff(lead[:, 0]) == 1).all()
    # The lead's phases against the rounds' own clock, from end to end, and against the draft's.
    apart = np.cumsum(lead[:, 1]) * 1e-9 - np.cumsum(found["round_s"])
    assert abs(np.median(apart[-500:]) - np.median(apart[:500])) < 1e-3
    assert lead[:, 1].sum() * 1e-9 == pytest.approx(row["wall_s"], rel=1e-3)
    assert draft[:, 1].sum() == pytest.approx(lead[:, 1].sum(), rel=1e-2, abs=5e7)
