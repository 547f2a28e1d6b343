"""The link between lead and draft: OUTCOME goes to the draft, SPECULATION comes back.

An end of a link has an Outbox or an Inbox for each kind of message that it sends or receives.
PROPOSALS, the distributions of sampled tokens, follow a speculation while the target already
verifies. PROMPT follows an outcome that admits sequences with prompts. mpi_link joins two ranks;
queue_link joins two threads of one process, for tests and in-process decoding.

`socket_boxes` join a draft process and another project's engine by a Unix socket of packets. A
packet is a message of wire.py. The draft begins with HELLO: its batch, its lookahead, the most
tokens of a sequence, and its vocabulary. Tokens are greedy. Nothing blocks but SocketWaiter.
"""

from __future__ import annotations

import math
import queue
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import FaultError
from mpissd.common.rounds import Ints, Outcome, Speculation
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.common.wait import Overdue, Waiter
from mpissd.engine.comm import wire
from mpissd.engine.comm.wire import HEADER, Header, Kind, LinkShape, Message

MOST_PROMPTS = 1 << 15  # tokens of the prompts of one message; Linux takes packets of 208 KiB
_DRAFT_WAIT = int(Doing.DRAFT_WAIT)
_VERIFY = int(Doing.VERIFY)
_SIZE = Header._fields.index("size")
_LIMITS = (1 << 12, 1 << 8, MOST_PROMPTS, 1 << 24)  # largest numbers of a HELLO
_HELLO = LinkShape(0, 1, 0)


class Outbox(ABC):
    """Sends one kind of message, one at a time, from preallocated memory."""

    def __init__(self, message: Message) -> None:
        self.message = message

    def ready(self) -> None:  # noqa: B027
        """Returns when the message may be written again; at once where send keeps a copy."""

    @abstractmethod
    def send(self, size: int | None = None) -> None:
        """Starts sending the message in its usual size, or the first `size` numbers of it."""

    def close(self) -> None:  # noqa: B027
        """Finishes the send that is in flight."""


class Inbox:
    """Receives one kind of message, one at a time, into preallocated memory."""

    def __init__(self, message: Message) -> None:
        self.message, self._full = message, False

    def arrived(self) -> bool:
        """Returns whether the memory holds a message, without blocking."""
        self._full = self._full or self._receive()
        return self._full

    def _receive(self) -> bool:
        """Takes a message into the memory if one is there."""
        raise NotImplementedError

    def release(self) -> None:
        """Gives the memory back for the next message."""
        self._full = False

    def close(self) -> None:
        """Cancels the receive that is in flight."""


MakeOutbox = Callable[[Message], Outbox]
MakeInbox = Callable[[Message], Inbox]


class LeadEnd:
    """The lead's end: sends outcomes, receives speculations; counts messages and bytes."""

    def __init__(
        self, shape: LinkShape, waiter: Waiter, outbox: MakeOutbox, inbox: MakeInbox
    ) -> None:
        """Opens this end; outbox, inbox: make what carries one kind of message."""
        self.shape, self.waiter = shape, waiter
        self.lookahead, self.sampled = shape.lookahead, shape.sampled
        self._outcomes = outbox(shape.message(Kind.OUTCOME))
        self._speculations = inbox(shape.message(Kind.SPECULATION))
        self._prompts = outbox(shape.message(Kind.PROMPT)) if shape.prompt_tokens else None
        self._proposals = inbox(shape.message(Kind.PROPOSALS)) if shape.sampled else None
        self.num_messages = self.num_bytes = 0
        self.proposal_bytes, self.proposal_wait_s = 0, 0.0

    def send_outcome(self, outcome: Outcome, stop: bool = False) -> None:
        """Starts to send OUTCOME: it asks for the speculation of outcome.round + 1, or to stop."""
        self._outcomes.ready()
        message = self._outcomes.message
        self._outcomes.send(wire.write_outcome(message, outcome, stop))
        self._count(4 * message.usual)
        if self._prompts is not None and outcome.prompts and wire.has_prompts(outcome):
            self._prompts.ready()
            size = wire.write_prompts(self._prompts.message, outcome)
            self._prompts.send(size)
            self._count(4 * size)

    def speculation(self, round_: int, count: int) -> Speculation:
        """Waits for the speculation of round `round_` for `count` sequences."""
        inbox = self._speculations
        OWN.bytes[DOING] = _DRAFT_WAIT
        self.waiter.until(inbox.arrived, "draft: speculation")
        OWN.bytes[DOING] = _VERIFY
        speculation = wire.read_speculation(inbox.message, round_, count)
        inbox.release()
        self._count(inbox.message.array.nbytes)
        return speculation

    def proposals(self, round_: int, count: int) -> NDArray[np.float32]:
        """Waits for the `count` distributions of round `round_`; returns them [count, V]."""
        inbox = self.wait_for_proposals()
        rows = wire.read_proposals(inbox.message, round_, count)
        self._release_proposals(inbox, count)
        return rows

    def skip_proposals(self, round_: int, count: int) -> None:
        """Waits for the `count` distributions of a round that needs none of them; drops them."""
        inbox = self.wait_for_proposals()
        inbox.message.header(round_, count)
        self._release_proposals(inbox, count)

    def wait_for_proposals(self) -> Inbox:
        """Returns the inbox of distributions once a message is in it; counts the wait."""
        assert self._proposals is not None, "proposals of a link without sampling"
        start = perf_counter()
        self.waiter.until(self._proposals.arrived, "draft: proposals")
        self.proposal_wait_s += perf_counter() - start
        return self._proposals

    def _release_proposals(self, inbox: Inbox, count: int) -> None:
        inbox.release()
        size = 4 * (HEADER + count * self.shape.vocab)
        self.proposal_bytes += size
        self._count(size)

    def _count(self, num_bytes: int) -> None:
        self.num_messages += 1
        self.num_bytes += num_bytes

    def close(self) -> None:
        """Ends the messages in flight."""
        close_all(self._outcomes, self._speculations, self._prompts, self._proposals)


class DraftEnd:
    """The draft's end: receives outcomes, sends speculations."""

    def __init__(
        self, shape: LinkShape, waiter: Waiter, outbox: MakeOutbox, inbox: MakeInbox
    ) -> None:
        """Opens this end; outbox, inbox: make what carries one kind of message."""
        self._waiter = waiter
        self._outcomes = inbox(shape.message(Kind.OUTCOME))
        self._speculations = outbox(shape.message(Kind.SPECULATION))
        self._prompts = inbox(shape.message(Kind.PROMPT)) if shape.prompt_tokens else None
        self._proposals = outbox(shape.message(Kind.PROPOSALS)) if shape.sampled else None

    def outcome_arrived(self) -> bool:
        """Returns whether an OUTCOME has arrived, without blocking."""
        return self._outcomes.arrived()

    def outcome(self, round_: int | None = None) -> tuple[Outcome, bool]:
        """Waits for OUTCOME, of round `round_` if given; returns it, and its stop flag."""
        self._waiter.until(self._outcomes.arrived, "target: outcome")
        outcome, stop = wire.read_outcome(self._outcomes.message, round_)
        self._outcomes.release()
        return with_prompts(outcome, self._prompts, self._waiter), stop

    def send_speculation(self, speculation: Speculation) -> None:
        """Starts to send SPECULATION."""
        self._speculations.ready()
        wire.write_speculation(self._speculations.message, speculation)
        self._speculations.send()

    def send_proposals(self, round_: int, rows: Sequence[NDArray[np.float32]]) -> None:
        """Starts to send PROPOSALS: the distribution [V] of each token that was not certain."""
        assert self._proposals is not None, "proposals of a link without sampling"
        self._proposals.ready()
        self._proposals.send(wire.write_proposals(self._proposals.message, round_, rows))

    def close(self) -> None:
        """Ends the messages in flight."""
        close_all(self._outcomes, self._speculations, self._prompts, self._proposals)


def close_all(*boxes: Outbox | Inbox | None) -> None:
    """Closes the ends that there are."""
    for box in boxes:
        if box is not None:
            box.close()


def with_prompts(outcome: Outcome, inbox: Inbox | None, waiter: Waiter) -> Outcome:
    """Returns the outcome with the prompts that follow it, if any; inbox: None without prompts."""
    if inbox is None or not wire.has_prompts(outcome):
        return outcome
    waiter.until(inbox.arrived, "lead: prompts")
    outcome = wire.read_prompts(inbox.message, outcome)
    inbox.release()
    return outcome


class QueueOutbox(Outbox):
    """Sends copies of messages to a queue."""

    def __init__(self, message: Message, messages: queue.SimpleQueue[Ints]) -> None:
        super().__init__(message)
        self._queue = messages

    def send(self, size: int | None = None) -> None:
        self._queue.put(self.message.array[: size or self.message.usual].copy())


class QueueInbox(Inbox):
    """Receives messages from a queue."""

    def __init__(self, message: Message, messages: queue.SimpleQueue[Ints]) -> None:
        super().__init__(message)
        self._queue = messages

    def _receive(self) -> bool:
        try:
            numbers = self._queue.get_nowait()
        except queue.Empty:
            return False
        self.message.array[: len(numbers)] = numbers
        return True


def queue_link(
    shape: LinkShape, waiter: Waiter, draft_waiter: Waiter | None = None
) -> tuple[LeadEnd, DraftEnd]:
    """Returns both ends of a link between two threads of one process.

    draft_waiter: how the draft waits; None: as the lead does.
    """
    queues = {kind: queue.SimpleQueue[Ints]() for kind in Kind}
    boxes: tuple[MakeOutbox, MakeInbox] = (
        lambda message: QueueOutbox(message, queues[message.kind]),
        lambda message: QueueInbox(message, queues[message.kind]),
    )
    return LeadEnd(shape, waiter, *boxes), DraftEnd(shape, draft_waiter or waiter, *boxes)


def packets() -> socket.socket:
    """Returns a new socket of this link."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def socket_boxes(connected: socket.socket) -> tuple[MakeOutbox, MakeInbox]:
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

    def send(self, size: int | None = None) -> None:
        size = size or HEADER + int(self.message.array[_SIZE])
        self._socket.send(self.message.array[:size].data)


class SocketInbox(Inbox):
    """Receives messages; raises FaultError for a peer that has left or sends other packets."""

    def __init__(self, message: Message, connected: socket.socket) -> None:
        super().__init__(message)
        self._socket = connected

    def _receive(self) -> bool:
        array = self.message.array
        try:
            count = self._socket.recv_into(array.data)
        except BlockingIOError:
            return False
        if count != 4 * (HEADER + int(array[_SIZE])):  # a longer packet is cut off
            raise FaultError(f"{self.message.kind.name}: {count} bytes: the peer has left")
        return True


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
