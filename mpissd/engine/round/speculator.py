"""Sources of a round's draft tokens: none (AR), this rank (inline SD), or a draft rank.

SD and SSD on a draft rank use the same speculator; only the draft knows whether its answer was
pre-speculated. A speculator is asked with the outcome of the last round, and then answers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import FaultError
from mpissd.common.rounds import Outcome, Speculation
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.common.wait import Overdue, Waiter
from mpissd.engine.comm.link import LeadEnd
from mpissd.engine.round.draft import Drafter

_DRAFT_WAIT, _VERIFY = int(Doing.DRAFT_WAIT), int(Doing.VERIFY)


class Speculator:
    """The source of draft tokens: asked once a round, it answers once a round.

    This one is AR's: every round has K = 0.

    lost_round: the first round after the draft was lost, with K = 0 from there on; None while it is
    present. stored_s: of the last answer, the seconds in which a draft on the lead's own device
    stored the committed tokens that it lacked.
    """

    lost_round: int | None = None
    stored_s = 0.0

    def __init__(self, lookahead: int = 0, *, sampled: bool = False) -> None:
        """Takes the shape of an empty speculation, as in jobs with drafts."""
        self._lookahead, self._sampled = lookahead, sampled

    def ask(self, outcome: Outcome) -> None:
        """Hands over outcome r-1 and asks for speculation r; does not wait."""

    def answer(self, round_: int, count: int) -> Speculation:
        """Returns the speculation of round `round_` for the `count` live sequences."""
        return Speculation.empty(round_, count, self._lookahead, sampled=self._sampled)

    def proposal(self, row: int, index: int) -> NDArray[np.float32]:
        """Returns the distribution [V] that a token of the last answer was drawn from.

        The token is the `index`-th of batch row `row` that was not certain. May wait for its
        arrival.
        """
        raise AssertionError("nothing was sampled here")

    def meanwhile(self) -> None:
        """Works while the target verifies the last answer."""

    def confirm(self, speculation: Speculation) -> bool:
        """Returns whether the last answer may be judged: not if the distributions that it needs are
        lost. Called once it was verified, before it is judged; may wait."""
        return True

    def stop(self, outcome: Outcome) -> None:
        """Sends the draft the last outcome."""


class InlineSpeculator(Speculator):
    """The speculator of SD on the lead's own device: it drafts before the target verifies, in one
    stream.

    It stores committed tokens only before it drafts, all that it lacks, so that rounds without
    drafting cost nothing: the draft follows their outcomes while the target verifies.
    """

    def __init__(self, drafter: Drafter) -> None:
        policy, tree = drafter.policy, drafter.worker.oracle.tree
        super().__init__(tree.ends[policy.lookahead], sampled=policy.sampled)
        self._drafter = drafter
        self._outcome: Outcome
        self._follows = False  # whether the draft has not taken the outcome yet

    def ask(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def answer(self, round_: int, count: int) -> Speculation:
        self.stored_s, self._follows = 0.0, self._outcome.control.lookahead == 0
        return super().answer(round_, count) if self._follows else self._drafted()

    def meanwhile(self) -> None:
        if self._follows:
            self._drafted()

    def _drafted(self) -> Speculation:
        drafter = self._drafter
        drafter.ledger.restart()  # Time the lead spent elsewhere is not draft time.
        speculation = drafter.answer(self._outcome)
        self.stored_s = drafter.caught_up_s
        if drafter.chained is not None and drafter.chained.is_on:
            return speculation  # its tokens come with the verdict (chained.ChainedTarget)
        drafter.verification_started(speculation)
        drafter.close_round(speculation)
        return speculation

    def proposal(self, row: int, index: int) -> NDArray[np.float32]:
        return self._drafter.rows[row][index]

    def stop(self, outcome: Outcome) -> None:
        self._drafter.worker.leave(self._drafter.batch)


class RemoteSpeculator(Speculator):
    """The speculator of SD and SSD with a draft rank at the other end of a link."""

    def __init__(self, link: LeadEnd) -> None:
        super().__init__(link.lookahead, sampled=link.sampled)
        self._link, self._page = link, OWN.bytes
        self._answers = True  # whether the draft answers the round that was asked for
        self._served: Speculation
        self._waiting = 0  # PROPOSALS rows of the last answer that are still to be received
        self._rows: NDArray[np.float32] | None = None  # the PROPOSALS received, [rows, V]

    def ask(self, outcome: Outcome) -> None:
        self._answers = outcome.control.lookahead != 0
        self._link.send_outcome(outcome)

    def answer(self, round_: int, count: int) -> Speculation:
        if not self._answers:
            self._drop_proposals()
            return super().answer(round_, count)
        self._page[DOING] = _DRAFT_WAIT
        self._drop_proposals()
        served = self._served = self._link.speculation(round_, count)
        if served.sampled:
            self._waiting = int(served.num_proposals.sum())
        self._page[DOING] = _VERIFY
        return served

    def proposal(self, row: int, index: int) -> NDArray[np.float32]:
        served = self._served
        if self._rows is None:
            self._rows = self._link.proposals(served.round, self._waiting)
            self._waiting = 0
        proposal: NDArray[np.float32] = self._rows[int(served.num_proposals[:row].sum()) + index]
        return proposal

    def _drop_proposals(self) -> None:
        if self._waiting:
            self._link.skip_proposals(self._served.round, self._waiting)
        self._waiting, self._rows = 0, None

    def stop(self, outcome: Outcome) -> None:
        self._drop_proposals()
        self._link.send_outcome(outcome, stop=True)


class PeerLost(FaultError):
    """The rank that is waited for is gone, and the job goes on without it."""


class LossWaiter(Waiter):
    """Waits for one rank until it is known to be gone.

    A rank that hangs is reported after half of the deadline: if that ends the rank, the other
    target ranks have waited for less than their own deadline.
    """

    def __init__(
        self,
        waiter: Waiter,
        is_lost: Callable[[], bool],
        report: Callable[[str], object] = lambda what: None,
    ) -> None:
        """Takes the waiter, and is_lost, which returns whether the rank is known to be gone.

        report: reports a rank that hangs; takes the awaited event.
        """
        super().__init__(waiter.deadline_s / 2, waiter.spin, waiter.spin_s)
        self._waiter, self._is_lost, self._report = waiter, is_lost, report

    def until(self, test: Callable[[], bool], what: str) -> None:
        """Waits like Waiter.until; raises PeerLost once the rank is gone."""
        met = False

        def is_over() -> bool:
            nonlocal met
            met = met or test()
            return met or self._is_lost()

        self.alarm = self._waiter.alarm
        try:
            super().until(is_over, what)
        except Overdue:
            self._report(what)
            super().until(is_over, what)
        if not met:
            raise PeerLost(f"{what}: the rank is gone")


class ARFallback(RemoteSpeculator):
    """The speculator of --on_draft_loss=ar: one draft rank, after whose loss K = 0.

    A sampled round needs the distributions of its tokens once one of them is rejected. They are
    lost if the draft dies before it has sent them. Whether such a round counts must not depend on
    the rejections: drawing again only after a rejection would give less likely tokens too often. So
    a sampled round is judged only after its distributions have arrived. If they are lost, no
    drafted token is judged, and each sequence draws one token from the target's distribution. Both
    depend on the moment of the loss and on no draw, so the output distribution stays the target's
    (docs/ssd.md, "Sampling").
    """

    def __init__(self, link: LeadEnd, is_lost: Callable[[], bool]) -> None:
        """Takes the link, whose waits raise PeerLost (LossWaiter), and is_lost, which returns
        whether the draft rank is known to be gone."""
        super().__init__(link)
        self._is_lost, self._is_gone = is_lost, False

    def _survives(self, step: Callable[[], None]) -> bool:
        """Takes a step with the draft rank; returns False if the rank is gone."""
        self._is_gone = self._is_gone or self._is_lost()
        if not self._is_gone:
            try:
                step()
            except PeerLost:
                self._is_gone = True
        return not self._is_gone

    def ask(self, outcome: Outcome) -> None:
        ask = super().ask
        self._answers = True  # after a loss `answer` notes it, also in a round without drafting
        self._survives(lambda: ask(outcome))

    def answer(self, round_: int, count: int) -> Speculation:
        if not self._is_gone:
            try:
                return super().answer(round_, count)
            except PeerLost:
                self._is_gone = True
        if self.lost_round is None:
            self.lost_round, self._waiting, self._rows = round_, 0, None
        return Speculator.answer(self, round_, count)

    def confirm(self, speculation: Speculation) -> bool:
        if not self._waiting:
            return True
        try:
            self._link.wait_for_proposals()
        except PeerLost:
            self._is_gone, self._waiting = True, 0
            return False
        return True

    def stop(self, outcome: Outcome) -> None:
        stop = super().stop
        if not self._survives(lambda: stop(outcome)) and self.lost_round is None:
            self.lost_round = outcome.round + 1
