"""The front's end of the socket: passes requests to the lead, and its messages to the clients.

The number of requests that the lead has not ended yet is bounded here. A request counts until its
`End`, also after its client has left, so that the lead's memory is bounded as well.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from mpissd.common.errors import ProtocolError
from mpissd.serve.protocol import (
    Cancel,
    End,
    Message,
    Ready,
    RefusedRequest,
    Stats,
    Stop,
    Submit,
    Tokens,
    pack,
    unpack,
)

_LINE_LIMIT = 1 << 22
_LONGEST_RETRY_S = 60
RETRY = {"retry-after": "5"}  # seconds, until a server is ready or another one takes requests
_HUNG_S = 30.0  # a lead sends statistics ten times a second, but not during a forward
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Problem(Exception):
    """Ends a request with a status. param: the field at fault. headers: of the response."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        """Returns {"error": …} as clients of OpenAI's API expect it."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class Ticket:
    """A request that was sent to the lead, and the lead's messages that wait for its client."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.is_cancelled = False
        self.is_left = False  # the client is gone
        self._messages = asyncio.Queue[Tokens | End | RefusedRequest | Problem]()

    def put(self, message: Tokens | End | RefusedRequest | Problem) -> None:
        """Adds a message of the lead, or the reason why the lead is gone."""
        if not self.is_left:
            self._messages.put_nowait(message)

    async def take(self) -> Tokens | End:
        """Waits for the next message; raises Problem if the lead refused or is gone."""
        message = await self._messages.get()
        if isinstance(message, RefusedRequest):
            raise Problem(message.status, message.message)
        if isinstance(message, Problem):
            raise message
        return message

    @property
    def has_more(self) -> bool:
        """Whether `take` returns at once."""
        return not self._messages.empty()


class Lead:
    """The state of the lead as the front knows it, and the requests that the lead has."""

    def __init__(self, max_queue: int) -> None:
        """max_queue: most requests beyond those that the lead decodes together."""
        self.ready: Ready | None = None
        self.stats = Stats()
        self.gone: str | None = None  # why the lead is gone
        self.on_ready: Callable[[], object] = lambda: None
        self.ended = asyncio.Event()
        self.is_leaving = False  # /ready is 503
        self.is_refusing = False  # so is every new request
        self._max_queue = max_queue
        self._open: dict[int, Ticket] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._last_id = 0
        self._ends: deque[float] = deque(maxlen=16)
        self._stats_s: float | None = None  # when the last statistics came

    @property
    def outstanding(self) -> int:
        """The number of requests that the lead has not ended yet."""
        return len(self._open)

    def check(self) -> Ready:
        """Returns the lead's description; raises Problem(503) without a lead."""
        if self.gone is not None:
            raise Problem(503, self.gone, code="job_gone")
        if self.ready is None:
            raise Problem(503, "the models are being loaded", headers=RETRY)
        return self.ready

    def check_ready(self) -> None:
        """Raises Problem(503) without a lead, if it hangs, or if the server is about to end."""
        if self.is_leaving:
            raise _leaving()
        self.check()
        if (age := self.stats_age_s) > _HUNG_S:
            message = f"the lead has said nothing for {age:.0f} s"
            raise Problem(503, message, code="lead_hangs", headers=RETRY)

    @property
    def stats_age_s(self) -> float:
        """Seconds since the last statistics; 0 before the first ones."""
        return 0.0 if self._stats_s is None else time.monotonic() - self._stats_s

    @property
    def is_serving(self) -> bool:
        """Whether requests are decoded: the lead has connected, and is not gone."""
        return self.ready is not None and self.gone is None

    def check_room(self, more: int = 0) -> None:
        """Raises Problem(429) if the queue is full, Problem(503) if nothing new is taken.

        more: requests that are not submitted yet and count as well.
        """
        if self.is_refusing:
            raise _leaving()
        most = self.check().max_running + self._max_queue
        if (count := self.outstanding + more) >= most:
            after = str(self._retry_after())
            message = f"{count} requests are waiting or running: try again in {after} s"
            raise Problem(429, message, code="queue_full", headers={"retry-after": after})

    def _retry_after(self) -> int:
        """Returns the mean seconds between the last ends, at least 1."""
        if len(self._ends) < 2:
            return 1
        span = time.monotonic() - self._ends[0]
        return max(1, min(_LONGEST_RETRY_S, math.ceil(span / len(self._ends))))

    def submit(self, **request: Any) -> Ticket:
        """Sends a request; raises Problem if there is no lead or no room."""
        self.check_room()
        self._last_id += 1
        ticket = self._open[self._last_id] = Ticket(self._last_id)
        self._send(Submit(id=ticket.id, **request))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Asks the lead to end a request; its `End` follows, unless it came already."""
        if ticket.id in self._open and not ticket.is_cancelled:
            ticket.is_cancelled = True
            self._send(Cancel(ticket.id))

    def leave(self, ticket: Ticket) -> None:
        """Cancels a request unless it has ended, and drops its later messages."""
        self.cancel(ticket)
        ticket.is_left = True

    def stop(self) -> None:
        """Asks the lead to end the job."""
        self._send(Stop())

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    async def accept(self, path: str) -> asyncio.AbstractServer:
        """Opens a local socket for the lead."""
        return await asyncio.start_unix_server(self._listen, path, limit=_LINE_LIMIT)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves the connection of a lead until it is closed; closes a second lead's connection."""
        if self._writer is not None:
            writer.close()
            return
        self._writer = writer
        try:
            while line := await reader.readline():
                self.receive(unpack(line))
        except (ConnectionError, ProtocolError, ValueError) as error:
            self.lose(f"the job is gone ({error})")
        finally:
            self.lose("the job is gone")
            writer.close()
            self.ended.set()

    def lose(self, why: str) -> None:
        """Fails every request, and all further ones, with 503; the first reason counts."""
        self.gone = self.gone or why
        while self._open:
            self._open.popitem()[1].put(Problem(503, self.gone, code="job_gone"))

    def receive(self, message: Message) -> None:
        """Handles a message of the lead."""
        if isinstance(message, Ready):
            self.ready = message
            if self.gone is None:
                self.on_ready()
        elif isinstance(message, Stats):
            self.stats, self._stats_s = message, time.monotonic()
        elif isinstance(message, Tokens) and message.id in self._open:
            self._open[message.id].put(message)
        elif isinstance(message, (End, RefusedRequest)) and message.id in self._open:
            self._ends.append(time.monotonic())
            self._open.pop(message.id).put(message)
            if not self._open:
                self._ends.clear()  # idle time is not time that a request takes


def _leaving() -> Problem:
    message = "the server finishes what it has, and ends"
    return Problem(503, message, code="draining", headers=RETRY)
