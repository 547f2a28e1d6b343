"""Numbers that are only appended while rounds run, of which the last few alone take memory.

The rest goes to a temporary file that has no name: nothing is left of it, however a rank ends. It
lies where Python's tempfile puts it (TMPDIR); where it can't be written, memory holds the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from io import FileIO
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPILL_ROUNDS = 512  # that are kept in memory: some ten KB and, at their end, as many µs
LAST = SPILL_ROUNDS - 1


class Tape:
    """An array of one type whose beginning lies in a file.

    tail: what is in memory, a plain array; append (a number) and extend (numbers as bytes) are its
    own, and whoever counts nanoseconds takes them from it.
    """

    def __init__(self, typecode: str) -> None:
        """typecode: of module array."""
        self.tail: array[Any] = array(typecode)
        self.append: Callable[[float], None] = self.tail.append
        self.extend: Callable[[bytes], None] = self.tail.frombytes
        self.saved = 0  # numbers in the file
        self._file: FileIO | None = None
        self._full = False

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return self.saved + len(self.tail)

    def spill(self) -> None:
        """Writes what is in memory."""
        if self._full:
            return
        size = len(self.tail) * self.tail.itemsize
        try:
            if self._file is None:
                self._file = TemporaryFile(prefix="mpissd-", buffering=0)  # noqa: SIM115
            self._file.seek(self.saved * self.tail.itemsize)
            written = self._file.write(self.tail)
        except OSError:  # a full disk, or none to write on
            written = 0
        self._full = written != size
        if not self._full:
            self.saved += len(self.tail)
            del self.tail[:]

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Numbers start … stop-1, copied."""
        stop = len(self) if stop is None else min(stop, len(self))
        found = np.empty(max(0, stop - start), self.tail.typecode)
        old = found[: max(0, self.saved - start)]
        if self._file is not None and len(old):
            left = old.data.cast("B")
            self._file.seek(start * self.tail.itemsize)
            while left:
                count = self._file.readinto(left)
                assert count, "the temporary file has been cut"
                left = left[count:]
        skipped = max(0, start - self.saved)
        found[len(old) :] = self.tail[skipped : skipped + len(found) - len(old)]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.read().astype(dtype or self.tail.typecode, copy=False)
