"""uvicorn with limits on a client's connections, and with an end that finishes open requests."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mpissd.common.errors import ConfigError
from mpissd.serve.app import REQUESTS
from mpissd.serve.lead import Lead

HEAD_S = 15.0  # in which a request's headers have to arrive, from the last answer on
WRITE_S = 30.0  # in which a client must read some of its waiting data
SEND_BYTES = 1 << 16
CONNECTIONS = REQUESTS
_GRACE_S = 2


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Yields a socket bound to an address; raises ConfigError if that fails.

    Connections inherit the socket's options. A small send buffer keeps the kernel from holding
    megabytes for a slow client. The kernel closes a connection whose client reads nothing for
    WRITE_S.
    """
    try:
        info = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            unread_ms = int(1000 * WRITE_S)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        listener.bind(info[4])
    except OSError as error:
        raise ConfigError(
            f"host={host} port={port}: {error.strerror}: allowed: a free one"
        ) from error
    with listener:
        yield listener


class BoundedProtocol(H11Protocol):
    """A connection that is cut if no request arrives on it for HEAD_S.

    uvicorn itself waits without limit for headers. A connection beyond CONNECTIONS closes the one
    that has been without a request for longest.
    """

    _silent: asyncio.TimerHandle | None = None
    _idle_since_s = 0.0

    def connection_made(self, transport: Any) -> None:
        """Makes room for the connection, and starts its timer."""
        if len(self.connections) >= CONNECTIONS:
            every = [cast(BoundedProtocol, one) for one in self.connections]
            idle = [one for one in every if one.is_idle and not one.transport.is_closing()]
            if idle:
                min(idle, key=lambda one: one._idle_since_s).transport.abort()
        super().connection_made(transport)
        self._await_request()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def on_response_complete(self) -> None:
        """Gives the client HEAD_S for its next request."""
        super().on_response_complete()
        self._await_request()

    def _await_request(self) -> None:
        self._idle_since_s = self.loop.time()
        self._stop_timer()
        self._silent = self.loop.call_later(HEAD_S, self._cut_if_silent)

    def _cut_if_silent(self) -> None:
        if self.is_idle and self.transport.get_write_buffer_size():  # reads its last answer
            self._silent = self.loop.call_later(HEAD_S, self._cut_if_silent)
        elif self.is_idle:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._silent is not None:
            self._silent.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        super().connection_lost(exc)
        self._stop_timer()


class Server(uvicorn.Server):
    """Answers every request before it ends; drains on SIGTERM.

    From SIGTERM on /ready is 503. For `notice_s` requests are still taken, because a balancer asks
    /ready only now and then; after that new ones get 503 with Retry-After. The server ends with its
    last request, or `longest_s` after the signal.
    """

    def __init__(
        self, config: uvicorn.Config, lead: Lead, longest_s: float = 0.0, notice_s: float = 0.0
    ) -> None:
        """longest_s: 0 for a server that does not drain."""
        super().__init__(config)
        self._lead, self._longest_s, self._notice_s = lead, longest_s, notice_s
        self._drained_s: float | None = None  # when the drain began
        self._unfinished = 0
        self.on_drain: Callable[[], object] = lambda: None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain at the first SIGTERM; any other signal ends the server at once."""
        if sig == signal.SIGTERM and self._longest_s and self._drained_s is None:
            self._drained_s = time.monotonic()
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Advances the drain ten times a second; returns whether the server shall end."""
        is_over = self.is_drained(len(self.server_state.tasks))
        return await super().on_tick(counter) or is_over

    def is_drained(self, num_requests: int) -> bool:
        """Advances the drain; returns whether it is over. num_requests: that are under way."""
        if self._drained_s is None:
            return False
        lead, passed_s = self._lead, time.monotonic() - self._drained_s
        if not lead.is_leaving:
            lead.is_leaving = True
            self._notice_s = self._notice_s if lead.is_serving else 0.0
            self.on_drain()
        self._unfinished = num_requests
        lead.is_refusing = passed_s >= min(self._notice_s, self._longest_s)
        return passed_s >= self._longest_s or (lead.is_refusing and not num_requests)

    def summary(self) -> str | None:
        """Returns a line for the server's end; None if nothing was drained."""
        if self._drained_s is None:
            return None
        passed_s = time.monotonic() - self._drained_s
        return f"drained in {passed_s:.1f} s; requests cut off: {self._unfinished or 'none'}"

    def end(self) -> None:
        """Ends the server as a signal does."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Fails requests that are left, and closes all connections."""
        self._lead.lose("the server ends")
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await asyncio.sleep(0)  # lets the responses be written first
        await super().shutdown(sockets)


def settings(app: object) -> uvicorn.Config:
    """Returns uvicorn's settings."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=BoundedProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(HEAD_S),  # longer than clients keep an idle connection
        timeout_graceful_shutdown=_GRACE_S,
    )
