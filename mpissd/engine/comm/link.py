"""The link between the target's rank 0 (the lead) and the draft rank. After each round rank 0 sends
an outcome (accepted count and bonus token of each sequence); the draft answers with a speculation
(the drafted tokens of the next round).

Three more messages may follow these. While the target verifies, BRANCHES sends rank 0 whole
branches, so that an outcome that is among them needs no answer, and PROPOSALS the distributions
that sampled tokens were drawn from. PROMPT holds the prompts of sequences that an outcome admits.

mpi_link.py connects two ranks, and `queue_link` two threads of one process. `Connection` connects a
draft to another inference engine by a Unix socket or TCP. There the draft, which is greedy, first
sends HELLO: its batch size, K, the longest prompts of a message, and its vocabulary size. With a
key, each side first sends an HMAC (RFC 2104) of both sides' random numbers. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import math
import os
import queue
import secrets
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import partial
from ipaddress import ip_address
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError, FaultError, ProtocolError
from mpissd.common.rounds import Ints, Outcome, ReadyBranches, Speculation
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.common.wait import Overdue, Waiter
from mpissd.engine.comm import wire
from mpissd.engine.comm.wire import HEADER, Header, Kind, LinkShape, Message

MOST_PROMPTS = 1 << 15  # most prompt tokens in a message: Unix sockets hold 208 KiB
_DRAFT_WAIT = int(Doing.DRAFT_WAIT)
_VERIFY = int(Doing.VERIFY)
_SIZE = Header._fields.index("size")
_KIND = Header._fields.index("kind")
_LIMITS = (1 << 12, 1 << 8, MOST_PROMPTS, 1 << 24)  # most batch, K, prompt tokens, vocabulary
_FIRST = {Kind.HELLO: len(_LIMITS), Kind.CHALLENGE: 8, Kind.PROOF: 8}  # sizes in int32
_SEND_BUFFER = 1 << 19  # bytes; a message that TCP does not take whole ends the connection
_LOST_MS = 60_000  # how long TCP waits for a host that no longer answers
Steps = Generator[None, None, Any]


class Outbox(ABC):
    """Sends messages of one kind, one at a time, from the preallocated buffer `message`."""

    def __init__(self, message: Message) -> None:
        self.message = message

    def ready(self) -> None:  # noqa: B027
        """Waits until the previous send has read `message`, so that it may be overwritten."""

    @abstractmethod
    def send(self, size: int | None = None) -> None:
        """Starts to send the first `size` int32 of `message` (None: as many as messages of this
        kind usually have)."""

    def close(self) -> None:  # noqa: B027
        """Finishes a send that is still in progress."""


class Inbox:
    """Receives messages of one kind, one at a time, into the preallocated buffer `message`.
    receive: tries to receive one without blocking, and returns whether one had arrived."""

    def __init__(self, message: Message, receive: Callable[[], bool]) -> None:
        self.message = message
        self._receive = receive
        self._full = False

    def arrived(self) -> bool:
        """Returns, without blocking, whether `message` holds a message not yet released."""
        self._full = self._full or self._receive()
        return self._full

    def release(self) -> None:
        """Allows the next message to overwrite the buffer."""
        self._full = False

    def close(self) -> None:
        """Cancels a receive that is still in progress."""


MakeOutbox = Callable[[Message], Outbox]
MakeInbox = Callable[[Message], Inbox]


class LeadEnd:
    """The end of the link at the target's rank 0: it sends outcomes to the draft, receives
    speculations (drafted tokens), and counts messages and bytes. waiter: waits for messages with a
    deadline. outbox, inbox: functions that make the sender and the receiver of one kind of message.
    """

    def __init__(
        self, shape: LinkShape, waiter: Waiter, outbox: MakeOutbox, inbox: MakeInbox
    ) -> None:
        self.shape = shape
        self.waiter = waiter
        self.lookahead = shape.lookahead
        self.sampled = shape.sampled
        self._outcomes = outbox(shape.message(Kind.OUTCOME))
        self._speculations = inbox(shape.message(Kind.SPECULATION))
        self._prompts = outbox(shape.message(Kind.PROMPT)) if shape.prompt_tokens else None
        self._proposals = inbox(shape.message(Kind.PROPOSALS)) if shape.sampled else None
        self._branches = inbox(shape.message(Kind.BRANCHES)) if shape.branches else None
        self._ready: ReadyBranches | None = None  # the last branches received
        self._unended = 0  # how many stops the draft has not yet answered by its last branches
        self.num_messages = self.num_bytes = 0

    def send_outcome(self, outcome: Outcome, stop: bool = False, taken: int | None = None) -> None:
        """Starts to send an outcome to the draft, which answers with the drafted tokens of the next
        round, unless rank 0 has taken branches of the version `taken` from its own cache; or ends
        if `stop` is set."""
        self._outcomes.ready()
        message = self._outcomes.message
        self._outcomes.send(wire.write_outcome(message, outcome, stop, taken=taken))
        self._unended += stop and self._branches is not None
        self._count(4 * message.usual)
        if self._prompts is not None and outcome.prompts and len(outcome.fresh):
            self._prompts.ready()
            size = wire.write_prompts(self._prompts.message, outcome)
            self._prompts.send(size)
            self._count(4 * size)

    def branches(self, round_: int) -> ReadyBranches | None:
        """Returns the branches grown for outcomes of round `round_`, if they have arrived. Raises
        ProtocolError for branches of a later round."""
        self.collect()
        ready = self._ready
        if ready is not None and ready.round > round_:
            what = f"round is {ready.round}, expected at most {round_}"
            raise ProtocolError(f"round {ready.round}: BRANCHES message refused: {what}")
        return ready if ready is not None and ready.round == round_ else None

    def collect(self) -> None:
        """Receives branches that have arrived, without waiting. Keeps the last, and drops those
        sent before the draft ended its loop."""
        inbox = self._branches
        while inbox is not None and inbox.arrived():
            ready, is_end = wire.read_branches(inbox.message)
            inbox.release()
            self._count(4 * (HEADER + ready.rows.size))
            self._unended -= is_end
            self._ready = None if is_end or self._unended else ready

    def _is_ended(self) -> bool:
        if self._unended:
            self.collect()
        return not self._unended

    def speculation(self, round_: int, count: int) -> Speculation:
        """Waits for the drafted tokens of round `round_` and `count` sequences; returns them."""
        inbox = self._speculations
        OWN.bytes[DOING] = _DRAFT_WAIT
        self.waiter.until(inbox.arrived, "draft: speculation")
        OWN.bytes[DOING] = _VERIFY
        speculation = wire.read_speculation(inbox.message, round_, count)
        inbox.release()
        self._count(inbox.message.array.nbytes)
        return speculation

    def proposals(self, round_: int, count: int) -> NDArray[np.float32]:
        """Waits for the `count` distributions from which the draft sampled the tokens of round
        `round_`; returns them, float32 [count, V], for a vocabulary of V tokens."""
        inbox = self.wait_for_proposals()
        rows = wire.read_proposals(inbox.message, round_, count)
        self._release_proposals(inbox, count)
        return rows

    def skip_proposals(self, round_: int, count: int) -> None:
        """Waits for the `count` distributions from which the draft sampled the tokens of round
        `round_`, and drops them unread."""
        inbox = self.wait_for_proposals()
        inbox.message.header(round_, count)
        self._release_proposals(inbox, count)

    def wait_for_proposals(self) -> Inbox:
        """Waits for the distributions of sampled tokens; returns the inbox that holds them."""
        assert self._proposals is not None, "proposals of a link without sampling"
        self.waiter.until(self._proposals.arrived, "draft: proposals")
        return self._proposals

    def _release_proposals(self, inbox: Inbox, count: int) -> None:
        inbox.release()
        self._count(4 * (HEADER + count * self.shape.vocab))

    def _count(self, num_bytes: int) -> None:
        self.num_messages += 1
        self.num_bytes += num_bytes

    def end(self) -> None:
        """Takes the draft's last branches after a stop. Until then the draft's send may not end,
        and rank 0's next round may be far off."""
        self.waiter.until(self._is_ended, "draft: last branches")

    def close(self) -> None:
        """Takes the draft's last branches, finishes sends and cancels other receives."""
        self.end()
        close_all(
            self._outcomes, self._speculations, self._prompts, self._proposals, self._branches
        )


class DraftEnd:
    """The draft's end of the link to the target's rank 0: it receives outcomes, and sends drafted
    tokens. waiter: waits for messages with a deadline. outbox, inbox: functions that make the
    sender and the receiver of one kind of message."""

    _branches: Outbox | None = None

    def __init__(
        self, shape: LinkShape, waiter: Waiter, outbox: MakeOutbox, inbox: MakeInbox
    ) -> None:
        self._waiter = waiter
        self._outcomes = inbox(shape.message(Kind.OUTCOME))
        self._speculations = outbox(shape.message(Kind.SPECULATION))
        self._prompts = inbox(shape.message(Kind.PROMPT)) if shape.prompt_tokens else None
        self._proposals = outbox(shape.message(Kind.PROPOSALS)) if shape.sampled else None
        self._branches = outbox(shape.message(Kind.BRANCHES)) if shape.branches else None

    @property
    def pushes(self) -> bool:
        """Whether the target's rank 0 has a cache of its own, to which whole branches are sent."""
        return self._branches is not None

    def outcome_arrived(self) -> bool:
        """Returns, without blocking, whether an outcome has arrived."""
        return self._outcomes.arrived()

    def outcome(self, round_: int | None = None) -> tuple[Outcome, bool]:
        """Waits for an outcome of round `round_` (None: of any round). Returns (the outcome,
        whether the target's rank 0 orders the draft to stop)."""
        self._waiter.until(self._outcomes.arrived, "target: outcome")
        outcome, stop = wire.read_outcome(self._outcomes.message, round_)
        self._outcomes.release()
        return with_prompts(outcome, self._prompts, self._waiter), stop

    def send_speculation(self, speculation: Speculation) -> None:
        """Starts to send the drafted tokens of a round to the target's rank 0."""
        self._speculations.ready()
        wire.write_speculation(self._speculations.message, speculation)
        self._speculations.send()

    def send_proposals(self, round_: int, rows: Sequence[NDArray[np.float32]]) -> None:
        """Starts to send the distributions from which the tokens of round `round_` were sampled,
        one for each token, float32 [V], for a vocabulary of V tokens."""
        assert self._proposals is not None, "proposals of a link without sampling"
        self._proposals.ready()
        self._proposals.send(wire.write_proposals(self._proposals.message, round_, rows))

    def send_branches(self, ready: ReadyBranches, *, stop: bool = False) -> None:
        """Starts to send whole branches to rank 0's cache. stop: whether they are the last."""
        assert self._branches is not None, "branches for a rank 0 without a cache"
        self._branches.ready()
        self._branches.send(wire.write_branches(self._branches.message, ready, stop=stop))

    def end_branches(self) -> None:
        """Tells the target's rank 0 that no more branches follow, if it has a cache."""
        if self.pushes:
            self.send_branches(ReadyBranches(0, np.zeros((0, 0), np.int32)), stop=True)

    def close(self) -> None:
        """Finishes sends and cancels receives that are still in progress."""
        close_all(
            self._outcomes, self._speculations, self._prompts, self._proposals, self._branches
        )


def close_all(*boxes: Outbox | Inbox | None) -> None:
    """Closes all given outboxes and inboxes; skips None."""
    for box in boxes:
        if box is not None:
            box.close()


def with_prompts(outcome: Outcome, inbox: Inbox | None, waiter: Waiter) -> Outcome:
    """Returns the outcome with the prompts of the sequences that it admits, after waiting for them
    in `inbox`. With inbox=None (a link without prompts) the outcome is returned as it is."""
    if inbox is None or not len(outcome.fresh):
        return outcome
    waiter.until(inbox.arrived, "lead: prompts")
    outcome = wire.read_prompts(inbox.message, outcome)
    inbox.release()
    return outcome


class DirectOutbox(Outbox):
    """Passes the used part of a message to the function `put`, which sends it at once."""

    def __init__(self, message: Message, put: Callable[[memoryview], object]) -> None:
        super().__init__(message)
        self._put = put

    def send(self, size: int | None = None) -> None:
        self._put(self.message.array[: HEADER + int(self.message.array[_SIZE])].data)


def queue_link(
    shape: LinkShape, waiter: Waiter, draft_waiter: Waiter | None = None
) -> tuple[LeadEnd, DraftEnd]:
    """Returns both ends of a link between two threads of one process. waiter, draft_waiter: how the
    target and the draft wait for messages (draft_waiter=None: as the target does)."""
    queues = {kind: queue.SimpleQueue[Ints]() for kind in Kind}

    def outbox(message: Message) -> Outbox:
        return DirectOutbox(message, lambda numbers: queues[message.kind].put(np.array(numbers)))

    def inbox(message: Message) -> Inbox:
        return Inbox(message, partial(received, message))

    def received(message: Message) -> bool:
        try:
            numbers = queues[message.kind].get_nowait()
        except queue.Empty:
            return False
        message.array[: len(numbers)] = numbers
        return True

    draft = DraftEnd(shape, draft_waiter or waiter, outbox, inbox)
    return LeadEnd(shape, waiter, outbox, inbox), draft


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
