"""Programs that the tests start under mpirun. The first prints a JSON line.

clocks               three comparisons of all ranks' clocks
deaf --mode=… …      a run whose last rank receives outcomes of its own
"""

from __future__ import annotations

import json
import sys

from mpi4py import MPI

from mpissd import __main__
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.comm.topology import open_topology
from mpissd.engine.workload import sequence
from mpissd.lab.measure.tracing import compare_clocks


def clocks() -> None:
    topology = open_topology(0)
    waiter = topology.waiter(30.0)
    every = [compare_clocks(MPI.COMM_WORLD, waiter) for _ in range(3)]
    if topology.is_lead:
        print(json.dumps(every))


def deaf(flags: list[str]) -> int:
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        sequence.crc32 = lambda data, before: 7  # type: ignore[assignment]
    return __main__.main(["run", *flags])


if __name__ == "__main__":
    sharpen_sleep()
    if sys.argv[1] == "clocks":
        clocks()
    else:
        sys.exit(deaf(sys.argv[2:]))
