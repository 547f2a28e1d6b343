"""The sources of a round's draft tokens: none (AR), this rank (inline SD), or a draft rank.

SD and SSD on a draft rank use the same speculator; only the draft knows whether its answer was
drafted ahead. A speculator is asked with the outcome of the last round, and then answers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Outcome, Speculation
from mpissd.engine.comm.link import LeadEnd
from mpissd.engine.round.draft import Drafter


class Speculator:
    """The source of a round's draft tokens, asked once a round. This class drafts nothing (AR).

    lost_round: the first round without draft tokens after the draft rank was lost; None while the
    draft is present. stored_s: the seconds of the last answer in which a draft on the lead's device
    stored committed tokens that its KV cache lacked.
    """

    lost_round: int | None = None
    stored_s = 0.0

    def __init__(self, lookahead: int = 0, *, sampled: bool = False) -> None:
        """lookahead, sampled: the columns that empty speculations have (Speculation.empty)."""
        self._lookahead, self._sampled = lookahead, sampled

    def ask(self, outcome: Outcome) -> None:
        """Asks for the speculation of the round after `outcome`, without waiting for it."""

    def answer(self, round_: int, count: int) -> Speculation:
        """Returns the speculation of round `round_` for the `count` live sequences."""
        return Speculation.empty(round_, count, self._lookahead, sampled=self._sampled)

    def proposal(self, row: int, index: int) -> NDArray[np.float32]:
        """Returns the distribution [V] from which a token of the last answer was drawn: number
        `index` of the tokens with q < 1 of batch row `row`. May wait for its arrival."""
        raise AssertionError("nothing was sampled here")

    def meanwhile(self) -> None:
        """Called while the target verifies the last answer. The default does nothing."""

    def confirm(self, speculation: Speculation) -> bool:
        """Returns whether the distributions of the last answer's tokens exist, so that the target
        may judge the tokens. Called after the target's forward; may wait."""
        return True

    def stop(self, outcome: Outcome) -> None:
        """Ends the draft's loop. outcome: the outcome of the last round."""


class InlineSpeculator(Speculator):
    """The speculator of SD whose draft runs on the lead's device, before the target verifies.

    A round without drafting costs no time: the draft applies the outcome while the target verifies,
    and stores the tokens that its KV cache lacks only before it drafts again.
    """

    def __init__(self, drafter: Drafter) -> None:
        policy = drafter.policy
        super().__init__(drafter.batch.shape.ends[policy.lookahead], sampled=policy.sampled)
        self._drafter = drafter
        self._outcome: Outcome
        self._answer: Speculation
        self._applies_later = False  # whether the draft has not taken the outcome yet

    def ask(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def answer(self, round_: int, count: int) -> Speculation:
        self.stored_s = 0.0
        self._applies_later = self._outcome.control.lookahead == 0
        return super().answer(round_, count) if self._applies_later else self._drafted()

    def meanwhile(self) -> None:
        if self._applies_later:
            self._drafted()

    def _drafted(self) -> Speculation:
        drafter = self._drafter
        drafter.log.ledger.restart()  # time that the lead spent elsewhere is not draft time
        self._answer = drafter.answer(self._outcome)
        self.stored_s = drafter.log.stored_s
        drafter.start_round(self._answer)
        drafter.close_round(self._answer)
        return self._answer

    def proposal(self, row: int, index: int) -> NDArray[np.float32]:
        drawn_from: NDArray[np.float32] = self._answer.drawn_from[row][index]
        return drawn_from

    def stop(self, outcome: Outcome) -> None:
        self._drafter.leave()


class RemoteSpeculator(Speculator):
    """The speculator of SD and SSD with a draft rank at the other end of a link."""

    def __init__(self, link: LeadEnd) -> None:
        super().__init__(link.lookahead, sampled=link.sampled)
        self._link = link
        self._answers = True  # whether the draft answers the round that was asked for
        self._served: Speculation
        self._waiting = 0  # PROPOSALS rows of the last answer that are still to be received
        self._rows: NDArray[np.float32] | None = None  # the PROPOSALS received, [rows, V]

    def ask(self, outcome: Outcome) -> None:
        self._answers = outcome.control.lookahead != 0
        self._link.send_outcome(outcome)

    def answer(self, round_: int, count: int) -> Speculation:
        self._drop_proposals()
        if not self._answers:
            return super().answer(round_, count)
        self._served = self._link.speculation(round_, count)
        if self._served.sampled:
            self._waiting = int(self._served.num_proposals.sum())
        return self._served

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
        self._forget_proposals()

    def _forget_proposals(self) -> None:
        self._waiting = 0
        self._rows = None

    def stop(self, outcome: Outcome) -> None:
        self._drop_proposals()
        self._link.send_outcome(outcome, stop=True)
