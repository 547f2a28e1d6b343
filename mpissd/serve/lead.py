"""Passes requests from the HTTP process to the lead, and the lead's messages back to requests.

The HTTP process is the front; the lead is the target's rank 0, which decodes. The front bounds the
number of requests that the lead has not ended yet. A request counts until the lead's `End`, even if
its client has left, so that the lead's memory is bounded too.
"""

import asyncio
import time
from collections.abc import Sequence

from mpissd.common.errors import ProtocolError
from mpissd.serve.fields import Problem
from mpissd.serve.protocol import (
    Cancel,
    End,
    Message,
    PromptTokens,
    Ready,
    Stats,
    Submit,
    Tokens,
    pack,
    unpack,
)
from mpissd.serve.request import Exchange

_LINE_LIMIT = 1 << 22
RETRY = {"retry-after": "5"}  # seconds
_HUNG_S = 30.0  # Without statistics for these seconds, the target's rank 0 counts as hung.


class Lead:
    """What the front knows about the lead, and requests that the lead decodes. ready: the lead's
    first message, None while it loads. gone: why the lead is gone, or None. is_leaving: /ready
    answers 503, as the server will end. is_refusing: new requests get 503."""

    def __init__(self, max_queue: int) -> None:
        """max_queue: how many requests may wait, besides those that the lead decodes together."""
        self.ready: Ready | None = None
        self.stats = Stats()
        self.gone: str | None = None
        self.is_leaving = self.is_refusing = False
        self.connected, self.ended = asyncio.Event(), asyncio.Event()
        self._max_queue = max_queue
        self._open: dict[int, Exchange] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._last_id = 0
        self._stats_s: float | None = None  # when the last statistics arrived

    @property
    def outstanding(self) -> int:
        """The number of requests for which the lead has not sent an `End`."""
        return len(self._open)

    @property
    def stats_age_s(self) -> float:
        """Seconds since the lead last sent statistics; 0 before the first."""
        return 0.0 if self._stats_s is None else time.monotonic() - self._stats_s

    @property
    def is_serving(self) -> bool:
        """Whether the lead decodes requests: it has connected, and is not gone."""
        return self.ready is not None and self.gone is None

    def check(self) -> Ready:
        """Returns the lead's first message; raises Problem (503) if it is still loading or gone."""
        if self.gone is not None:
            raise Problem(503, self.gone, code="job_gone")
        if self.ready is None:
            raise Problem(503, "the models are being loaded", headers=RETRY)
        return self.ready

    def check_ready(self) -> None:
        """Raises Problem (503) if the lead is loading, gone or hangs, or the server ends soon."""
        self._check(self.is_leaving)
        if (age := self.stats_age_s) > _HUNG_S:
            message = f"the lead has said nothing for {age:.0f} s"
            raise Problem(503, message, code="lead_hangs", headers=RETRY)

    def check_room(self, more: int = 0) -> None:
        """Raises Problem: 429 if the queue is full, 503 if no requests are taken. more: how many
        requests will be added besides the next one."""
        most = self._check(self.is_refusing).max_running + self._max_queue
        if (count := self.outstanding + more) >= most:
            message = f"{count} requests are waiting or running"
            raise Problem(429, message, code="queue_full", headers=RETRY)

    def _check(self, is_ending: bool) -> Ready:
        if is_ending:
            message = "the server finishes what it has, and ends"
            raise Problem(503, message, code="draining", headers=RETRY)
        return self.check()

    def submit(self, choices: Sequence[Exchange]) -> None:
        """Gives the choices (answers) of a request their ids, and sends the first one of each
        prompt to the lead. The caller sends the others once the lead has stored their prompt.
        Raises Problem if there is no lead, or no room for all."""
        self.check_room(len(choices) - 1)
        for choice in choices:
            self._last_id += 1
            choice.id = self._last_id
            self._open[choice.id] = choice
            if choice.is_first:
                self.send(choice)

    def send(self, choice: Exchange) -> None:
        """Sends the lead a choice, which has an id."""
        assert choice.max_tokens is not None, "a choice without its defaults"
        choice.is_sent = True
        left_s = max(1e-9, choice.ends_s - time.monotonic())
        self._send(Submit(choice.id, choice.prompt, choice.max_tokens, choice.sampling, left_s))

    def cancel(self, *choices: Exchange) -> None:
        """Asks the lead to end answers early. It sends an `End` for each that has not ended."""
        for choice in choices:
            if not choice.is_sent:
                self._open.pop(choice.id, None)
            elif choice.id in self._open:
                self._send(Cancel(choice.id))

    def stop(self) -> None:
        """Ends the MPI job, by closing the connection to the lead."""
        if self._writer is not None:
            self._writer.close()

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    async def accept(self, path: str) -> asyncio.AbstractServer:
        """Opens the local socket at `path` to which the lead will connect."""
        return await asyncio.start_unix_server(self._listen, path, limit=_LINE_LIMIT)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads the lead's messages until it closes the connection; refuses a second connection."""
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
        """Fails all open and later requests with 503. why: the reason; the first one stays."""
        self.gone = self.gone or why
        while self._open:
            self._open.popitem()[1].messages.put_nowait(Problem(503, self.gone, code="job_gone"))

    def receive(self, message: Message) -> None:
        """Handles a message from the lead; tokens go to the queue of their request."""
        if isinstance(message, Ready):
            self.ready = message
            self.connected.set()
        elif isinstance(message, Stats):
            self.stats, self._stats_s = message, time.monotonic()
        elif isinstance(message, (PromptTokens, Tokens)) and message.id in self._open:
            self._open[message.id].messages.put_nowait(message)
        elif isinstance(message, End) and message.id in self._open:
            end = Problem(400, message.why) if message.reason == "refused" else message
            self._open.pop(message.id).messages.put_nowait(end)
