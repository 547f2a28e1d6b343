"""Locks that stop several sweeps in one folder from measuring the same configuration at once."""

from __future__ import annotations

import fcntl
import struct
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import IO

_FLOCK = "hhqqi"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Claims:
    """Claims measurements by locking single bytes of an empty file, one byte for each.

    The kernel releases the locks when the process ends, even if it is killed. Where locking is not
    possible (the file system or operating system has none, or the disk is full), every claim
    succeeds.
    """

    def __init__(self, folder: Path) -> None:
        self._file: IO[bytes] | None = None
        with suppress(OSError):
            self._file = (folder / ".claims").open("ab")

    def take(self, name: str) -> bool:
        """Claims a measurement by name until `close`; returns False if another job holds it."""
        operation = getattr(fcntl, "F_OFD_SETLK", None)
        if operation is None or self._file is None:
            return True
        place = int.from_bytes(sha256(name.encode()).digest()[:7], "big")
        try:
            fcntl.fcntl(self._file, operation, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, place, 1, 0))
        except (BlockingIOError, PermissionError):  # POSIX allows either error
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Releases all claims."""
        if self._file is not None:
            self._file.close()
