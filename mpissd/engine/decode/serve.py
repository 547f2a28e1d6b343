"""The draft's round loop: answers outcomes until each link stops, and grows branches in between.

One loop serves every target group that shares the draft. Between two forwards it takes what has
arrived from all groups, and its next forward carries the next work of each of them: answers, glues
(scoring forwards) and growth. So an outcome waits for at most the one forward that runs when it
arrives, whatever the draft does for other groups. Only chunks of their long prompts, which are
forwards of their own, come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import count
from typing import TypeVar

from mpissd.common.rounds import Speculation
from mpissd.common.trace import DraftPhase
from mpissd.engine.comm.link import DraftEnd
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.updates import Updates
from mpissd.engine.workload.steps import Steps

R = TypeVar("R")
Ready = Callable[[], bool]
# Yields None when a forward was launched, or a test of whether the awaited message has arrived.
Turns = Generator["Ready | None", None, R]


class _Group:
    """One target group: its rounds on the draft, and the event that they wait for.

    awaited: a test of whether the message has arrived; None: waits for the launched forward.
    """

    def __init__(self, link: DraftEnd, drafter: Drafter, updates: Updates | None) -> None:
        self.drafter = drafter
        self.turns = _rounds(link, drafter, updates)
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
            _wait_for_mail(groups)
        if len(groups) > 1:
            groups.append(groups.pop(0))  # rotates, so that each group comes first in turn


def _wait_for_mail(groups: list[_Group]) -> None:
    def has_come() -> bool:
        return any(group.awaited is None or group.awaited() for group in groups)

    groups[0].drafter.wait_until(has_come, "target: outcome")


def _rounds(link: DraftEnd, drafter: Drafter, updates: Updates | None) -> Turns[None]:
    """Serves one group until an outcome carries the stop flag.

    The link is polled between growth steps, so an outcome waits for at most one of them.
    """
    for round_ in count(-1):  # The first outcome, of round -1, only admits sequences.
        if not link.outcome_arrived():
            yield link.outcome_arrived
        outcome, stop = link.outcome(round_)
        drafter.ledger.mark(DraftPhase.WAIT)
        if stop:
            drafter.leave()
            return
        answer = yield from drafter.answering(outcome)
        _reply(link, drafter, answer)
        drafter.ledger.mark(DraftPhase.SEND)
        drafter.hear(answer)
        yield from _grow(link, drafter, answer)
        drafter.close_round(answer)
        if updates is not None:
            _update(link, updates)


def _update(link: DraftEnd, updates: Updates) -> None:
    """Works on newer weights until an outcome arrives or there is nothing to do."""
    while updates.work() and not link.outcome_arrived():
        continue


def _grow(link: DraftEnd, drafter: Drafter, speculation: Speculation) -> Steps[None]:
    """Catches up after a rest, speculates and stores prompts until the next outcome arrives."""
    while drafter.is_catching_up and not link.outcome_arrived():
        yield from drafter.store_part()
    if (yield from drafter.begin_growth(speculation)):
        while drafter.growing and not link.outcome_arrived():
            yield from drafter.grow_step()
    if drafter.is_storing and not link.outcome_arrived():
        yield from drafter.store_opened()


def _reply(link: DraftEnd, drafter: Drafter, answer: Speculation) -> None:
    """Sends the answer if the lead waits for it, and its proposals if any."""
    if not drafter.is_asked:
        return
    link.send_speculation(answer)
    if drafter.policy.sampled and (rows := drafter.proposals()):
        link.send_proposals(answer.round, rows)
