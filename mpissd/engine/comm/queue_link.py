"""The link between two threads of one process, without MPI: for tests and in-process decoding."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.comm import wire
from mpissd.engine.comm.link import Carrier, DraftEnd, LeadEnd, LinkShape, Side

Joined = tuple[Side | None, Side | None]


class QueueCarrier(Carrier):
    """A carrier between two threads, over one queue in each direction."""

    def __init__(
        self,
        outgoing: wire.Buffer,
        incoming: wire.Buffer,
        to_peer: queue.SimpleQueue[Ints],
        from_peer: queue.SimpleQueue[Ints],
    ) -> None:
        self._out, self._in = outgoing, incoming
        self._to_peer, self._from_peer = to_peer, from_peer
        self._full = False

    def ready(self) -> None:
        return None

    def send(self, size: int | None = None) -> None:
        self._to_peer.put(self._out.array[:size].copy())

    def arrived(self) -> bool:
        if not self._full:
            try:
                message = self._from_peer.get_nowait()
            except queue.Empty:
                return False
            self._in.array[: len(message)] = message
            self._full = True
        return True

    def release(self) -> None:
        self._full = False

    def close(self) -> None:
        return None


def queue_link(
    shape: LinkShape, waiter: Waiter, draft_waiter: Waiter | None = None
) -> tuple[LeadEnd, DraftEnd]:
    """Returns both ends of a link between two threads of one process.

    draft_waiter: how the draft waits; None: as the lead does.
    """
    lead, draft = _joined(shape.outcome_buffer, shape.speculation_buffer)
    side: Joined = None, None
    prompt: Joined = None, None
    if shape.sampled:
        side = _joined(partial(shape.nothing_buffer, wire.Kind.PROPOSALS), shape.proposals_buffer)
    if shape.prompt_tokens:
        prompt = _joined(shape.prompt_buffer, partial(shape.nothing_buffer, wire.Kind.PROMPT))
    return (
        LeadEnd(*lead, shape.lookahead, waiter, vocab=shape.vocab, side=side[0], prompts=prompt[0]),
        DraftEnd(*draft, draft_waiter or waiter, side=side[1], prompts=prompt[1]),
    )


def _joined(down: Callable[[], wire.Buffer], up: Callable[[], wire.Buffer]) -> tuple[Side, Side]:
    """Returns two connected carriers with buffers; the first sends `down` and receives `up`."""
    to_second: queue.SimpleQueue[Ints] = queue.SimpleQueue()
    to_first: queue.SimpleQueue[Ints] = queue.SimpleQueue()
    out, into = down(), up()
    back, heard = up(), down()
    return (
        Side(QueueCarrier(out, into, to_second, to_first), out, into),
        Side(QueueCarrier(back, heard, to_first, to_second), back, heard),
    )
