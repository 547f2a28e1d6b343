"""Measures round trips between the lead and the draft by message size, sent as the application
does.

`mpi` is the decoding loops' own carrier, persistent requests on preallocated host buffers. It is
measured back to back, and with 5 ms between two trips, as between two rounds. On GPUs NCCL's send
and receive are measured as well, and device-aware MPI if the user asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpissd.common.errors import ConfigError
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm import wire
from mpissd.engine.comm.device_group import NcclGroup, gather_places, shared_gpu
from mpissd.engine.comm.group import Device
from mpissd.engine.comm.mpi_link import MpiInbox, MpiOutbox
from mpissd.lab.probe.sample import Checks, Entry, Sample, entry

SIZES = tuple(1 << n for n in (6, 8, 10, 12, 14, 16, 18, 20))
IDLE_S = 5e-3
_LEAD, _DRAFT = 0, 1
_WARM = 5
_BUDGET_S, _MOST = 0.1, 300
_IDLE_ROUNDS = 15


@dataclass
class Trip:
    """One end's half of a round trip.

    go(round) runs it once, and returns when this end's part is over. sound() checks the data that
    arrived last.
    """

    go: Callable[[int], None]
    sound: Callable[[], bool]
    close: Callable[[], None]


class LinkProbe:
    """The two ends of a link; in `pair` the lead is rank 0 and the draft rank 1."""

    def __init__(
        self, backend: Backend, pair: MPI.Comm, waiter: Waiter, checks: Checks, source: str
    ) -> None:
        self._backend, self._pair, self._waiter = backend, pair, waiter
        self._checks, self._source = checks, source
        self._is_lead = pair.rank == _LEAD

    def measure(self, *, cuda_aware: bool) -> tuple[list[Entry], list[str]]:
        """Measures all carriers; returns ("links" entries, reasons why others were not measured).

        The results are meaningful on the lead only.
        """
        curves = [self._curve("mpi", self._mpi, idle_s) for idle_s in (0.0, IDLE_S)]
        refused: list[str] = []
        if self._backend.info.kind != "gpu":
            return curves, refused
        for name, begin in (("nccl", self._begin_nccl), ("device_mpi", self._begin_device_mpi)):
            if name == "device_mpi" and not cuda_aware:
                continue
            try:
                trip, close = begin()
            except ConfigError as error:  # Both ranks raise the same error here.
                refused.append(str(error))
                continue
            curves += [self._curve(name, trip, idle_s) for idle_s in (0.0, IDLE_S)]
            close()
        return curves, refused

    def _curve(self, name: str, trip: Callable[[int], Trip], idle_s: float) -> Entry:
        taken = {size: self._sample(name, trip, size, idle_s) for size in SIZES}
        return entry({"name": name, "idle_s": idle_s}, self._source, taken)

    def _sample(
        self, name: str, open_trip: Callable[[int], Trip], size: int, idle_s: float
    ) -> Sample:
        trip = open_trip(size)
        warm = [self._once(trip, number, 0.0) for number in range(_WARM)]
        self._checks.expect(trip.sound(), f"link {name}: {size} B arrived changed")
        count = max(_WARM, min(_MOST, int(_BUDGET_S / max(min(warm), 1e-6))))
        if idle_s:
            count = min(count, _IDLE_ROUNDS)
        count = self._pair.bcast(count, root=_LEAD)
        times = [self._once(trip, _WARM + number, idle_s) for number in range(count)]
        self._checks.expect(trip.sound(), f"link {name}: {size} B arrived changed")
        trip.close()
        # Without this wait, the next trip's first message could match this receive.
        self._pair.Barrier()
        return Sample.of(times)

    def _once(self, trip: Trip, number: int, idle_s: float) -> float:
        if idle_s and self._is_lead:
            self._waiter.sleep_until(perf_counter() + idle_s)
        start = perf_counter()
        trip.go(number)
        return perf_counter() - start

    def _mpi(self, size: int) -> Trip:
        """Opens OUTCOME one way and SPECULATION the other, in messages of exactly `size` bytes."""
        kinds = wire.Kind.OUTCOME, wire.Kind.SPECULATION
        length, peer = size // 4 - wire.HEADER, 1 - self._pair.rank
        mine, theirs = (
            wire.Message(kind, wire.LinkShape(0, 1, 0), length)
            for kind in (kinds if self._is_lead else kinds[::-1])
        )
        outbox = MpiOutbox(self._pair, [peer], mine, self._waiter)
        inbox = MpiInbox(self._pair, peer, theirs)
        mine.write(0, 0, [_pattern(length, self._pair.rank)])
        kept = np.zeros(length, np.int32)
        what = "draft: probe" if self._is_lead else "lead: probe"

        def send() -> None:
            outbox.ready()
            outbox.send()

        def receive(number: int) -> None:
            self._waiter.until(inbox.arrived, what)
            theirs.header()
            if number < _WARM:
                kept[:] = theirs.array[wire.HEADER :]
            inbox.release()

        def close() -> None:
            outbox.close()
            inbox.close()

        def go(number: int) -> None:
            if self._is_lead:
                send()
            receive(number)
            if not self._is_lead:
                send()

        def sound() -> bool:
            return bool(np.array_equal(kept, _pattern(length, peer)))

        return Trip(go, sound, close)

    def _begin_nccl(self) -> tuple[Callable[[int], Trip], Callable[[], None]]:
        device = cast(Device, self._backend)
        nccl = open_nccl_pair(device, self._pair, self._waiter)
        peer = 1 - self._pair.rank

        def exchange(mine: Any, theirs: Any) -> None:
            for send in (self._is_lead, not self._is_lead):
                if send:
                    nccl.send(mine, peer)
                else:
                    nccl.receive(theirs, peer)
            self._waiter.until(device.fence(), "draft: probe over NCCL")

        return lambda size: self._on_device(size, exchange), nccl.close

    def _begin_device_mpi(self) -> tuple[Callable[[int], Trip], Callable[[], None]]:
        from mpissd.engine.comm.device_group import open_device_mpi

        # This call only checks whether device-aware MPI is allowed here.
        open_device_mpi(cast(Device, self._backend), self._pair, self._waiter)
        peer = 1 - self._pair.rank

        def exchange(mine: Any, theirs: Any) -> None:
            for send in (self._is_lead, not self._is_lead):
                start = self._pair.Isend if send else self._pair.Irecv
                request = start([mine if send else theirs, MPI.BYTE], peer)
                self._waiter.until(request.Test, "draft: probe over device-aware MPI")

        return lambda size: self._on_device(size, exchange), lambda: None

    def _on_device(self, size: int, exchange: Callable[[Any, Any], None]) -> Trip:
        """Opens round trips of float16 arrays of `size` bytes in device memory."""
        backend, width = self._backend, size // self._backend.itemsize
        mine, theirs = (backend.activation(1, width) for _ in range(2))
        backend.from_host(_pattern(width, self._pair.rank)[None] % 1024, mine)

        def sound() -> bool:
            wanted = _pattern(width, 1 - self._pair.rank)[None] % 1024
            return bool(np.array_equal(backend.to_host(theirs), wanted))

        return Trip(lambda number: exchange(mine, theirs), sound, lambda: None)


class NcclPair(NcclGroup):
    """NCCL between two ranks' GPUs; sends and receives float16 arrays in stream order."""

    def send(self, array: Any, peer: int) -> None:
        """Enqueues a send of a contiguous array to `peer`."""
        self._nccl.send(array.data.ptr, array.size, self._half, peer, self._stream)

    def receive(self, array: Any, peer: int) -> None:
        """Enqueues a receive from `peer` into a contiguous array."""
        self._nccl.recv(array.data.ptr, array.size, self._half, peer, self._stream)


def open_nccl_pair(device: Device, comm: MPI.Comm, waiter: Waiter) -> NcclPair:
    """Opens NCCL on a communicator of two ranks; raises ConfigError on both if it cannot join
    them."""
    places = gather_places(device, comm)
    if shared := shared_gpu(places):
        raise ConfigError(f"link over NCCL: {shared}; allowed: one rank a GPU")
    if not all(place.nccl for place in places):
        raise ConfigError("link over NCCL: CuPy has no NCCL here")
    return NcclPair(device, comm, waiter)


def _pattern(count: int, rank: int) -> Any:
    """Returns [count] numbers that differ between the ranks and between positions."""
    return (np.arange(count) * 7 + 3 + 311 * rank).astype(np.int32)
