"""Compares every rank's perf_counter with rank 0's by ping-pong.

Rank 0 notes when it sends a question and when the answer arrives; the other rank reads its clock in
between. The estimate offset = t_remote − (t_send + t_received)/2 is therefore wrong by at most half
the round trip, whatever the network does. The exchange with the shortest round trip is kept. The
comparison takes about 0.2 ms per rank.
"""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np
from mpi4py import MPI

from mpissd.common.wait import Waiter
from mpissd.lab.measure.chrome import ClockReading

EXCHANGES = 64
_TAG = 77


def compare_clocks(
    comm: MPI.Comm, waiter: Waiter, exchanges: int = EXCHANGES
) -> list[ClockReading] | None:
    """Returns a reading of every rank's clock on rank 0, and None on the other ranks.

    Collective over `comm`. Raises FaultError if a rank does not answer within the waiter's
    deadline.
    """
    if comm.rank:
        _answer(comm, waiter, exchanges)
        return None
    asked = (_ask(comm, rank, waiter, exchanges) for rank in range(1, comm.size))
    return [ClockReading(perf_counter_ns(), 0, 0), *asked]


def _ask(comm: MPI.Comm, rank: int, waiter: Waiter, exchanges: int) -> ClockReading:
    """Reads another rank's clock from rank 0; keeps the exchange with the shortest round trip."""
    question, remote = np.zeros(1, np.int64), np.zeros(1, np.int64)
    send = comm.Send_init(question, dest=rank, tag=_TAG)
    receive = comm.Recv_init(remote, source=rank, tag=_TAG)
    best: ClockReading | None = None
    for _ in range(exchanges):
        receive.Start()
        sent = perf_counter_ns()
        send.Start()
        waiter.until(receive.Test, f"rank {rank}: clock")
        received = perf_counter_ns()
        waiter.until(send.Test, f"rank {rank}: clock")
        error = (received - sent + 1) // 2
        if best is None or error < best.error_ns:
            at = int(remote[0])
            best = ClockReading(at, at - (sent + received) // 2, error)
    send.Free()
    receive.Free()
    assert best is not None, f"{exchanges} exchanges"
    return best


def _answer(comm: MPI.Comm, waiter: Waiter, exchanges: int) -> None:
    """Answers each of rank 0's questions with a reading of this rank's clock."""
    question, answer = np.zeros(1, np.int64), np.zeros(1, np.int64)
    send = comm.Send_init(answer, dest=0, tag=_TAG)
    receive = comm.Recv_init(question, source=0, tag=_TAG)
    for _ in range(exchanges):
        receive.Start()
        waiter.until(receive.Test, "rank 0: clock")
        answer[0] = perf_counter_ns()
        send.Start()
        waiter.until(send.Test, "rank 0: clock")
    send.Free()
    receive.Free()
