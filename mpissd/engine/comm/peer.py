"""A draft's link to another inference engine, over a Unix socket or TCP.

The draft, which is greedy, first sends HELLO: its batch size, K, the longest prompts of a message,
and its vocabulary size. With a key, each side first sends an HMAC (RFC 2104) of both sides' random
numbers. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import select
import socket
from collections.abc import Callable, Generator
from functools import partial
from ipaddress import ip_address
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from mpissd.common.errors import ConfigError, FaultError, ProtocolError
from mpissd.common.wait import Overdue, Waiter
from mpissd.engine.comm.link import DirectOutbox, Inbox, Outbox
from mpissd.engine.comm.wire import HEADER, Header, Kind, LinkShape, Message

MOST_PROMPTS = 1 << 15  # most prompt tokens in a message: Unix sockets hold 208 KiB
_KIND = Header._fields.index("kind")
_LIMITS = (1 << 12, 1 << 8, MOST_PROMPTS, 1 << 24)  # most batch, K, prompt tokens, vocabulary
_FIRST = {Kind.HELLO: len(_LIMITS), Kind.CHALLENGE: 8, Kind.PROOF: 8}  # sizes in int32
_SEND_BUFFER = 1 << 19  # bytes; a message that TCP does not take whole ends the connection
_LOST_MS = 60_000  # how long TCP waits for a host that no longer answers
Steps = Generator[None, None, Any]


class Address(NamedTuple):
    """A draft's address: the path of a Unix socket, or a TCP address and the key for it."""

    family: socket.AddressFamily
    name: Any  # what the methods of a socket of this family take
    key: bytes | None = None

    @classmethod
    def of(cls, where: str) -> Address:
        """Returns the address of a path, or of "tcp://HOST:PORT" (no HOST: 127.0.0.1) with the key
        MPISSD_KEY of the environment. Raises ConfigError for another text, a short key, and
        without a key for an address that other hosts can reach."""
        if not where.startswith("tcp://"):
            return cls(socket.AF_UNIX, where)
        try:
            parts = urlsplit(where)
            if parts.netloc != where[6:] or "@" in where or not parts.port:
                raise ValueError("no address")
            found = socket.getaddrinfo(parts.hostname or "127.0.0.1", parts.port)
        except (ValueError, OSError) as error:
            raise ConfigError(f"socket={where}: {error}: allowed: tcp://HOST:PORT") from error
        family, *_, name = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        key = os.environb.get(b"MPISSD_KEY")
        if key is not None and len(key) < 16:
            raise ConfigError(f"MPISSD_KEY has {len(key)} bytes: allowed: at least 16")
        if key is None and not ip_address(name[0]).is_loopback:
            raise ConfigError(f"socket={where} without MPISSD_KEY: allowed: a loopback address")
        return cls(family, name, key)

    def socket(self) -> socket.socket:
        """Returns a new socket for this address. Those that it accepts have its options."""
        made = socket.socket(self.family)
        if self.family != socket.AF_UNIX:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_MS // 2000)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MS)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made


class Connection(Waiter):
    """A socket connected to a peer. Whole messages are sent and received, without blocking;
    nothing is read beyond the end that a message's header gives. Waits use no CPU. end: the time of
    perf_counter at which they raise Overdue; there is none at first."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(0.0, spin=False)
        self.socket = connected
        self._count = 0  # bytes of the next message that have arrived
        self.end = math.inf
        self._polls = select.poll()  # select() fails for descriptors from 1024 on
        self._polls.register(connected, select.POLLIN)
        connected.setblocking(False)

    def until(self, test: Callable[[], bool], what: str) -> None:
        """Waits until test() is true; raises Overdue, which names `what`, at the time limit."""
        while not test():
            left = self.end - perf_counter()
            if left <= 0:
                raise Overdue(f"{what}: late")
            self._polls.poll(None if left == math.inf else 1e3 * left)

    def send(self, data: memoryview) -> None:
        """Sends a message. Raises OSError or FaultError if the peer has left or does not read."""
        if (count := self.socket.send(data)) < data.nbytes:
            raise FaultError(f"{count} bytes of {data.nbytes} sent: the peer does not read")

    def receive(self, message: Message) -> bool:
        """Receives a message; returns False until all of it has arrived. Raises ProtocolError for a
        header that does not fit its kind, OSError or FaultError if the peer has left."""
        end = 4 * HEADER
        while self._count < end or self._count < (end := 4 * (HEADER + message.header().size)):
            try:
                count = self.socket.recv_into(message.array.data.cast("B")[self._count : end])
            except BlockingIOError:
                return False
            if not count:
                raise FaultError(f"{message.kind.name}: {self._count} bytes: the peer has left")
            self._count += count
        self._count = 0
        return True

    def outbox(self, message: Message) -> Outbox:
        """Returns what sends the messages of one kind to the peer."""
        return DirectOutbox(message, self.send)

    def inbox(self, message: Message) -> Inbox:
        """Returns what receives the messages of one kind from the peer."""
        return Inbox(message, partial(self.receive, message))

    def _send(self, kind: Kind, body: bytes) -> None:
        message = Message(kind, LinkShape(0, 1, 0), _FIRST[kind])
        message.write(0, 1, [np.frombuffer(body, np.int32)])
        self.outbox(message).send()

    def _next(self, kind: Kind) -> Steps:
        message = Message(kind, LinkShape(0, 1, 0), _FIRST[kind])
        try:
            while not self.receive(message):
                yield
        except ProtocolError as error:
            if {kind, message.array[_KIND]} == {Kind.HELLO, Kind.CHALLENGE}:
                raise ProtocolError("only one side has MPISSD_KEY") from error
            raise
        return message.body(message.header(0, 1), _FIRST[kind]).tobytes()

    def hello(self, key: bytes | None) -> Steps:
        """Proves the key, if there is one, to a draft that must prove it, too, and receives HELLO.
        Yields while messages are awaited; returns (the limits of the draft's messages, its
        vocabulary size). Raises ProtocolError for another key, or a number out of bounds."""
        if key is not None:
            theirs = yield from self._next(Kind.CHALLENGE)
            ours = secrets.token_bytes(32)
            self._send(Kind.CHALLENGE, ours)
            self._send(Kind.PROOF, _proof(key, b"client", theirs, ours))
            proof = yield from self._next(Kind.PROOF)
            if not hmac.compare_digest(proof, _proof(key, b"draft", theirs, ours)):
                raise ProtocolError("the draft has another MPISSD_KEY")
        sizes = np.frombuffer((yield from self._next(Kind.HELLO)), np.int32).tolist()
        batch, lookahead, longest, vocab = sizes
        if not all(0 < size <= limit for size, limit in zip(sizes, _LIMITS, strict=True)):
            raise ProtocolError(f"HELLO: sizes are {sizes}, allowed: 1..{_LIMITS}")
        return LinkShape(0, batch, lookahead, prompt_tokens=longest), vocab

    def greet(self, key: bytes | None, shape: LinkShape, vocab: int) -> Steps:
        """Proves the key, if there is one, to a client that has proved it, and sends HELLO: the
        limits `shape` of the draft's messages, and its vocabulary size. Yields while messages are
        awaited. Raises ProtocolError for another key."""
        if key is not None:
            ours = secrets.token_bytes(32)
            self._send(Kind.CHALLENGE, ours)
            theirs = yield from self._next(Kind.CHALLENGE)
            proof = yield from self._next(Kind.PROOF)
            if not hmac.compare_digest(proof, _proof(key, b"client", ours, theirs)):
                self._send(Kind.PROOF, secrets.token_bytes(32))  # does not reveal the key
                raise ProtocolError("the client has another MPISSD_KEY")
            self._send(Kind.PROOF, _proof(key, b"draft", ours, theirs))
        sizes = shape.batch, shape.lookahead, shape.prompt_tokens, vocab
        self._send(Kind.HELLO, np.array(sizes, np.int32).tobytes())


def _proof(key: bytes, side: bytes, draft: bytes, client: bytes) -> bytes:
    """Returns the HMAC by which `side` proves the key; draft, client: their random numbers."""
    return hmac.digest(key, side + draft + client, "sha256")
