"""Append-only arrays that keep their newest numbers in memory and the older ones in a file.

The file is a temporary one without a name, so nothing is left of it however a rank ends. Python's
tempfile places it (TMPDIR). Where it cannot be written, everything stays in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from io import FileIO
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPILL_ROUNDS = 512  # rounds between two writes to the file: some ten KB, written in some ten µs
LAST = SPILL_ROUNDS - 1  # the round of each 512, counted from 0, after which the file is written


class Tape:
    """An array of one number type whose older part lies in a file.

    tail: the part in memory, an array.array. append (one number) and extend (numbers as bytes) are
    the methods of `tail` itself, so that an append costs no extra call.
    """

    def __init__(self, typecode: str, numbers: bytes = b"") -> None:
        """Makes a tape of these numbers. typecode: their type, as array.array names it."""
        self.tail: array[Any] = array(typecode, numbers)
        self.append: Callable[[float], None] = self.tail.append
        self.extend: Callable[[bytes], None] = self.tail.frombytes
        self.saved = 0  # the number of numbers in the file
        self._file: FileIO | None = None
        self._full = False

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return self.saved + len(self.tail)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the numbers, which another process holds in memory."""
        return Tape, (self.tail.typecode, self.read().tobytes())

    def spill(self) -> None:
        """Moves the numbers in memory to the file; after a failed write they stay in memory."""
        if self._full:
            return
        size = len(self.tail) * self.tail.itemsize
        try:
            if self._file is None:
                self._file = TemporaryFile(prefix="mpissd-", buffering=0)  # noqa: SIM115
            self._file.seek(self.saved * self.tail.itemsize)
            written = self._file.write(self.tail)
        except OSError:  # for example a full disk
            written = 0
        self._full = written != size
        if not self._full:
            self.saved += len(self.tail)
            del self.tail[:]

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Returns a copy of numbers start … stop-1; stop: the end where it is None or beyond it."""
        stop = len(self) if stop is None else min(stop, len(self))
        numbers = np.empty(max(0, stop - start), self.tail.typecode)
        old = numbers[: max(0, self.saved - start)]
        if self._file is not None and len(old):
            left = old.data.cast("B")
            self._file.seek(start * self.tail.itemsize)
            while left:
                count = self._file.readinto(left)
                assert count, "the temporary file has been cut"
                left = left[count:]
        skipped = max(0, start - self.saved)
        numbers[len(old) :] = self.tail[skipped : skipped + len(numbers) - len(old)]
        return numbers

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.read().astype(dtype or self.tail.typecode, copy=False)
