"""The draft's round, and the loop that runs it for every target group that shares the draft.

A group's round is a generator that pauses at each forward and while it waits for a message. Between
two forwards the loop takes what has arrived from all groups, and its next forward carries the next
work of each of them: answers, glues (scoring forwards) and growth. So an outcome waits for at most
the one forward that runs when it arrives, whatever the draft does for other groups. Only chunks of
their long prompts, which are forwards of their own, come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import count
from typing import TypeVar

from mpissd.common.trace import DraftPhase
from mpissd.engine.comm.link import DraftEnd
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.updates import Updates

R = TypeVar("R")
Ready = Callable[[], bool]
# Yields None when a forward was launched, or a test of whether the awaited message has arrived.
Turns = Generator["Ready | None", None, R]


def draft_rounds(link: DraftEnd, drafter: Drafter, updates: Updates | None = None) -> Turns[None]:
    """Serves one group, round by round, until an outcome carries the stop flag.

    The link is polled between growth steps, so an outcome waits for at most one of them.
    """
    for round_ in count(-1):  # The first outcome, of round -1, only admits sequences.
        if not link.outcome_arrived():
            yield link.outcome_arrived
        outcome, stop = link.outcome(round_)
        mark = drafter.ledger.mark
        mark(DraftPhase.WAIT)
        if stop:
            drafter.leave()
            return
        # Answers v = (k, t*): branches of the cache for hits, the backup for misses.
        answer = yield from drafter.answering(outcome)
        if drafter.is_asked:
            link.send_speculation(answer)
            if drafter.policy.sampled and (rows := drafter.proposals()):
                link.send_proposals(answer.round, rows)
        mark(DraftPhase.SEND)
        # Speculates on the outcome of the answer, while the target verifies it.
        drafter.verification_started(answer)
        if (yield from drafter.begin_growth(answer)):
            while drafter.growing and not link.outcome_arrived():
                yield from drafter.grow_step()
        if drafter.is_storing and not link.outcome_arrived():
            yield from drafter.store_opened()
        drafter.close_round(answer)
        if updates is not None:
            while updates.work() and not link.outcome_arrived():
                continue


class _Group:
    """One target group: its rounds on the draft, and the event that they wait for.

    awaited: a test of whether the message has arrived; None: waits for the launched forward.
    """

    def __init__(self, link: DraftEnd, drafter: Drafter, updates: Updates | None) -> None:
        self.drafter = drafter
        self.turns = draft_rounds(link, drafter, updates)
        self.awaited: Ready | None = None
        drafter.ledger.restart()


def serve(*ends: tuple[DraftEnd, Drafter], updates: Updates | None = None) -> None:
    """Runs the draft's loop over a link and a drafter for each target group.

    Returns when every group has stopped. Each works until it has launched a forward or waits for a
    message. Drafters of several groups must run their forwards on one shared model (model.shared),
    so that the wait for one ends the forwards of all. updates: source of newer weights for a single
    drafter, one unit a round and more while no message arrives.
    """
    groups = [_Group(*end, updates) for end in ends]

    def has_come() -> bool:
        return any(group.awaited is None or group.awaited() for group in groups)

    while groups:
        running = None
        for group in groups[:]:
            if group.awaited is not None and not group.awaited():
                continue
            try:
                group.awaited = next(group.turns)
            except StopIteration:
                groups.remove(group)
                continue
            if group.awaited is None:
                running = group
        if running is not None:
            running.drafter.wait()
        elif groups:
            groups[0].drafter.waiter.until(has_come, "target: outcome")
        if len(groups) > 1:
            groups.append(groups.pop(0))  # rotates, so that each group comes first in turn
