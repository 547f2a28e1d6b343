"""The draft's round loop: answers outcomes until one says stop, and grows branches in between."""

from __future__ import annotations

from itertools import count

from mpissd.common.rounds import Speculation
from mpissd.common.trace import DraftPhase
from mpissd.engine.comm.link import DraftEnd
from mpissd.engine.decode.draft import Drafter


def serve(link: DraftEnd, drafter: Drafter) -> None:
    """Runs the draft's loop; returns when an outcome says stop.

    The link is polled between growth steps, so an outcome waits for at most one step.
    """
    drafter.ledger.restart()
    for round_ in count(-1):  # The first outcome, of round -1, only admits sequences.
        outcome, stop = link.outcome(round_)
        drafter.ledger.mark(DraftPhase.WAIT)
        if stop:
            drafter.leave()
            return
        answer = drafter.answer(outcome)
        _reply(link, drafter, answer)
        drafter.ledger.mark(DraftPhase.SEND)
        speculation = _served(link, drafter, answer)
        drafter.hear(speculation)
        if drafter.begin_growth(speculation):
            while drafter.growing and not link.outcome_arrived():
                drafter.grow_step()
        if drafter.is_storing and not link.outcome_arrived():
            drafter.store_opened()
        drafter.close_round(speculation)


def _reply(link: DraftEnd, drafter: Drafter, answer: Speculation) -> None:
    """Sends this draft's answer if it has one, and its proposals if any."""
    policy = drafter.policy
    if not drafter.is_asked:
        return
    if policy.share.num_drafts == 1 or answer.source.any():
        link.send_speculation(answer)
    if policy.sampled and (rows := drafter.proposals()):
        link.send_proposals(answer.round, rows)


def _served(link: DraftEnd, drafter: Drafter, answer: Speculation) -> Speculation:
    """Returns the speculation that is served, merged over all drafts."""
    policy = drafter.policy
    if policy.share.num_drafts == 1 or answer.source.all() or not drafter.is_asked:
        return answer
    lookahead, sampled = policy.lookahead, policy.sampled
    served = link.trunk(answer.round, drafter.num_live, lookahead, sampled=sampled)
    drafter.ledger.mark(DraftPhase.TRUNK)
    return served
