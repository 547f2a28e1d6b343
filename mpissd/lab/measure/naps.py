"""How much later a message is found by a rank that naps for it than by one that still polls.

Lead and draft ping each other. One idles, so that the other waits as long as it does in a round and
naps (wait.Waiter, its patience over), then sends; once it has the answer it sends again at once,
and finds the other polling. The difference of the two round trips is the nap.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from mpissd.common.wait import PATIENT_SPIN_S, Waiter
from mpissd.engine.comm.topology import Topology

EXCHANGES = 24
_TAG = 78
_LEAST_IDLE_S = 1e-3  # many naps


def measure_nap(topology: Topology, waiter: Waiter, lead_s: float, draft_s: float) -> float:
    """Seconds, mean of both ends, on the lead; collective over the world.

    lead_s, draft_s: how long the lead waits for the draft in a round, and the draft for the lead.
    0 where ranks spin, where lead and draft are one rank, and on the other ranks.
    """
    if waiter.spin or not topology.num_drafts:
        return 0.0
    world, lead, draft = topology.world, 0, topology.tp
    asking = Waiter(waiter.deadline_s, spin=False, spin_s=PATIENT_SPIN_S)  # its naps would count
    late = []
    for asks, answers, idle_s in ((lead, draft, draft_s), (draft, lead, lead_s)):
        if world.rank == asks:
            late.append(_ask(_Ping(world, answers, asking), max(idle_s, _LEAST_IDLE_S)))
        elif world.rank == answers:
            _answer(_Ping(world, asks, waiter))
    every = world.gather(late)
    known = [seconds for told in every or () for seconds in told]
    return max(0.0, float(np.mean(known))) if known else 0.0


def _ask(ping: _Ping, idle_s: float) -> float:
    """How much longer the exchange after an idle time takes than the next one; median."""
    late = []
    for _ in range(EXCHANGES):
        time.sleep(idle_s)
        start = time.perf_counter()
        ping.send()
        ping.receive()
        found = time.perf_counter()
        ping.send()
        ping.receive()
        late.append(2 * found - start - time.perf_counter())
    ping.close()
    return float(np.median(late))


def _answer(ping: _Ping) -> None:
    for _ in range(2 * EXCHANGES):
        ping.receive()
        ping.send()
    ping.close()


class _Ping:
    """One end: persistent requests on one number each way."""

    def __init__(self, comm: MPI.Comm, rank: int, waiter: Waiter) -> None:
        self._waiter, self._what = waiter, f"rank {rank}: ping"
        self._send = comm.Send_init(np.zeros(1, np.int32), dest=rank, tag=_TAG)
        self._receive = comm.Recv_init(np.zeros(1, np.int32), source=rank, tag=_TAG)
        self._receive.Start()

    def send(self) -> None:
        self._send.Start()
        self._waiter.until(self._send.Test, self._what)

    def receive(self) -> None:
        self._waiter.until(self._receive.Test, self._what)
        self._receive.Start()

    def close(self) -> None:
        self._receive.Cancel()
        self._receive.Wait()
        self._send.Free()
        self._receive.Free()
