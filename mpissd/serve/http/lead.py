"""The front's end of the socket: requests go to the lead, and what it says to those who asked.

The number of requests that the lead has not ended yet is bounded here; a request counts until its
`End`, also after its client has left, so that the lead's memory is bounded as well.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mpissd.common.errors import ProtocolError
from mpissd.serve.http.problem import Problem
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
_RETRY_S = "5"  # until a server is ready, or another one is found
_HUNG_S = 30.0  # a lead says how it is ten times a second, but while a forward is under way


class Ticket:
    """A request that was sent to the lead."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.is_cancelled = False
        self.is_left = False  # nobody reads any more
        self._waiting: deque[Tokens | End | RefusedRequest | Problem] = deque()
        self._news = asyncio.Event()

    def put(self, message: Tokens | End | RefusedRequest | Problem) -> None:
        """Adds a message of the lead, or what ended the lead."""
        if not self.is_left:
            self._waiting.append(message)
            self._news.set()

    async def take(self) -> Tokens | End:
        """Waits for the next message; raises Problem where the lead has refused, or is gone."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        message = self._waiting.popleft()
        if isinstance(message, RefusedRequest):
            raise Problem(message.status, message.message)
        if isinstance(message, Problem):
            raise message
        return message

    @property
    def has_more(self) -> bool:
        """Whether `take` returns at once."""
        return bool(self._waiting)


class Lead:
    """What the front knows of the lead, and the requests that it has there."""

    def __init__(self, max_queue: int) -> None:
        """max_queue: most requests beyond those that the lead decodes together."""
        self.ready: Ready | None = None
        self.stats = Stats()
        self.gone: str | None = None
        self.on_ready: Callable[[], object] = lambda: None
        self.ended = asyncio.Event()
        self.is_leaving = False  # /ready is 503
        self.is_refusing = False  # so is every new request
        self._max_queue = max_queue
        self._open: dict[int, Ticket] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = 0
        self._ends: deque[float] = deque(maxlen=16)
        self._told_s: float | None = None  # when the last statistics came

    @property
    def outstanding(self) -> int:
        """The number of requests that the lead has not ended yet."""
        return len(self._open)

    def check(self) -> Ready:
        """Returns what the lead said of itself; raises Problem(503) without a lead."""
        if self.gone is not None:
            raise _gone(self.gone)
        if self.ready is None:
            raise Problem(503, "the models are being loaded", headers={"retry-after": _RETRY_S})
        return self.ready

    def check_ready(self) -> Ready:
        """As `check`; raises Problem(503) for a server that will end, or whose lead hangs."""
        if self.is_leaving:
            raise _leaving()
        ready = self.check()
        if (age := self.stats_age_s) > _HUNG_S:
            told = f"the lead has said nothing for {age:.0f} s"
            raise Problem(503, told, code="lead_hangs", headers={"retry-after": _RETRY_S})
        return ready

    @property
    def stats_age_s(self) -> float:
        """Seconds since the last statistics; 0 before the first ones."""
        return 0.0 if self._told_s is None else time.monotonic() - self._told_s

    @property
    def is_serving(self) -> bool:
        """Whether requests are decoded: the lead has come, and is not gone."""
        return self.ready is not None and self.gone is None

    def check_room(self, more: int = 0) -> None:
        """Raises Problem(429) if the queue is full, Problem(503) where nothing new is taken.

        more: requests that come as well.
        """
        if self.is_refusing:
            raise _leaving()
        most = self.check().max_running + self._max_queue
        if (count := self.outstanding + more) >= most:
            after = str(self._retry_after())
            message = f"{count} requests are waiting or running: try again in {after} s"
            raise Problem(429, message, code="queue_full", headers={"retry-after": after})

    def _retry_after(self) -> int:
        """Returns the seconds in which a request is likely to end, by the last ends; at least 1."""
        if len(self._ends) < 2:
            return 1
        span = time.monotonic() - self._ends[0]
        return max(1, min(_LONGEST_RETRY_S, math.ceil(span / len(self._ends))))

    def submit(self, **request: Any) -> Ticket:
        """Sends a request; raises Problem where there is no lead or no room."""
        self.check_room()
        self._numbers += 1
        ticket = self._open[self._numbers] = Ticket(self._numbers)
        self._send(Submit(id=ticket.id, **request))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Asks the lead to end a request; its `End` follows, unless it was there already."""
        if ticket.id in self._open and not ticket.is_cancelled:
            ticket.is_cancelled = True
            self._send(Cancel(ticket.id))

    def leave(self, ticket: Ticket) -> None:
        """Cancels a request unless it has ended; what still arrives for it is dropped."""
        self.cancel(ticket)
        ticket.is_left = True

    def stop(self) -> None:
        """Asks the lead to end the job."""
        self._send(Stop())

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    async def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves the connection of a lead until it is closed; a second lead is sent away."""
        if self._writer is not None:
            writer.close()
            return
        self._writer = writer
        try:
            while line := await reader.readline():
                self._take(unpack(line))
        except (ConnectionError, ProtocolError, ValueError) as error:
            self.lose(f"the job is gone ({error})")
        finally:
            self.lose("the job is gone")
            writer.close()
            self.ended.set()

    async def accept(self, path: str) -> asyncio.AbstractServer:
        """Listens on a local socket for the lead."""
        return await asyncio.start_unix_server(self.listen, path, limit=_LINE_LIMIT)

    def lose(self, why: str) -> None:
        """Fails every request, and those that come, with 503; the first reason counts."""
        self.gone = self.gone or why
        while self._open:
            self._open.popitem()[1].put(_gone(self.gone))

    def _take(self, message: Message) -> None:
        if isinstance(message, Ready):
            self.ready = message
            if self.gone is None:
                self.on_ready()
        elif isinstance(message, Stats):
            self.stats, self._told_s = message, time.monotonic()
        elif isinstance(message, Tokens) and message.id in self._open:
            self._open[message.id].put(message)
        elif isinstance(message, (End, RefusedRequest)) and message.id in self._open:
            self._ends.append(time.monotonic())
            self._open.pop(message.id).put(message)
            if not self._open:
                self._ends.clear()  # idle time is no time that a request takes


def _leaving() -> Problem:
    told = "the server finishes what it has, and ends"
    return Problem(503, told, code="draining", headers={"retry-after": _RETRY_S})


def _gone(why: str) -> Problem:
    return Problem(503, why, code="job_gone")
