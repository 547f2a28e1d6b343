"""The target ranks' collectives, as operations inside a forward.

`solo` is one rank; `mpi` reduces host arrays (see mpi_group); `staged` copies a device array
through the host; `oneshot`, `nccl` and `device` (device-aware MPI, opt-in) reduce on the device
(see device_group).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

ALL_REDUCES = ("auto", "oneshot", "nccl", "mpi", "staged", "device")


class Group(ABC):
    """T ranks that hold one model between them."""

    name: str
    capturable = True  # whether its operations may be part of a captured graph
    spent_s: float | None = None  # in its operations so far; None where the device runs them

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
        """FaultError where the library behind the group has met an error since."""

    def abort(self) -> None:  # noqa: B027
        """After a fault: lets go of a collective that will never end; then memory can be freed."""

    def close(self) -> None:  # noqa: B027  (most groups hold nothing)
        """Frees the communicator; after the programs that hold its operations."""


class SoloGroup(Group):
    """One rank: nothing to reduce. Also stands in where a forward is only modelled."""

    name = "solo"

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        super().__init__(size, rank)

    def all_reduce(self, array: Any) -> None:
        return None

    def all_gather(self, local: Any, gathered: Any) -> None:
        return None
