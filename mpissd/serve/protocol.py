"""Messages between the server's two halves: JSON objects, one on a line, over a local socket.

    front → lead    submit, cancel
    lead → front    ready, prompt, tokens, end, stats

The front is the process that HTTP clients connect to; the lead is the target's first rank. If the
front closes the socket, the job ends. A message is a struct; its line has the struct's fields and
`op`. Only the front handles text and checks requests; the lead gets token ids.
"""

import select
import socket
from collections.abc import Sequence

import msgspec

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import GREEDY, Logprob, Sampling

SOCKET_VARIABLE = "MPISSD_SERVE_SOCKET"  # environment variable with the path of the front's socket
_CHUNK = 1 << 20  # the most bytes that are read between two rounds, above what a socket holds
_MOST_UNREAD = 64 << 20  # bytes of unread messages after which the front counts as gone


class _Message(msgspec.Struct, tag_field="op"):
    """Base class of messages."""


class Submit(_Message, tag="submit"):
    """Asks the lead to answer a request. id: the request's number, which the front uses only
    once. prompt: token ids. deadline_s: seconds from now until the answer is cut off, or None."""

    id: int
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    deadline_s: float | None = None


class Cancel(_Message, tag="cancel"):
    """Asks the lead to end a request early. It sends an `End`, unless it already has."""

    id: int


class Ready(_Message, tag="ready"):
    """Says that the lead decodes from now on. model: the target's name. context: the most tokens of
    prompt and answer together. stop_ids: tokens that end an answer. max_running: how many requests
    decode together. vocab: the number of token ids. backend, device_name: what the lead computes
    with. draws: where it draws sampled tokens, "device" or "host" (None: nowhere)."""

    model: str
    context: int
    stop_ids: Sequence[int]
    max_running: int
    mode: str
    vocab: int
    backend: str | None = None
    device_name: str | None = None
    draws: str | None = None


class Tokens(_Message, tag="tokens"):
    """New tokens of a request, from one round; a stop token may be among them. sources: what
    drafted each token, or the target. logprobs: the target's log-probabilities of the tokens, if
    the request asked for them. hits: in how many of the request's rounds so far the drafts came
    from the speculation cache."""

    id: int
    tokens: Sequence[int]
    sources: Sequence[str] = ()
    logprobs: Sequence[Logprob] | None = None
    hits: int = 0


class PromptTokens(_Message, tag="prompt"):
    """Log-probabilities of a request's prompt tokens, from position `start` on; those of the first
    token are never sent. After a preemption the same ones are sent again."""

    id: int
    start: int
    logprobs: Sequence[Logprob]


class End(_Message, tag="end"):
    """Says why a request has ended. reason: "stop" (a stop token), "length", "cancelled",
    "deadline" or "refused" (`why` is the message). drafted, accepted: numbers of draft tokens in
    all rounds of the request. hits: the number of rounds whose drafts came from the speculation
    cache. cached: number of prompt tokens that were in the KV cache already. forced: number of
    tokens that the grammar dictated. steps: for each number of tokens, 0 to K, in how many
    rounds so many drafted tokens were accepted."""

    id: int
    reason: str
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    rounds: int = 0
    cached: int = 0
    forced: int = 0
    why: str = ""
    steps: Sequence[int] = ()


class Stats(_Message, tag="stats"):
    """The scheduler's state, sent about ten times a second. running, waiting: numbers of requests.
    free_pages, pages: of the KV cache. mode, lookahead: the method and K of the last round. draft:
    "present" or "lost". preempted, rounds: counts since the start."""

    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    pages: int = 0
    mode: str = ""
    lookahead: int = 0
    draft: str = "present"
    preempted: int = 0
    rounds: int = 0


Message = Submit | Cancel | Ready | PromptTokens | Tokens | End | Stats
_read = msgspec.json.Decoder(Message).decode


def pack(message: Message) -> bytes:
    """Returns a message as a line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def unpack(line: bytes) -> Message:
    """Returns the message in a line, without fields that this version does not know. Raises
    ProtocolError if the line is no message."""
    try:
        return _read(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"serve: no message: {line[:80]!r} ({error})") from error


class Line:
    """The lead's socket to the front. is_closed: whether the front is gone."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._rest = b""
        self._out = bytearray()
        self.is_closed = False

    def take(self, wait_s: float = 0.0) -> Sequence[Message]:
        """Returns the messages that have arrived; waits up to wait_s seconds for a first one."""
        if self.is_closed or not self._poll.poll(1000 * wait_s):
            return ()
        try:
            new = self._socket.recv(_CHUNK)
        except OSError:
            new = b""
        self.is_closed = not new
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [unpack(line) for line in lines]

    def put(self, message: Message) -> None:
        """Queues a message; `flush` sends it."""
        self._out += pack(message)

    def flush(self) -> None:
        """Sends as many queued bytes as the socket takes without blocking."""
        while self._out and not self.is_closed:
            try:
                del self._out[: self._socket.send(self._out)]
            except BlockingIOError:
                self.is_closed = len(self._out) > _MOST_UNREAD
                return
            except OSError:
                self.is_closed = True

    def close(self) -> None:
        """Sends the bytes that the socket takes without blocking, and closes the socket."""
        self.flush()
        self._socket.close()
