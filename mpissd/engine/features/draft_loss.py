"""Lets a run continue without drafts (AR) when its draft rank is lost: --on_draft_loss=ar."""

from collections.abc import Callable

from mpissd.common.errors import FaultError
from mpissd.common.rounds import Outcome, Speculation
from mpissd.common.wait import Overdue, Waiter
from mpissd.engine.comm.link import LeadEnd
from mpissd.engine.round.speculator import RemoteSpeculator, Speculator


class PeerLost(FaultError):
    """Raised by a wait for a message of a rank that has ended, if the job goes on without it."""


class LossWaiter(Waiter):
    """Waits for a rank until it answers or is known to have ended. A rank that hangs is reported
    after half of the deadline, so that other waiting ranks are not overdue if it is then ended."""

    def __init__(
        self,
        waiter: Waiter,
        is_lost: Callable[[], bool],
        report: Callable[[str], object] = lambda what: None,
    ) -> None:
        """waiter: has the deadline, and how to poll. is_lost: returns whether the awaited rank is
        known to have ended. report: is called with the awaited event's name if the rank hangs."""
        super().__init__(waiter.deadline_s / 2, waiter.spin, waiter.spin_s)
        self._waiter = waiter
        self._is_lost = is_lost
        self._report = report

    def until(self, test: Callable[[], bool], what: str) -> None:
        """Waits until test() returns True. Raises PeerLost if the awaited rank has ended before.
        what: names the awaited event in the error."""
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
    """The source of drafted tokens with --on_draft_loss=ar: a draft rank, and nothing after the
    loss of this rank.

    The rejection of a sampled token needs its distribution, which is lost if the draft rank ends
    before sending it. A sampled round is therefore judged only once all its distributions have
    arrived. If they are lost, no drafted token is judged, and each sequence draws one token from
    the target's distribution. Whether they are lost depends on no random draw, so that the output
    distribution stays the target's (docs/ssd.md, "Sampling").
    """

    def __init__(self, link: LeadEnd, is_lost: Callable[[], bool]) -> None:
        """link: exchanges messages with the draft rank; waits for them raise PeerLost. is_lost:
        returns whether the draft rank is known to have ended."""
        super().__init__(link)
        self._is_lost = is_lost
        self._is_gone = False
        self._rounds = 0

    def _survives(self, step: Callable[[], None]) -> bool:
        """Calls step(), which needs the draft rank, unless this rank is known to have ended.
        Returns whether the draft rank still lives afterwards."""
        self._is_gone = self._is_gone or self._is_lost()
        if not self._is_gone:
            try:
                step()
            except PeerLost:
                self._is_gone = True
        return not self._is_gone

    def ask(self, outcome: Outcome) -> None:
        ask = super().ask
        self._answers = True  # `answer` then detects a lost draft rank, even if K = 0
        self._taken = None
        self._survives(lambda: ask(outcome))

    def answer(self, round_: int, count: int) -> Speculation:
        if not self._is_gone:
            try:
                return super().answer(round_, count)
            except PeerLost:
                self._is_gone = True
        if self.lost_round is None:
            self.lost_round = round_
            self._forget_proposals()
        return Speculator.answer(self, round_, count)

    def confirm(self, speculation: Speculation) -> bool:
        if not self._waiting:
            return True
        try:
            self._link.wait_for_proposals()
        except PeerLost:
            self._is_gone = True
            self._forget_proposals()
            return False
        return True

    def stop(self, outcome: Outcome) -> None:
        stop = super().stop
        self._after(lambda: stop(outcome), outcome.round + 1)

    def end(self) -> None:
        self._after(super().end, self._rounds)

    def _after(self, step: Callable[[], None], rounds: int) -> None:
        """Calls step() after so many rounds; notes the draft rank's loss then."""
        self._rounds = rounds
        if not self._survives(step) and self.lost_round is None:
            self.lost_round = rounds
