"""The lead's end of the socket to the front: reads and writes that never block a round."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

from mpissd.serve.protocol import Message, pack, unpack

_CHUNK, _CHUNKS = 1 << 16, 16  # bytes of a read, and reads between two rounds, at most
_MOST_UNREAD = 64 << 20  # bytes that the front has not read; then it counts as gone


class Line:
    """Messages to and from the front. `is_closed` once the front is gone."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._rest = b""
        self._unsent: list[Message] = []
        self._out = bytearray()
        self.is_closed = False

    def take(self, wait_s: float = 0.0) -> Sequence[Message]:
        """Returns the messages that have arrived, after waiting for one for at most wait_s
        seconds."""
        if self.is_closed or not self._poll.poll(1000 * wait_s):
            return ()
        *lines, self._rest = (self._rest + self._read()).split(b"\n")
        return [unpack(line) for line in lines]

    def _read(self) -> bytes:
        """Returns what has arrived: a message that ends a request may stand behind long ones."""
        found = bytearray()
        for _ in range(_CHUNKS):
            try:
                new = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                new = b""
            if not new:
                self.is_closed = True
                break
            found += new
        return bytes(found)

    def put(self, message: Message) -> None:
        """Keeps a message for the next flush."""
        self._unsent.append(message)

    def flush(self) -> None:
        """Sends as much as the socket takes."""
        if self._unsent:
            self._out += b"".join(pack(message) for message in self._unsent)
            self._unsent = []
        while self._out and not self.is_closed:
            try:
                del self._out[: self._socket.send(self._out)]
            except BlockingIOError:
                self.is_closed = len(self._out) > _MOST_UNREAD
                return
            except OSError:
                self.is_closed = True

    def close(self) -> None:
        """Closes the socket, behind what it still takes."""
        self.flush()
        self._socket.close()
