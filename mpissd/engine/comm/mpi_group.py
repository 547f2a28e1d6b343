"""Opens the group of the target ranks, and holds the one that reduces host arrays by MPI."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.common.errors import ConfigError
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group, SoloGroup


class MpiGroup(Group):
    """Reduces host arrays by nonblocking MPI, so that a wait can nap and has a deadline."""

    name = "mpi"
    capturable = False
    spent_s: float

    def __init__(self, comm: MPI.Comm, waiter: Waiter) -> None:
        super().__init__(comm.size, comm.rank)
        self._comm = comm
        self._waiter = waiter
        self.spent_s = 0.0

    def all_reduce(self, array: Any) -> None:
        start = perf_counter()
        request = self._comm.Iallreduce(MPI.IN_PLACE, array, op=MPI.SUM)
        self._waiter.until(request.Test, "all-reduce")
        self.spent_s += perf_counter() - start

    def all_gather(self, local: Any, gathered: Any) -> None:
        start = perf_counter()
        request = self._comm.Iallgather(np.ascontiguousarray(local), gathered)
        self._waiter.until(request.Test, "all-gather")
        self.spent_s += perf_counter() - start


def open_group(backend: Backend, comm: MPI.Comm, choice: str, waiter: Waiter) -> Group:
    """Opens the group of the T target ranks, which are the ranks of `comm`. Collective.

    choice: --all_reduce. Raises ConfigError for an all-reduce that this backend or these devices
    cannot do.
    """
    if backend.name != "cupy" and choice not in ("auto", "mpi"):
        raise ConfigError(f"all_reduce={choice} with backend={backend.name}: allowed: auto, mpi")
    if backend.name == "emulated":
        return SoloGroup(comm.size, comm.rank)
    if comm.size == 1:
        return SoloGroup()
    if backend.name == "numpy":
        return MpiGroup(comm, waiter)
    from mpissd.engine.comm.device_group import open_device_group

    return open_device_group(backend, comm, choice, waiter)
