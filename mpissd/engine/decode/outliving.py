"""A speculator that survives the loss of its draft rank: from that round on K = 0.

A sampled round needs the distributions of its tokens once one of them is rejected. They are lost if
the draft dies before it has sent them. Whether such a round counts must not depend on the
rejections: drawing again only after a rejection would give less likely tokens too often. So a
sampled round is judged only after its distributions have arrived. If they are lost, no drafted
token is judged, and each sequence draws one token from the target's distribution. Both depend on
the moment of the loss and on no draw, so the output distribution stays the target's [THEORY,
losslessness 1].
"""

from __future__ import annotations

from collections.abc import Callable

from mpissd.common.errors import FaultError
from mpissd.common.rounds import Outcome, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.comm.link import LeadEnd
from mpissd.engine.decode.speculator import RemoteSpeculator


class PeerLost(FaultError):
    """The rank that is waited for is gone, and the job goes on without it."""


class OutlivingWaiter(Waiter):
    """Waits for one rank until it is known to be gone."""

    def __init__(self, waiter: Waiter, is_lost: Callable[[], bool]) -> None:
        """Takes the waiter, and is_lost, which returns whether the rank is known to be gone."""
        super().__init__(waiter.deadline_s, waiter.spin, waiter.spin_s)
        self._waiter, self._is_lost = waiter, is_lost

    def until(self, test: Callable[[], bool], what: str) -> None:
        """Waits like Waiter.until; raises PeerLost once the rank is gone."""
        met = False

        def is_over() -> bool:
            nonlocal met
            met = met or test()
            return met or self._is_lost()

        self._waiter.until(is_over, what)
        if not met:
            raise PeerLost(f"{what}: the rank is gone")


class OutlivingSpeculator(RemoteSpeculator):
    """The speculator of --on_draft_loss=ar: one draft rank, which may be lost."""

    def __init__(self, link: LeadEnd, is_lost: Callable[[], bool]) -> None:
        """Takes the link, whose waits raise PeerLost (OutlivingWaiter), and is_lost, which returns
        whether the draft rank is known to be gone."""
        super().__init__(link)
        self._is_lost = is_lost
        self._knows = False  # of the loss

    def ask(self, outcome: Outcome) -> None:
        if not self._is_gone():
            try:
                super().ask(outcome)
                return
            except PeerLost:
                self._knows = True
        self._answers = True  # `answer` notes the loss, also in a round without drafting

    def answer(self, round_: int, count: int) -> Speculation:
        if not self._knows:
            try:
                return super().answer(round_, count)
            except PeerLost:
                self._knows = True
        if self.lost_round is None:
            self.lost_round = round_
            self._waiting, self._rows = 0, None
        link = self._link
        return Speculation.empty(round_, count, link.lookahead, sampled=link.sampled)

    def confirm(self, speculation: Speculation) -> bool:
        if not self._waiting:
            return True
        try:
            self._link.wait_for_proposals()
        except PeerLost:
            self._knows, self._waiting = True, 0
            return False
        return True

    def stop(self, outcome: Outcome) -> None:
        if not self._is_gone():
            try:
                super().stop(outcome)
                return
            except PeerLost:
                self._knows = True
        if self.lost_round is None:
            self.lost_round = outcome.round + 1

    def _is_gone(self) -> bool:
        self._knows = self._knows or self._is_lost()
        return self._knows
