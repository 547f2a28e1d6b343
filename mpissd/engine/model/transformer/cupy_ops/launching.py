"""What the operations ask of a device: memory, and kernels launched in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Launcher(Protocol):
    """Implemented by backend.cupy_launch."""

    @property
    def shared_bytes(self) -> int:
        """The most shared memory of a block."""

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that are free now."""

    @property
    def multiprocessors(self) -> int:
        """The device's multiprocessors: so many blocks of any size are there at once."""

    def function(
        self,
        name: str,
        files: tuple[str, ...],
        macros: tuple[tuple[str, int], ...] = (),
        shared_mem: int = 0,
    ) -> Any:
        """Returns the kernel `name` of these sources, compiled with these macros.

        shared_mem: the most dynamic shared memory of its launches, in bytes.
        """

    def launch(
        self,
        function: Any,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_mem: int = 0,
    ) -> None:
        """Launches a kernel; args are device arrays, NumPy scalars, or None for a null pointer."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an uninitialised device array; raises ConfigError if it does not fit."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns a device array of zeros."""

    def uploaded(self, values: Any, dtype: Any) -> Any:
        """Returns a device array of host values."""

    def copy(self, source: Any, to: Any) -> None:
        """Copies a device array into another one of its shape, in the stream's order; waits."""

    def upload(self, values: Any, array: Any) -> None:
        """Writes host values into a contiguous device array; returns when they are there."""


def ceil_div(value: int, by: int) -> int:
    """Returns value / by, rounded up."""
    return -(-value // by)
