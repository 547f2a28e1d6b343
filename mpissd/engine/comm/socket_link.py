"""The link over a Unix socket of packets, between a draft process and another project's engine.

A packet is a message of wire.py. The draft begins with HELLO: its batch, its lookahead, the most
tokens of a sequence, and its vocabulary. The engine sends OUTCOME, and PROMPT after one that admits
sequences; SPECULATION comes back. Tokens are greedy. Nothing blocks but SocketWaiter.
"""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Callable
from time import perf_counter

import numpy as np

from mpissd.common.errors import FaultError
from mpissd.common.wait import Overdue, Waiter
from mpissd.engine.comm.link import Inbox, MakeInbox, MakeOutbox, Outbox
from mpissd.engine.comm.wire import HEADER, Header, Kind, LinkShape, Message

MOST_PROMPTS = 1 << 15  # tokens of the prompts of one message; Linux takes packets of 208 KiB
_SIZE = Header._fields.index("size")
_LIMITS = (1 << 12, 1 << 8, MOST_PROMPTS, 1 << 24)  # largest numbers of a HELLO
_HELLO = LinkShape(0, 1, 0)


def packets() -> socket.socket:
    """Returns a new socket of this link."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def boxes(connected: socket.socket) -> tuple[MakeOutbox, MakeInbox]:
    """Returns what carries the messages of a link."""
    connected.setblocking(False)
    return (
        lambda message: SocketOutbox(message, connected),
        lambda message: SocketInbox(message, connected),
    )


class SocketOutbox(Outbox):
    """Sends messages; raises OSError to a peer that has left, or reads nothing."""

    def __init__(self, message: Message, connected: socket.socket) -> None:
        super().__init__(message)
        self._socket = connected

    def ready(self) -> None:
        return None  # the kernel keeps a copy

    def send(self, size: int | None = None) -> None:
        size = size or HEADER + int(self.message.array[_SIZE])
        self._socket.send(self.message.array[:size].data)


class SocketInbox(Inbox):
    """Receives messages; raises FaultError for a peer that has left or sends other packets."""

    def __init__(self, message: Message, connected: socket.socket) -> None:
        super().__init__(message)
        self._socket, self._full = connected, False

    def arrived(self) -> bool:
        if not self._full:
            array = self.message.array
            try:
                count = self._socket.recv_into(array.data)
            except BlockingIOError:
                return False
            if count != 4 * (HEADER + int(array[_SIZE])):  # a longer packet is cut off
                raise FaultError(f"{self.message.kind.name}: {count} bytes: the peer has left")
            self._full = True
        return True

    def release(self) -> None:
        self._full = False


class SocketWaiter(Waiter):
    """Waits for messages, asleep, until the time `end` of perf_counter."""

    end = math.inf

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(0.0, spin=False)
        self._polls = select.poll()  # select() refuses the descriptors of a large server
        self._polls.register(connected, select.POLLIN)

    def until(self, test: Callable[[], bool], what: str) -> None:
        """Returns once test() is true; raises Overdue when it is not at `end`."""
        while not test():
            left = self.end - perf_counter()
            if left <= 0:
                raise Overdue(f"{what}: late")
            self._polls.poll(None if left == math.inf else 1e3 * left)


def send_hello(connected: socket.socket, shape: LinkShape, vocab: int) -> None:
    """Sends the sizes of a draft's messages; vocab: token ids are 0 … vocab − 1."""
    message = Message(Kind.HELLO, _HELLO, len(_LIMITS))
    sizes = shape.batch, shape.lookahead, shape.prompt_tokens, vocab
    message.write(0, 1, [np.array(sizes, np.int32)])
    SocketOutbox(message, connected).send()


def received_hello(connected: socket.socket) -> tuple[LinkShape, int] | None:
    """Returns a link's shape and vocabulary, or None if HELLO has not arrived; raises ProtocolError
    for sizes out of bounds."""
    message = Message(Kind.HELLO, _HELLO, len(_LIMITS))
    if not SocketInbox(message, connected).arrived():
        return None
    header = message.header(0, 1)
    batch, lookahead, longest, vocab = sizes = message.body(header).tolist()
    if not all(0 < size <= most for size, most in zip(sizes, _LIMITS, strict=True)):
        raise message.refused(header, f"sizes are {sizes}, allowed: 1..{_LIMITS}")
    return LinkShape(0, batch, lookahead, prompt_tokens=longest), vocab
