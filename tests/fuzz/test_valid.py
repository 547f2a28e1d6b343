"""Random valid configurations run, and their rows pass every gate."""

import json
from pathlib import Path

import pytest

from tests.mpi.harness import needs_mpi, start

pytestmark = needs_mpi


@pytest.mark.parametrize(
    ("np_", "count"),
    [(2, 12), (3, 12), pytest.param(1, 100, marks=pytest.mark.long),
     pytest.param(2, 200, marks=pytest.mark.long), pytest.param(3, 200, marks=pytest.mark.long)],
)  # fmt: skip
def test_random_rows_pass_the_gates(np_: int, count: int, tmp_path: Path) -> None:
    """A gate that fails ends the job: execute() raises."""
    with start(np_, "tests.fuzz.job", str(count), str(tmp_path)) as job:
        code, out, err = job.finish()
    assert code == 0, err[-2000:]
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == count and len({mode for mode, _, _ in found}) >= 2
    assert all(rounds >= 1 and tokens >= 1 for _, rounds, tokens in found)
