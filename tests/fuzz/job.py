"""Run by mpirun: python -m tests.fuzz.job COUNT OUT runs random valid configurations, one after the
other, in one world; rank 0 prints (mode, rounds, tokens) of each as a JSON line.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from mpi4py import MPI

from mpissd.common.config import RunConfig
from mpissd.common.row import flat
from mpissd.engine.comm.topology import Refused
from mpissd.lab.measure.run import execute
from tests.fuzz.configs import judged, valid

ATTEMPTS = 3


def run(config: RunConfig) -> str:
    """Returns the stdout of a run.

    The phases of a run of one round do not close if its rank lost its core between two clocks, so
    that such a run is repeated.
    """
    for attempt in range(1, ATTEMPTS + 1):
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                execute(config)
                return printed.getvalue()
        except Refused as refused:  # on every rank
            if "the phases close to" not in str(refused) or attempt == ATTEMPTS:
                raise
    raise AssertionError("not reached")


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        flags = {**valid(seed, MPI.COMM_WORLD.size), "out": sys.argv[2]}
        printed = run(judged(flags, MPI.COMM_WORLD.size))
        if MPI.COMM_WORLD.rank == 0:
            row = flat(json.loads(printed.splitlines()[-1]))
            print(json.dumps([row["mode"], row["num_rounds"], row["num_tokens"]]), flush=True)
