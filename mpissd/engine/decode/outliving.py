"""A speculator that survives the loss of its draft rank: from that round on K = 0."""

from __future__ import annotations

from collections.abc import Callable

from mpissd.common.rounds import Outcome, Speculation
from mpissd.engine.comm.link import LeadEnd
from mpissd.engine.decode.speculator import RemoteSpeculator


class OutlivingSpeculator(RemoteSpeculator):
    """The speculator of --on_draft_loss=ar: one draft rank, which may be lost.

    The distributions of a sampled round are lost with it, if they had not arrived: a wait for them
    then ends the job.
    """

    def __init__(self, link: LeadEnd, is_lost: Callable[[], bool]) -> None:
        """Takes is_lost, which returns whether the draft rank is known to be gone."""
        super().__init__(link)
        self._link, self._is_lost = link, is_lost

    def ask(self, outcome: Outcome) -> None:
        if self.lost_round is None and not self._is_lost():
            super().ask(outcome)
        else:
            self._answers = True  # `answer` notes the loss, also in a round without drafting

    def answer(self, round_: int, count: int) -> Speculation:
        link = self._link
        if self.lost_round is None and not self._answers:
            return self._nothing(round_, count)
        if self.lost_round is None:
            link.waiter.until(lambda: link.arrived() or self._is_lost(), "draft: speculation")
            if link.arrived():
                return super().answer(round_, count)
            self.lost_round = round_
        return Speculation.empty(round_, count, link.lookahead, sampled=link.sampled)

    def stop(self, outcome: Outcome) -> None:
        if self.lost_round is None and not self._is_lost():
            super().stop(outcome)
