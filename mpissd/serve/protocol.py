"""Messages between the front and the lead: JSON objects, one a line, over a local socket.

    front → lead    submit, cancel
    lead → front    ready, tokens, end, stats

A closed socket means that the other side is gone; the front closes it to end the job. A message is
a frozen dataclass; its line is an object of its fields and `op`. Only the front decodes text, and
checks requests: the lead handles token ids.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import GREEDY, Logprob, Sampling

SOCKET_VARIABLE = "MPISSD_SERVE_SOCKET"  # path of the front's socket, for the ranks
_CHUNK, _CHUNKS = 1 << 16, 16  # bytes of a read; reads between two rounds, at most
_MOST_UNREAD = 64 << 20  # bytes that the front may leave unread before it counts as gone


@dataclass(frozen=True)
class Submit:
    """A request.

    id: chosen by the front, never reused. deadline_s: seconds from now after which the answer ends
    as it is, or None.
    """

    op: ClassVar[str] = "submit"
    id: int
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    deadline_s: float | None = None


@dataclass(frozen=True)
class Cancel:
    """Ends a request early. The lead sends its `End`, unless it has sent it already."""

    op: ClassVar[str] = "cancel"
    id: int


@dataclass(frozen=True)
class Ready:
    """The lead decodes from now on.

    model: the target's name. context: most tokens of prompt and answer together. vocab: token ids
    are below it. backend, device_name: the lead's. draws:
    where it draws sampled tokens, "device" or "host"; None: it never samples.
    """

    op: ClassVar[str] = "ready"
    model: str
    context: int
    stop_ids: Sequence[int]
    max_running: int
    mode: str
    vocab: int
    backend: str | None = None
    device_name: str | None = None
    draws: str | None = None


@dataclass(frozen=True)
class Tokens:
    """New tokens of a request, from one round; a stop token is among them.

    sources: the origin of each token. logprobs: by the target, if the request asked for them. hits:
    rounds so far whose outcome was in the speculation cache.
    """

    op: ClassVar[str] = "tokens"
    id: int
    tokens: Sequence[int]
    sources: Sequence[str] = ()
    logprobs: Sequence[Logprob] | None = None
    hits: int = 0


@dataclass(frozen=True)
class End:
    """The end of a request: "stop" (a stop token), "length", "cancelled", "deadline" or "refused".

    drafted, accepted: tokens over all of its rounds. hits: rounds whose outcome was in the
    speculation cache. cached: tokens of the prompt whose KV cache an earlier request had left.
    forced: tokens that the grammar left no choice of. why: of a refusal.
    """

    op: ClassVar[str] = "end"
    id: int
    reason: str
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    rounds: int = 0
    cached: int = 0
    forced: int = 0
    why: str = ""


@dataclass(frozen=True)
class Stats:
    """The state of the scheduler, some ten times a second.

    draft: "present" or "lost". preempted, rounds: counted from the start.
    """

    op: ClassVar[str] = "stats"
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    pages: int = 0
    mode: str = ""
    lookahead: int = 0
    draft: str = "present"
    preempted: int = 0
    rounds: int = 0


Message = Submit | Cancel | Ready | Tokens | End | Stats
_KINDS: dict[str, Any] = {kind.op: kind for kind in Message.__args__}
_NAMES = {kind: frozenset(f.name for f in fields(kind)) for kind in _KINDS.values()}


def pack(message: Message) -> bytes:
    """Returns a message as a line."""
    values = {"op": message.op, **vars(message)}
    return json.dumps(values, default=Sampling.to_dict).encode() + b"\n"


def unpack(line: bytes) -> Message:
    """Returns the message of a line; ignores fields that this version does not know.

    Raises ProtocolError for a line that is no message.
    """
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("op")]
        if kind is Submit:
            values["sampling"] = Sampling.from_dict(values["sampling"])
        message: Message = kind(**{name: values[name] for name in values if name in _NAMES[kind]})
        return message
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ProtocolError(f"serve: no message: {line[:80]!r} ({error})") from error


class Line:
    """The lead's end of the socket: reads and writes that never block a round.

    `is_closed` is true once the front is gone.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._rest = b""
        self._out = bytearray()
        self.is_closed = False

    def take(self, wait_s: float = 0.0) -> Sequence[Message]:
        """Returns the messages that have arrived; waits at most wait_s seconds for the first."""
        if self.is_closed or not self._poll.poll(1000 * wait_s):
            return ()
        data = bytearray(self._rest)
        for _ in range(_CHUNKS):  # a cancellation may follow long prompts
            try:
                new = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                new = b""
            if not new:
                self.is_closed = True
                break
            data += new
        *lines, self._rest = bytes(data).split(b"\n")
        return [unpack(line) for line in lines]

    def put(self, message: Message) -> None:
        """Keeps a message for the next flush."""
        self._out += pack(message)

    def flush(self) -> None:
        """Sends as much as the socket takes."""
        while self._out and not self.is_closed:
            try:
                del self._out[: self._socket.send(self._out)]
            except BlockingIOError:
                self.is_closed = len(self._out) > _MOST_UNREAD
                return
            except OSError:
                self.is_closed = True

    def close(self) -> None:
        """Sends as much as the socket accepts, and closes it."""
        self.flush()
        self._socket.close()
