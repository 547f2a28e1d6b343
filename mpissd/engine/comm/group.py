"""The interface of the collectives that T tensor-parallel target ranks call within a forward.

`SoloGroup` serves a single rank; mpi_group.py implements the interface for several.
"""

from abc import ABC, abstractmethod
from typing import Any


class Group(ABC):
    """The collectives of `size` ranks, each of which holds a shard of one model."""

    name: str
    capturable = True  # whether a CUDA graph may capture the collectives
    in_kernels = False  # whether a kernel of each rank can sum over all ranks itself
    not_oneshot = ""  # why auto has no one-shot kernels, if it tried them
    spent_s: float | None = None  # host seconds spent in collectives; None if a device runs them

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size = size
        self.rank = rank

    @abstractmethod
    def all_reduce(self, array: Any) -> None:
        """Replaces `array` by its sum over all ranks, as an operation of the device's stream."""

    @abstractmethod
    def all_gather(self, local: Any, gathered: Any) -> None:
        """Writes all ranks' `local` arrays of 4-byte items to `gathered`, in rank order."""

    def check(self) -> None:  # noqa: B027
        """Raises FaultError if the communication library has reported an error."""

    def abort(self) -> None:  # noqa: B027
        """Ends collectives that wait for a dead rank, so that device memory can be freed."""

    def close(self) -> None:  # noqa: B027  (most groups hold nothing)
        """Frees the communicator; CUDA graphs that captured its collectives must be freed first."""


class SoloGroup(Group):
    """The collectives of a single rank, or of emulated ranks, which do nothing."""

    name = "solo"
    in_kernels = True

    def all_reduce(self, array: Any) -> None:
        return None

    def all_gather(self, local: Any, gathered: Any) -> None:
        return None
