"""Communicators whose collectives of Python objects have a deadline. Importing them starts MPI.

mpi4py's own collectives block inside MPI and would hang if a rank is missing; the ones here poll
nonblocking requests. Split and Dup have no nonblocking form, so a watching thread ends the process
if they take too long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI

from mpissd.common.stage import OWN, STAGE, Stage
from mpissd.common.wait import Waiter, within

# Deadlines are longer in stages in which ranks may still open devices or summarize many rounds.
_FACTORS = {Stage.START: 30, Stage.OPEN: 30, Stage.GATHER: 10}


class PatientComm(MPI.Intracomm):
    """A communicator whose collectives raise Overdue after a deadline. Its Split and Dup return
    communicators of the same class."""

    deadline_s: ClassVar[float] = 120.0  # the value of --deadline_s, set for the whole process

    def allgather(self, sendobj: Any) -> list[Any]:
        """Returns the objects of all ranks, in rank order."""
        data = np.frombuffer(MPI.pickle.dumps(sendobj), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        self._wait(self.Iallgather(np.array([len(data)], np.int64), sizes), "all ranks")
        pickled = np.empty(int(sizes.sum()), np.uint8)
        self._wait(self.Iallgatherv(data, (pickled, sizes)), "all ranks")
        return [MPI.pickle.loads(p.tobytes()) for p in np.split(pickled, np.cumsum(sizes)[:-1])]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Returns the objects of all ranks, in rank order, on rank `root`; None on the others."""
        objects = self.allgather(sendobj)
        return objects if self.rank == root else None

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Returns the object of rank `root`."""
        data = np.frombuffer(MPI.pickle.dumps(obj if self.rank == root else None), np.uint8)
        size = np.array([len(data)], np.int64)
        self._wait(self.Ibcast(size, root), f"a message of rank {root}")
        pickled = data.copy() if self.rank == root else np.empty(int(size[0]), np.uint8)
        self._wait(self.Ibcast(pickled, root), f"a message of rank {root}")
        return obj if self.rank == root else MPI.pickle.loads(pickled.tobytes())

    def allreduce(self, sendobj: Any, op: MPI.Op | Callable[[Any, Any], Any] = MPI.SUM) -> Any:
        """Returns all ranks' objects, combined by `op` in rank order."""
        return reduce(op, self.allgather(sendobj))

    def barrier(self) -> None:
        """Returns when all ranks have called this method."""
        self._wait(self.Ibarrier(), "barrier")

    Barrier = barrier

    def Split(self, color: int = 0, key: int = 0) -> PatientComm:
        """Splits as mpi4py's Intracomm.Split does; ends the process if that takes too long."""
        with within(self._patience_s, "ranks to split up"):
            return PatientComm(super().Split(color, key))

    def Split_type(
        self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL
    ) -> PatientComm:
        """Splits as mpi4py's Intracomm.Split_type does; ends the process if that takes too long."""
        with within(self._patience_s, "ranks to split up"):
            return PatientComm(super().Split_type(split_type, key, info))

    def Dup(self, info: MPI.Info | None = None) -> PatientComm:
        """Duplicates as mpi4py's Intracomm.Dup does; ends the process if that takes too long."""
        with within(self._patience_s, "ranks to open a communicator"):
            return PatientComm(super().Dup(info))

    @property
    def _patience_s(self) -> float:
        return self.deadline_s * _FACTORS.get(Stage(OWN.bytes[STAGE]), 1)

    def _wait(self, request: MPI.Request, what: str) -> None:
        Waiter(self._patience_s, spin=False).until(request.Test, what)


def identity() -> tuple[int, int, str]:
    """Returns (this process's rank, the number of ranks, the version of the MPI library)."""
    world = MPI.COMM_WORLD
    return world.rank, world.size, str(MPI.Get_library_version())
