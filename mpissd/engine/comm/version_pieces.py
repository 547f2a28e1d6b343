"""New weights of a draft in pieces, so that none of them holds up a round for long.

A piece is a header of eight int64 and up to PIECE bytes of a version. The last one completes it:
then its checksum decides whether it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError

PIECE = 1 << 20  # bytes: some .3 ms to take over on one host
HEADER = 64  # bytes of the header
_END = -1  # the version of the last message, which has no bytes
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Complete:
    """A version whose bytes have all arrived and fit their checksum."""

    version: int
    data: memoryview


class Inbox(Protocol):
    """Receives pieces for a draft."""

    def take(self) -> Bytes | None:
        """Returns the next message, valid until the next call; None if none has arrived."""


def pieces(version: int, data: bytes) -> Iterator[Bytes]:
    """Yields the messages of a version."""
    checksum = crc32(data)
    for start in range(0, len(data), PIECE):
        part = data[start : start + PIECE]
        yield _message(part, version, len(data), start, len(part), checksum)


def end() -> Bytes:
    """Returns the last message of a stream."""
    return _message(b"", _END, 0, 0, 0, 0)


def is_end(message: Bytes) -> bool:
    """Returns whether no message follows this one."""
    return int(message[:HEADER].view(np.int64)[0]) == _END


def _message(part: bytes, *told: int) -> Bytes:
    header: Any = np.zeros(HEADER // 8, np.int64)
    header[: len(told)] = told
    return np.concatenate([header.view(np.uint8), np.frombuffer(part, np.uint8)])


class Assembly:
    """Joins the pieces of one version after another."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._version = self._at = self._checksum = 0

    def add(self, message: Bytes) -> Complete | None:
        """Takes a piece; returns the version that it completes.

        Raises ProtocolError for a piece out of order, and for a version whose checksum is another
        one than its sender's; the next version is received all the same.
        """
        version, total, start, count, checksum = (
            int(value) for value in message[:HEADER].view(np.int64)[:5]
        )
        if start == 0:
            self._data, self._version, self._at, self._checksum = bytearray(total), version, 0, 0
        if (version, total, start) != (self._version, len(self._data), self._at):
            raise ProtocolError(
                f"version {version}: a piece at {start} of {total} bytes, expected version "
                f"{self._version} at {self._at} of {len(self._data)}"
            )
        part = message[HEADER : HEADER + count]
        self._data[start : start + count] = part.data
        self._checksum, self._at = crc32(part.data, self._checksum), start + count
        if self._at < total:
            return None
        if self._checksum != checksum:
            found, wanted = f"{self._checksum:#010x}", f"{checksum:#010x}"
            raise ProtocolError(f"version {version}: checksum is {found}, expected {wanted}")
        return Complete(version, memoryview(self._data))
