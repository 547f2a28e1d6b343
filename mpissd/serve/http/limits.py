"""What one client can hold of the server: sizes, and how long it may keep others waiting."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

BODY_BYTES = 1 << 20  # of a request; larger ones get 413
DRAINED_BYTES = 1 << 25  # of a body that is refused, which most clients send before they listen
BODY_S = 20.0  # in which a body has to arrive
HEAD_S = 15.0  # in which a request's headers have to, from the connection or the last answer on
WRITE_S = 30.0  # in which a client has to take what waits for it
CONNECTIONS = 512  # below the usual limit of 1,024 open files


class BoundedProtocol(H11Protocol):
    """A connection that is cut where its client does not speak, or does not listen.

    uvicorn waits without limit for headers, and for a reader whose window is closed: it stops
    writing at 64 KiB, which bounds memory alone.
    """

    _silent: asyncio.TimerHandle | None = None
    _deaf: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Gives the client HEAD_S for its first request."""
        super().connection_made(transport)
        self._await_request()

    def on_response_complete(self) -> None:
        """Gives the client HEAD_S for its next request."""
        super().on_response_complete()
        self._await_request()

    def _await_request(self) -> None:
        if self._silent is not None:
            self._silent.cancel()
        self._silent = self.loop.call_later(HEAD_S, self._cut_if_silent)

    def _cut_if_silent(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def pause_writing(self) -> None:
        """Gives the client WRITE_S to read."""
        super().pause_writing()
        self._deaf = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Forgets that the client was slow."""
        super().resume_writing()
        if self._deaf is not None:
            self._deaf.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers."""
        super().connection_lost(exc)
        for timer in (self._silent, self._deaf):
            if timer is not None:
                timer.cancel()
