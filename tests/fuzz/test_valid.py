"""Random valid configurations run, and their rows pass every gate.

`python -m mpi4py -m tests.fuzz.test_valid COUNT OUT` runs so many, one after the other, in one
world; rank 0 prints (mode, rounds, tokens) of each as a JSON line.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

from mpissd.common.row import flat
from mpissd.engine.comm.topology import Refused
from tests.fuzz.configs import judged, valid
from tests.mpi.harness import needs_mpi, start

pytestmark = needs_mpi
ATTEMPTS = 3  # a run of one round does not close if its rank lost its core between two clocks


@pytest.mark.parametrize(
    ("np_", "count"),
    [(2, 12), (3, 12), pytest.param(1, 100, marks=pytest.mark.long),
     pytest.param(2, 200, marks=pytest.mark.long), pytest.param(3, 200, marks=pytest.mark.long)],
)  # fmt: skip
def test_random_rows_pass_the_gates(np_: int, count: int, tmp_path: Path) -> None:
    """A gate that fails ends the job: execute() raises."""
    with start(np_, "tests.fuzz.test_valid", str(count), str(tmp_path)) as job:
        code, out, err = job.finish()
    assert code == 0, err[-2000:]
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == count and len({mode for mode, _, _ in found}) >= 2
    assert all(rounds >= 1 and tokens >= 1 for _, rounds, tokens in found)


if __name__ == "__main__":
    from mpi4py import MPI

    from mpissd.lab.measure.run import execute

    for seed in range(int(sys.argv[1])):
        flags = {**valid(seed, MPI.COMM_WORLD.size), "out": sys.argv[2]}
        config = judged(flags, MPI.COMM_WORLD.size)
        for attempt in range(ATTEMPTS):
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                    execute(config)
                break
            except Refused as refused:  # on every rank
                if "the phases close to" not in str(refused) or attempt == ATTEMPTS - 1:
                    raise
        if MPI.COMM_WORLD.rank == 0:
            row = flat(json.loads(printed.getvalue().splitlines()[-1]))
            print(json.dumps([row["mode"], row["num_rounds"], row["num_tokens"]]), flush=True)
