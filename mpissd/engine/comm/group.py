"""The target ranks' collectives, which are operations inside a forward.

`solo` is for one rank and does nothing. `mpi` reduces host arrays. `staged` copies a
device array to the host and back; `oneshot`, `nccl` and `device` (device-aware MPI, which the user
has to ask for) reduce on the device (mpi_group).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

ALL_REDUCES = ("auto", "oneshot", "nccl", "mpi", "staged", "device")


class Group(ABC):
    """The collectives of T ranks that share one model."""

    name: str
    capturable = True  # whether a captured graph may hold its operations
    spent_s: float | None = None  # host seconds that its operations have taken; None on a device

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank

    @abstractmethod
    def all_reduce(self, array: Any) -> None:
        """Sums `array` over the ranks, in place, in stream order."""

    @abstractmethod
    def all_gather(self, local: Any, gathered: Any) -> None:
        """Concatenates 4-byte `local` arrays of all ranks into `gathered`, in rank order."""

    def check(self) -> None:  # noqa: B027
        """Raises FaultError if the group's library has met an error."""

    def abort(self) -> None:  # noqa: B027
        """Aborts a collective that a fault keeps from ending, so that memory can be freed."""

    def close(self) -> None:  # noqa: B027  (most groups hold nothing)
        """Frees the communicator. Programs that hold its operations have to be freed before."""


class SoloGroup(Group):
    """The group of one rank, and of emulated ranks: its operations do nothing."""

    name = "solo"

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        super().__init__(size, rank)

    def all_reduce(self, array: Any) -> None:
        return None

    def all_gather(self, local: Any, gathered: Any) -> None:
        return None
