"""Sources of a round's draft tokens: none (AR), this rank (inline SD), or draft ranks.

SD and SSD on a draft rank use the same speculator; only the draft knows whether its answer was
pre-speculated. A speculator is asked with the outcome of the last round, and then answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Outcome, Source, Speculation
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.engine.comm.link import LeadEnd
from mpissd.engine.decode.draft import Drafter

_DRAFT_WAIT, _VERIFY = int(Doing.DRAFT_WAIT), int(Doing.VERIFY)


class Speculator(ABC):
    """The source of draft tokens: asked once a round, it answers once a round."""

    # The first round after the draft was lost, with K = 0 from there on; None while it is present.
    lost_round: int | None = None
    # Of the last answer: committed tokens that a draft on the lead's own device stored, those of
    # opened prompts included, and the seconds of that.
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
        """Returns whether the last answer may be judged: not where what that needs is lost. Called
        once it was verified, before it is judged; may wait."""
        return True

    @abstractmethod
    def stop(self, outcome: Outcome) -> None:
        """Tells every draft that no further outcome will come."""


class NoSpeculator(Speculator):
    """The speculator of AR: every round has K = 0."""

    def __init__(self, lookahead: int = 0, *, sampled: bool = False) -> None:
        """Takes the form of a speculation where other ranks expect that of a job with drafts."""
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
    """The speculator of SD and SSD with D draft ranks behind links; each answers for its own
    sequences."""

    def __init__(self, *links: LeadEnd) -> None:
        self._links, self._page = links, OWN.bytes
        self._answers = True  # whether drafts answer the round that was asked for
        self._served: Speculation | None = None
        # [b], the link that answered each row
        self._link_of: NDArray[np.int64] = np.zeros(0, np.int64)
        self._waiting: dict[int, int] = {}  # By link: PROPOSALS rows still to be received.
        self._rows: dict[int, NDArray[np.float32]] = {}

    def ask(self, outcome: Outcome) -> None:
        self._answers = outcome.control.lookahead != 0
        for link in self._links:
            link.send_outcome(outcome)

    def answer(self, round_: int, count: int) -> Speculation:
        if not self._answers:
            return self._nothing(round_, count)
        self._page[DOING] = _DRAFT_WAIT
        self._drop_proposals()
        if len(self._links) == 1:
            served = self._links[0].speculation(round_, count)
            self._link_of = np.zeros(count, np.int64)
        else:
            served = self._merge(round_, count)
        self._served = served
        if served.sampled:
            by_row = served.num_proposals
            for n in range(len(self._links)):
                if num_rows := int(by_row[self._link_of == n].sum()):
                    self._waiting[n] = num_rows
        self._page[DOING] = _VERIFY
        return served

    def _nothing(self, round_: int, count: int) -> Speculation:
        """Returns the answer of a round without drafting, which no draft sends."""
        self._drop_proposals()
        first = self._links[0]
        return Speculation.empty(round_, count, first.lookahead, sampled=first.sampled)

    def _merge(self, round_: int, count: int) -> Speculation:
        """Waits until every row is answered, then sends TRUNK to each draft that did not answer all
        rows."""
        served: Speculation | None = None
        self._link_of = np.full(count, -1, np.int64)
        while (self._link_of < 0).any():
            self._links[0].waiter.until(
                lambda: any(link.arrived() for link in self._links), "drafts: speculation"
            )
            for n, link in enumerate(self._links):
                if link.arrived():
                    part = link.speculation(round_, count)
                    mine = part.source != Source.NONE
                    self._link_of[mine] = n
                    if served is None:
                        served = part
                    else:
                        served.rows[mine] = part.rows[mine]
        if served is None:  # No sequence is left.
            return Speculation.empty(round_, count, self._links[0].lookahead)
        for n, link in enumerate(self._links):
            if (self._link_of != n).any():
                link.send_trunk(served)
        return served

    def proposal(self, row: int, index: int) -> NDArray[np.float32]:
        assert self._served is not None, "a proposal before a speculation"
        n = int(self._link_of[row])
        if n in self._waiting:
            self._rows[n] = self._links[n].proposals(self._served.round, self._waiting.pop(n))
        before = self._served.num_proposals[:row][self._link_of[:row] == n].sum()
        proposal: NDArray[np.float32] = self._rows[n][int(before) + index]
        return proposal

    def _drop_proposals(self) -> None:
        for n, count in self._waiting.items():
            assert self._served is not None, "proposals before a speculation"
            self._links[n].skip_proposals(self._served.round, count)
        self._waiting, self._rows = {}, {}

    def stop(self, outcome: Outcome) -> None:
        self._drop_proposals()
        for link in self._links:
            link.send_outcome(outcome, stop=True)
