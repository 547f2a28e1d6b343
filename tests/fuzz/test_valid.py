"""Random valid configurations run and pass every gate, and the phases of their ledgers add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mpi.harness import needs_mpi, start

pytestmark = needs_mpi


# What a world can run: one rank has no draft rank, and three target ranks divide no pair of ours.
MODES = {1: {"ar", "sd"}, 2: {"ar", "sd", "ssd"}, 3: {"sd", "ssd"}}


@pytest.mark.parametrize(
    ("np_", "first", "count"),
    [
        (2, 0, 12),
        (3, 0, 12),
        pytest.param(1, 0, 100, marks=pytest.mark.long),
        pytest.param(2, 0, 200, marks=pytest.mark.long),
        pytest.param(3, 0, 200, marks=pytest.mark.long),
    ],
)
def test_every_ledger_closes(np_: int, first: int, count: int, tmp_path: Path) -> None:
    """A gate that fails ends the job: execute() raises."""
    with start(np_, "tests.fuzz.job", str(first), str(count), str(tmp_path)) as job:
        code, out, err = job.finish()
    assert code == 0, err[-2000:]
    found = [json.loads(line) for line in out.splitlines()]
    assert [told["seed"] for told in found] == list(range(first, first + count))
    for told in found:
        assert told["code"] == 0 and told["rounds"] >= 1 and told["tokens"] >= 1, told
        assert told["lead_exact"] and told.get("draft_exact", True), told
    assert sum(told["attempts"] > 1 for told in found) <= 2 + count // 20, found
    modes = {told["mode"] for told in found}
    assert len(modes) >= 2 if count < 100 else modes == MODES[np_]
