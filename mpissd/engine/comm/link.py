"""The link between the target's rank 0 (the lead) and the draft rank. After each round rank 0 sends
an outcome (accepted count and bonus token of each sequence); the draft answers with a speculation
(the drafted tokens of the next round).

Three more messages may follow these. While the target verifies, BRANCHES sends rank 0 whole
branches, so that an outcome that is among them needs no answer, and PROPOSALS the distributions
that sampled tokens were drawn from. PROMPT holds the prompts of sequences that an outcome admits.

mpi_link.py connects two ranks, `queue_link` two threads of one process, and peer.py a draft with
another inference engine.
"""

import queue
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Ints, Outcome, ReadyBranches, Speculation
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.common.wait import Waiter
from mpissd.engine.comm import wire
from mpissd.engine.comm.wire import HEADER, Header, Kind, LinkShape, Message

_DRAFT_WAIT = int(Doing.DRAFT_WAIT)
_VERIFY = int(Doing.VERIFY)
_SIZE = Header._fields.index("size")
_LOOKS = 4  # two are enough for Open MPI 5.0; by one, most branches went unseen


class Outbox(ABC):
    """Sends messages of one kind, one at a time, from the preallocated buffer `message`."""

    def __init__(self, message: Message) -> None:
        self.message = message

    def ready(self) -> None:  # noqa: B027
        """Waits until the previous send has read `message`, so that it may be overwritten."""

    @abstractmethod
    def send(self, size: int | None = None) -> None:
        """Starts to send the first `size` int32 of `message` (None: the usual number)."""

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

    def is_there(self) -> bool:
        """Returns, without blocking, whether a message has arrived, for a caller that does not ask
        again and again: over TCP, Open MPI takes a message that is there in several calls."""
        return any(self.arrived() for _ in range(_LOOKS))

    def release(self) -> None:
        """Allows the next message to overwrite the buffer."""
        self._full = False

    def close(self) -> None:
        """Cancels a receive that is still in progress."""


Find = Callable[[ReadyBranches], "Speculation | None"]
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
        self._outcomes = outbox(Message(Kind.OUTCOME, shape))
        self._speculations = inbox(Message(Kind.SPECULATION, shape))
        self._prompts = outbox(Message(Kind.PROMPT, shape)) if shape.prompt_tokens else None
        self._proposals = inbox(Message(Kind.PROPOSALS, shape)) if shape.sampled else None
        self._branches = inbox(Message(Kind.BRANCHES, shape)) if shape.branches else None
        self._ready: ReadyBranches | None = None  # the last branches received
        self._unended = 0  # how many stops the draft has not yet answered by its last branches
        # What branches have served of rounds whose answers are still to come.
        self._unread = deque[Speculation]()
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
        if self._branches is not None and self._branches.is_there():
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
        if self._unread:
            self._is_answered()
        return not (self._unended or self._unread)

    def speculation(self, round_: int, count: int, find: Find | None = None) -> Speculation:
        """Waits for the drafted tokens of round `round_` and `count` sequences; returns them. find:
        returns the tokens that branches serve, or None. Branches that were on their way when the
        outcome was sent come before the answer, which has the same tokens and is then dropped."""
        served: Speculation | None = None

        def is_over() -> bool:
            nonlocal served, find
            if self._is_answered():
                return True
            if find is not None:
                self.collect()
                if self._ready is not None and self._ready.round == round_ - 1:
                    served = find(self._ready)
                    find = None
            return served is not None

        OWN.bytes[DOING] = _DRAFT_WAIT
        self.waiter.until(is_over, "draft: speculation")
        OWN.bytes[DOING] = _VERIFY
        if served is not None:
            self._unread.append(served)
            return served
        speculation = wire.read_speculation(self._speculations.message, round_, count)
        self._release_answer()
        return speculation

    def _is_answered(self) -> bool:
        """Returns whether an answer has arrived, after dropping those that are needless. Raises
        ProtocolError if one of these is not what branches have served."""
        while self._speculations.arrived():
            if not self._unread:
                return True
            served = self._unread.popleft()
            round_ = served.round
            answer = wire.read_speculation(self._speculations.message, round_, len(served.rows))
            if not np.array_equal(answer.rows, served.rows):
                told = f"{answer.rows.tolist()}, but branches served {served.rows.tolist()}"
                raise ProtocolError(f"round {round_}: the draft answers {told}")
            self._release_answer()
        return False

    def _release_answer(self) -> None:
        self._speculations.release()
        self._count(self._speculations.message.array.nbytes)

    def proposals(self, round_: int, count: int) -> NDArray[np.float32]:
        """Waits for the `count` distributions from which the draft sampled the tokens of round
        `round_`; returns them, float32 [count, V], for a vocabulary of V tokens."""
        inbox = self.wait_for_proposals()
        rows = wire.read_proposals(inbox.message, round_, count)
        self._release_proposals(inbox, count)
        return rows

    def skip_proposals(self, round_: int, count: int) -> None:
        """Waits for what `proposals` would return, and drops it unread."""
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
    tokens. It is made as a LeadEnd is."""

    _branches: Outbox | None = None

    def __init__(
        self, shape: LinkShape, waiter: Waiter, outbox: MakeOutbox, inbox: MakeInbox
    ) -> None:
        self._waiter = waiter
        self._outcomes = inbox(Message(Kind.OUTCOME, shape))
        self._speculations = outbox(Message(Kind.SPECULATION, shape))
        self._prompts = inbox(Message(Kind.PROMPT, shape)) if shape.prompt_tokens else None
        self._proposals = outbox(Message(Kind.PROPOSALS, shape)) if shape.sampled else None
        self._branches = outbox(Message(Kind.BRANCHES, shape)) if shape.branches else None

    @property
    def pushes(self) -> bool:
        """Whether the target's rank 0 has a cache of its own, to which whole branches are sent."""
        return self._branches is not None

    def outcome_arrived(self) -> bool:
        """Returns, without blocking, whether an outcome has arrived."""
        return self._outcomes.is_there()

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
