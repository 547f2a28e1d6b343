"""What the tests start under mpirun: `clocks`, or `ledger --mode=… …` with the flags of a run.

Rank 0 prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from mpi4py import MPI

from mpissd.bench.ab import ledger_pass
from mpissd.bench.clock import compare_clocks
from mpissd.bench.rank import Rank
from mpissd.bench.session import open_session
from mpissd.comm.topology import open_topology
from mpissd.config import parse_flags
from mpissd.wait import sharpen_sleep


def clocks() -> None:
    topology = open_topology(0)
    waiter = topology.waiter(30.0)
    every = [compare_clocks(MPI.COMM_WORLD, waiter) for _ in range(3)]
    if topology.is_lead:
        print(json.dumps([[asdict(reading) for reading in found or ()] for found in every]))


def ledger(flags: list[str]) -> None:
    session = open_session(parse_flags(dict(flag[2:].split("=", 1) for flag in flags)))
    rank = Rank(session)
    found = ledger_pass(rank, quads=8, per_block=25)
    rank.close()
    session.resources.close()
    if found is not None:
        print(json.dumps({**asdict(found), "text": str(found)}))


if __name__ == "__main__":
    sharpen_sleep()
    if sys.argv[1] == "clocks":
        clocks()
    else:
        ledger(sys.argv[2:])
