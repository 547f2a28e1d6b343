"""The sources from which the target's rank 0 gets drafted tokens: none (AR), a draft on rank 0
itself (inline SD), or a draft rank (SD, SSD).

A round passes its speculator the outcome of the last round (the number of accepted tokens and the
bonus token of each sequence), and then receives the answer: the drafted tokens.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Outcome, ReadyBranches, Speculation
from mpissd.engine.comm.link import Find, LeadEnd
from mpissd.engine.round.draft import Drafter


class Speculator:
    """The source of the drafted tokens, asked once a round. This base class drafts nothing (AR).

    lost_round: the first round without drafted tokens after the draft rank was lost, or None.
    stored_s: for a draft on the target's own device, the seconds of the last answer in which it
    stored committed tokens that its KV cache lacked.
    """

    lost_round: int | None = None
    stored_s = 0.0

    def __init__(self, lookahead: int = 0, *, sampled: bool = False) -> None:
        """Sets the columns of answers without tokens. lookahead: the most drafted tokens of a
        sequence. sampled: whether there are columns for the probabilities q of drafted tokens."""
        self._lookahead, self._sampled = lookahead, sampled

    def ask(self, outcome: Outcome) -> None:
        """Asks for the drafted tokens of the round after `outcome`, without waiting for them."""

    def answer(self, round_: int, count: int) -> Speculation:
        """Returns the drafted tokens of round `round_` for the `count` live sequences."""
        return Speculation.empty(round_, count, self._lookahead, sampled=self._sampled)

    def proposal(self, row: int, index: int) -> NDArray[np.float32]:
        """Returns the distribution [V] from which a drafted token was drawn: number `index` among
        the tokens with q < 1 of batch row `row`. May wait until the draft has sent it."""
        raise AssertionError("nothing was sampled here")

    def meanwhile(self) -> None:
        """Called while the target verifies, to do other work. The default does nothing."""

    @property
    def collect(self) -> Callable[[], None] | None:
        """A function that receives a draft's messages without waiting, called between two polls of
        the target's forward; None if there are no messages."""
        return None

    def confirm(self, speculation: Speculation) -> bool:
        """Returns whether the distributions of the drafted tokens are available, so that the target
        can judge the tokens of `speculation`. Called after the target's forward; may wait."""
        return True

    def stop(self, outcome: Outcome) -> None:
        """Tells the draft to end its loop. outcome: the outcome of the last round."""

    def end(self) -> None:
        """Receives the draft's messages after `stop`. The default does nothing."""


class InlineSpeculator(Speculator):
    """The speculator of inline SD: the draft runs on the target's rank 0, before the verification.

    In a round without drafted tokens (K = 0) the draft delays nothing: it applies the last outcome
    while the target verifies, and stores tokens that its KV cache lacks when it drafts again.
    """

    def __init__(self, drafter: Drafter) -> None:
        policy = drafter.policy
        super().__init__(drafter.batch.shape.ends[policy.lookahead], sampled=policy.sampled)
        self._drafter = drafter
        self._outcome: Outcome
        self._answer: Speculation
        self._applies_later = False  # whether the draft applies the outcome during verification

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
        drafter.log.ledger.restart()  # the target's work is no draft time
        self._answer = drafter.answer(self._outcome)
        self.stored_s = drafter.log.stored_s
        drafter.start_round(self._answer)
        drafter.log.close_round(self._answer.round)
        return self._answer

    def proposal(self, row: int, index: int) -> NDArray[np.float32]:
        drawn_from: NDArray[np.float32] = self._answer.drawn_from[row][index]
        return drawn_from

    def stop(self, outcome: Outcome) -> None:
        self._drafter.leave()


class RemoteSpeculator(Speculator):
    """The speculator of SD and SSD whose draft runs on a rank of its own, reached by a link.

    In SSD the draft also sends its whole branches ahead, so that after a hit the next verification
    need not wait for an answer."""

    def __init__(self, link: LeadEnd) -> None:
        super().__init__(link.lookahead, sampled=link.sampled)
        self._link = link
        self._answers = True  # False in a round with K = 0, which the draft does not answer
        self._taken: Speculation | None = None  # drafted tokens of branches that came ahead
        self._find: Find  # returns the tokens that branches serve after the last outcome, or None
        self._served: Speculation
        self._waiting = 0  # how many distributions of the last answer's tokens are still to come
        self._rows: NDArray[np.float32] | None = None  # the distributions received, [n, V]

    @property
    def collect(self) -> Callable[[], None] | None:
        return self._link.collect if self._link.shape.branches else None

    def ask(self, outcome: Outcome) -> None:
        self._answers = outcome.control.lookahead != 0
        self._find = partial(ReadyBranches.served, outcome=outcome, sampled=self._sampled)
        ready = self._link.branches(outcome.round)
        self._taken = None if ready is None else self._find(ready)
        taken = None if self._taken is None else self._taken.version
        self._link.send_outcome(outcome, taken=taken)

    def answer(self, round_: int, count: int) -> Speculation:
        self._drop_proposals()
        if not self._answers:
            return super().answer(round_, count)
        self._served = self._taken or self._link.speculation(round_, count, self._find)
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

    def end(self) -> None:
        self._link.end()
