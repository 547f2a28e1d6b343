"""Gathers the target ranks' parts of the logits on the lead, on every backend."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class MpiLogitsGather:
    """Gathers logits without blocking, one gather at a time, on a communicator of its own."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._request: MPI.Request = MPI.REQUEST_NULL
        self._local = np.zeros(0, np.float32)
        self._gathered = np.zeros(0, np.float32)

    def start(self, local: Logits) -> None:
        """Starts to gather `local`, float32 [rows, V/T]. Collective: every rank has to call it."""
        self._local = np.ascontiguousarray(local)
        shape = (self._comm.size if self._comm.rank == 0 else 0, *local.shape)
        self._gathered = np.empty(shape, np.float32)
        self._request = self._comm.Igather(self._local, self._gathered, root=0)

    def done(self) -> bool:
        """Returns whether the gather is over, without blocking."""
        return self._request.Test()

    def result(self) -> Logits:
        """Returns the logits [T, rows, V/T] on the lead; an array of no rows elsewhere."""
        return self._gathered
