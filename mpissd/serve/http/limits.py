"""What one client can hold of the server: sizes, and how long it may keep others waiting."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from mpissd.serve.http.problem import Problem

BODY_BYTES = 1 << 20  # of a request; larger ones get 413
DRAINED_BYTES = 1 << 25  # of a body that is refused, which most clients send before they listen
BODY_S = 20.0  # in which a body has to arrive
HEAD_S = 15.0  # in which a request's headers have to, from the connection or the last answer on
WRITE_S = 30.0  # in which a client has to take what waits for it
CONNECTIONS = 512  # below the usual limit of 1,024 open files
_FULL = Problem(
    503, f"{CONNECTIONS} connections are in use", code="connections", headers={"retry-after": "5"}
)


class BoundedProtocol(H11Protocol):
    """A connection that is cut where its client does not speak, or does not listen.

    uvicorn waits without limit for headers, and for a reader whose window is closed: it stops
    writing at 64 KiB, which bounds memory alone. A reader that takes something within WRITE_S may
    go on for as long as it likes. Where all connections are in use, a new one ends the one that has
    been without a request for longest; if each has one, it is told so and closed.
    """

    _silent: asyncio.TimerHandle | None = None
    _deaf: asyncio.TimerHandle | None = None
    _unread = 0  # bytes that waited for the client at the last look
    _idle_since = 0.0

    def connection_made(self, transport: Any) -> None:
        """Gives the client HEAD_S for its first request, and makes room for it."""
        every = [cast(BoundedProtocol, one) for one in self.connections]
        if len(every) >= CONNECTIONS:
            idle = [one for one in every if one.is_idle and not one.transport.is_closing()]
            if not idle:
                transport.write(_written(_FULL))
                transport.close()
                return
            min(idle, key=lambda one: one._idle_since).transport.abort()
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """Ignores what a connection that was refused still sends."""
        if self in self.connections:
            super().data_received(data)

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def on_response_complete(self) -> None:
        """Gives the client HEAD_S for its next request."""
        super().on_response_complete()
        self._await_request()

    def _await_request(self) -> None:
        self._idle_since = self.loop.time()
        if self._silent is not None:
            self._silent.cancel()
        self._silent = self.loop.call_later(HEAD_S, self._cut_if_silent)

    def _cut_if_silent(self) -> None:
        if not self.is_idle:
            return
        if not _size(self.transport):
            self.transport.abort()
            return
        self._silent = self.loop.call_later(HEAD_S, self._cut_if_silent)
        self._watch_reader()  # it has not read its last answer yet

    def pause_writing(self) -> None:
        """Gives the client WRITE_S to read some of it."""
        super().pause_writing()
        self._watch_reader()

    def _watch_reader(self) -> None:
        if self._deaf is None:
            self._unread = _size(self.transport)
            self._deaf = self.loop.call_later(WRITE_S, self._cut_if_deaf)

    def _cut_if_deaf(self) -> None:
        self._deaf, left = None, _size(self.transport)
        if left >= self._unread > 0:
            self.transport.abort()
        elif left:
            self._watch_reader()

    def resume_writing(self) -> None:
        """Forgets that the client was slow."""
        super().resume_writing()
        if self._deaf is not None:
            self._deaf.cancel()
            self._deaf = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers."""
        if self in self.connections:  # else it was refused
            super().connection_lost(exc)
        for timer in (self._silent, self._deaf):
            if timer is not None:
                timer.cancel()


def _size(transport: Any) -> int:
    """Returns how many bytes wait for the client."""
    return cast(int, transport.get_write_buffer_size())


def _written(problem: Problem) -> bytes:
    """Returns the whole response of a connection that is refused."""
    body = json.dumps(problem.to_dict()).encode()
    own = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
    fields = {**own, **problem.headers}.items()
    head = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"HTTP/1.1 {problem.status} Service Unavailable\r\n{head}\r\n".encode() + body
