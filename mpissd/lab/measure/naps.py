"""Measures how much later a rank notices a message when it naps than when it polls.

Lead and draft exchange messages. One stays idle for as long as the other waits in a round, so that
the other runs out of patience and naps (wait.Waiter), then sends. As soon as it has the answer it
sends again and finds the other rank polling. The difference of the two round trips is the nap.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from mpissd.common.wait import PATIENT_SPIN_S, Waiter
from mpissd.engine.comm.topology import Topology

EXCHANGES = 24
_TAG = 78
_LEAST_IDLE_S = 1e-3  # long enough for the other rank to nap many times


def measure_nap(topology: Topology, waiter: Waiter, lead_s: float, draft_s: float) -> float:
    """Returns the seconds that a nap delays a message, averaged over both ends.

    Collective over the world; the result is on the lead, and 0 on other ranks, when ranks spin, or
    when lead and draft are one rank. lead_s: how long the lead waits for the draft in a round.
    draft_s: how long the draft waits for the lead.
    """
    if waiter.spin or not topology.num_drafts:
        return 0.0
    world, lead, draft = topology.world, 0, topology.first_draft
    asking = Waiter(waiter.deadline_s, spin=False, spin_s=PATIENT_SPIN_S)  # must not nap itself
    late = []
    for asks, answers, idle_s in ((lead, draft, draft_s), (draft, lead, lead_s)):
        if world.rank == asks:
            late.append(_ask(_Ping(world, answers, asking), max(idle_s, _LEAST_IDLE_S)))
        elif world.rank == answers:
            _answer(_Ping(world, asks, waiter))
    every = world.gather(late)
    known = [seconds for of_rank in every or () for seconds in of_rank]
    return max(0.0, float(np.mean(known))) if known else 0.0


def _ask(ping: _Ping, idle_s: float) -> float:
    """Returns the median seconds by which an exchange after idling exceeds the next exchange."""
    late = []
    for _ in range(EXCHANGES):
        time.sleep(idle_s)
        start = time.perf_counter()
        ping.send()
        ping.receive()
        woken = time.perf_counter()
        ping.send()
        ping.receive()
        late.append(2 * woken - start - time.perf_counter())
    ping.close()
    return float(np.median(late))


def _answer(ping: _Ping) -> None:
    for _ in range(2 * EXCHANGES):
        ping.receive()
        ping.send()
    ping.close()


class _Ping:
    """One end of the ping-pong: a persistent MPI request each way, one int32 per message.

    It receives as many messages as the other end sends, and no request waits for one more: it
    would take the first message of the next direction where its rank is slow to cancel it.
    """

    def __init__(self, comm: MPI.Comm, rank: int, waiter: Waiter) -> None:
        self._waiter, self._what = waiter, f"rank {rank}: ping"
        self._send = comm.Send_init(np.zeros(1, np.int32), dest=rank, tag=_TAG)
        self._receive = comm.Recv_init(np.zeros(1, np.int32), source=rank, tag=_TAG)
        self._receive.Start()
        self._coming = 2 * EXCHANGES

    def send(self) -> None:
        self._send.Start()
        self._waiter.until(self._send.Test, self._what)

    def receive(self) -> None:
        self._waiter.until(self._receive.Test, self._what)
        self._coming -= 1
        if self._coming:
            self._receive.Start()

    def close(self) -> None:
        self._send.Free()
        self._receive.Free()
