"""Run by mpirun: python -m tests.fuzz.job COUNT OUT runs random valid configurations, one after the
other, in one world; rank 0 prints (mode, rounds, tokens) of each as a JSON line.
"""

import contextlib
import io
import json
import sys

from mpi4py import MPI

from mpissd.common.row import flat
from mpissd.engine.comm.topology import Refused
from mpissd.lab.measure.run import execute
from tests.fuzz.configs import judged, valid

ATTEMPTS = 3  # a run of one round does not close if its rank lost its core between two clocks

if __name__ == "__main__":
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
