"""Measures round trips between the lead and the draft by message size, as a round sends them.

The messages go through the decoding loops' own channels, persistent requests on preallocated host
buffers: back to back, and with 5 ms between two trips, as between two rounds.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from mpi4py import MPI

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.comm import wire
from mpissd.engine.comm.mpi_link import MpiInbox, MpiOutbox
from mpissd.lab.probe.sample import Checks, Entry, Sample, entry

SIZES = tuple(1 << n for n in (6, 8, 10, 12, 14, 16, 18, 20))
IDLE_S = 5e-3
_WARM = 5
_BUDGET_S, _MOST = 0.1, 300
_IDLE_ROUNDS = 15


def link_curves(pair: MPI.Comm, waiter: Waiter, checks: Checks, source: str) -> list[Entry]:
    """Returns the "links" entries; collective over the lead (rank 0 of `pair`) and a draft."""
    return [
        entry(
            {"name": "mpi", "idle_s": idle_s},
            source,
            {size: _round_trips(pair, waiter, checks, size, idle_s) for size in SIZES},
        )
        for idle_s in (0.0, IDLE_S)
    ]


def _round_trips(
    pair: MPI.Comm, waiter: Waiter, checks: Checks, size: int, idle_s: float
) -> Sample:
    """Times OUTCOME one way and SPECULATION the other, in messages of exactly `size` bytes."""
    kinds = [wire.Kind.OUTCOME, wire.Kind.SPECULATION]
    length, peer, is_lead = size // 4 - wire.HEADER, 1 - pair.rank, pair.rank == 0
    mine, theirs = (
        wire.Message(kind, wire.LinkShape(0, 1, 0), length)
        for kind in (kinds if is_lead else kinds[::-1])
    )
    outbox, inbox = MpiOutbox(pair, [peer], mine, waiter), MpiInbox(pair, peer, theirs)
    mine.write(0, 0, [_pattern(length, pair.rank)])
    what, wanted = "draft: probe" if is_lead else "lead: probe", _pattern(length, peer)

    def send() -> None:
        outbox.ready()
        outbox.send()

    def once(*, is_checked: bool = False) -> float:
        """Runs this end's half of a trip; returns its seconds."""
        start = perf_counter()
        if is_lead:
            send()
        waiter.until(inbox.arrived, what)
        theirs.header()
        if is_checked:
            same = bool(np.array_equal(theirs.array[wire.HEADER :], wanted))
            checks.expect(same, f"link mpi: {size} B arrived changed")
        inbox.release()
        if not is_lead:
            send()
        return perf_counter() - start

    warm = [once(is_checked=True) for _ in range(_WARM)]
    count = max(_WARM, min(_MOST, int(_BUDGET_S / max(min(warm), 1e-6))))
    count = pair.bcast(min(count, _IDLE_ROUNDS) if idle_s else count)
    times = []
    for _ in range(count):
        if idle_s and is_lead:
            waiter.sleep_until(perf_counter() + idle_s)
        times.append(once())
    outbox.close()
    inbox.close()
    # Without this wait, the next trip's first message could match this receive.
    pair.Barrier()
    return Sample.of(times)


def _pattern(count: int, rank: int) -> Ints:
    """Returns [count] numbers that differ between the ranks and between positions."""
    return (np.arange(count) * 7 + 3 + 311 * rank).astype(np.int32)
