"""Where a round's draft tokens come from: nowhere (AR), this rank (inline SD), a draft rank.

SD and SSD on a draft rank are the same speculator here; whether the answer was pre-speculated is
the draft's affair. A speculator is asked with the outcome of the last round and then answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from mpissd.comm.link import LeadEnd
from mpissd.decode.draft import Drafter
from mpissd.rounds import Outcome, Speculation


class Speculator(ABC):
    """Asked once a round, answers once a round."""

    @abstractmethod
    def ask(self, outcome: Outcome) -> None:
        """Hands over outcome r-1 and asks for speculation r; does not wait."""

    @abstractmethod
    def answer(self, round_: int, count: int) -> Speculation:
        """The speculation of round `round_` for the `count` live sequences."""

    @abstractmethod
    def stop(self, outcome: Outcome) -> None:
        """Tells whoever drafts that no further outcome will come."""


class NoSpeculator(Speculator):
    """AR: a round with K = 0."""

    def ask(self, outcome: Outcome) -> None:
        return None

    def answer(self, round_: int, count: int) -> Speculation:
        return Speculation.empty(round_, count, 0)

    def stop(self, outcome: Outcome) -> None:
        return None


class InlineSpeculator(Speculator):
    """SD with the draft on the lead's own device: draft, then verify, in one stream."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._outcome: Outcome | None = None

    def ask(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def answer(self, round_: int, count: int) -> Speculation:
        assert self._outcome is not None, "answer() before ask()"
        self._drafter.ledger.restart()  # the lead's own time is not the draft's
        speculation = self._drafter.answer(self._outcome)
        self._drafter.close_round(speculation)
        return speculation

    def stop(self, outcome: Outcome) -> None:
        return None


class RemoteSpeculator(Speculator):
    """SD and SSD with a draft rank behind a link."""

    def __init__(self, link: LeadEnd) -> None:
        self._link = link

    def ask(self, outcome: Outcome) -> None:
        self._link.send_outcome(outcome)

    def answer(self, round_: int, count: int) -> Speculation:
        return self._link.speculation(round_, count)

    def stop(self, outcome: Outcome) -> None:
        self._link.send_outcome(outcome, stop=True)
