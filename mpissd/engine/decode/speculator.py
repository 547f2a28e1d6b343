"""Sources of a round's draft tokens: none (AR), this rank (inline SD), or a draft rank.

SD and SSD on a draft rank use the same speculator; only the draft knows whether its answer was
pre-speculated. A speculator is asked with the outcome of the last round, and then answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Outcome, Speculation
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.engine.comm.link import LeadEnd
from mpissd.engine.decode.draft import Drafter

_DRAFT_WAIT, _VERIFY = int(Doing.DRAFT_WAIT), int(Doing.VERIFY)


class Speculator(ABC):
    """The source of draft tokens: asked once a round, it answers once a round."""

    # The first round after the draft was lost, with K = 0 from there on; None while it is present.
    lost_round: int | None = None
    # Of the last answer: committed tokens that a draft on the lead's own device stored (opened
    # prompts included), and the seconds that this took.
    stored, stored_s = 0, 0.0

    @property
    def lacking(self) -> int:
        """The tokens of live sequences that a draft on the lead's own device has not stored."""
        return 0

    @abstractmethod
    def ask(self, outcome: Outcome) -> None:
        """Hands over outcome r-1 and asks for speculation r; does not wait."""

    @abstractmethod
    def answer(self, round_: int, count: int) -> Speculation:
        """Returns the speculation of round `round_` for the `count` live sequences."""

    def proposal(self, row: int, index: int) -> NDArray[np.float32]:
        """Returns the distribution [V] that a token of the last answer was drawn from.

        The token is the `index`-th of batch row `row` that was not certain. May wait for its
        arrival.
        """
        raise AssertionError("nothing was sampled here")

    def confirm(self, speculation: Speculation) -> bool:
        """Returns whether the last answer may be judged: not if the distributions that it needs are
        lost. Called once it was verified, before it is judged; may wait."""
        return True

    @abstractmethod
    def stop(self, outcome: Outcome) -> None:
        """Sends the draft the last outcome."""


class NoSpeculator(Speculator):
    """The speculator of AR: every round has K = 0."""

    def __init__(self, lookahead: int = 0, *, sampled: bool = False) -> None:
        """Takes the shape of an empty speculation, as in jobs with drafts."""
        self._lookahead, self._sampled = lookahead, sampled

    def ask(self, outcome: Outcome) -> None:
        return None

    def answer(self, round_: int, count: int) -> Speculation:
        return Speculation.empty(round_, count, self._lookahead, sampled=self._sampled)

    def stop(self, outcome: Outcome) -> None:
        return None


class InlineSpeculator(Speculator):
    """The speculator of SD on the lead's own device: it drafts before the target verifies, in one
    stream."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._outcome: Outcome | None = None
        self._proposals: dict[int, list[NDArray[np.float32]]] = {}

    @property
    def lacking(self) -> int:
        return self._drafter.lacking

    def ask(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def answer(self, round_: int, count: int) -> Speculation:
        assert self._outcome is not None, "answer() before ask()"
        self._drafter.ledger.restart()  # Time the lead spent elsewhere is not draft time.
        speculation = self._drafter.answer(self._outcome)
        self.stored, self.stored_s = self._drafter.caught_up
        self._proposals = self._drafter.proposals_by_row()
        self._drafter.hear(speculation)
        if self._drafter.is_storing and self._outcome.control.catch_up is None:
            start = perf_counter()
            self.stored += self._drafter.finish(self._drafter.store_opened())
            self.stored_s += perf_counter() - start
        self._drafter.close_round(speculation)
        return speculation

    def proposal(self, row: int, index: int) -> NDArray[np.float32]:
        return self._proposals[row][index]

    def stop(self, outcome: Outcome) -> None:
        self._drafter.leave()


class RemoteSpeculator(Speculator):
    """The speculator of SD and SSD with a draft rank at the other end of a link."""

    def __init__(self, link: LeadEnd) -> None:
        self._link, self._page = link, OWN.bytes
        self._answers = True  # whether the draft answers the round that was asked for
        self._served: Speculation | None = None
        self._waiting = 0  # PROPOSALS rows of the last answer that are still to be received
        self._rows: NDArray[np.float32] | None = None  # those that were received, [rows, V]

    def ask(self, outcome: Outcome) -> None:
        self._answers = outcome.control.lookahead != 0
        self._link.send_outcome(outcome)

    def answer(self, round_: int, count: int) -> Speculation:
        if not self._answers:
            self._drop_proposals()
            link = self._link
            return Speculation.empty(round_, count, link.lookahead, sampled=link.sampled)
        self._page[DOING] = _DRAFT_WAIT
        self._drop_proposals()
        served = self._served = self._link.speculation(round_, count)
        if served.sampled:
            self._waiting = int(served.num_proposals.sum())
        self._page[DOING] = _VERIFY
        return served

    def proposal(self, row: int, index: int) -> NDArray[np.float32]:
        served = self._served
        assert served is not None, "a proposal before a speculation"
        if self._rows is None:
            self._rows = self._link.proposals(served.round, self._waiting)
            self._waiting = 0
        proposal: NDArray[np.float32] = self._rows[int(served.num_proposals[:row].sum()) + index]
        return proposal

    def _drop_proposals(self) -> None:
        if self._waiting:
            assert self._served is not None, "proposals before a speculation"
            self._link.skip_proposals(self._served.round, self._waiting)
        self._waiting, self._rows = 0, None

    def stop(self, outcome: Outcome) -> None:
        self._drop_proposals()
        self._link.send_outcome(outcome, stop=True)
