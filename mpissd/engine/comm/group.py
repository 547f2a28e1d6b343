"""The interface of the collectives that T target ranks call within a tensor-parallel forward.

`SoloGroup` serves a single rank; the other implementations are in mpi_group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

ALL_REDUCES = ("auto", "oneshot", "nccl", "mpi", "staged", "device")


class Group(ABC):
    """The collectives of `size` ranks, each of which holds a share of one model."""

    name: str
    capturable = True  # whether a captured graph may hold its operations
    spent_s: float | None = None  # host seconds that its operations have taken; None on a device

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size = size
        self.rank = rank

    @abstractmethod
    def all_reduce(self, array: Any) -> None:
        """Replaces `array` by its sum over the ranks, in the order of the device's stream."""

    @abstractmethod
    def all_gather(self, local: Any, gathered: Any) -> None:
        """Writes all ranks' `local` arrays of 4-byte items to `gathered`, in rank order."""

    def check(self) -> None:  # noqa: B027
        """Raises FaultError if the communication library has reported an error."""

    def abort(self) -> None:  # noqa: B027
        """Ends collectives that wait for a dead rank, so that memory can be freed."""

    def close(self) -> None:  # noqa: B027  (most groups hold nothing)
        """Frees the communicator; CUDA graphs that hold its operations must be freed before."""


class SoloGroup(Group):
    """The group of one rank, and of emulated ranks: its operations do nothing."""

    name = "solo"

    def all_reduce(self, array: Any) -> None:
        return None

    def all_gather(self, local: Any, gathered: Any) -> None:
        return None
