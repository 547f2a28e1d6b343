"""Who measures what, where several sweeps share a folder: nothing is measured twice at once."""

from __future__ import annotations

import fcntl
import struct
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import IO

_FLOCK = "hhqqi"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Claims:
    """Locks of single bytes of an empty file, one a configuration.

    The kernel drops them with the process, so that a kill leaves none. Where there are none (a file
    system or a system without them, no room for the file), everything may be taken.
    """

    def __init__(self, folder: Path) -> None:
        self._file: IO[bytes] | None = None
        with suppress(OSError):
            self._file = (folder / ".claims").open("ab")

    def take(self, name: str) -> bool:
        """Whether nobody else has it; it is this job's until `close`."""
        operation = getattr(fcntl, "F_OFD_SETLK", None)
        if operation is None or self._file is None:
            return True
        place = int.from_bytes(sha256(name.encode()).digest()[:7], "big")
        try:
            fcntl.fcntl(self._file, operation, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, place, 1, 0))
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Gives all of them back."""
        if self._file is not None:
            self._file.close()
