"""Cost of the tokens that a draft on the lead's own device stores before it drafts.

Such a draft stores nothing while K = 0. Storing the lacking tokens later takes seconds in which it
does not draft. They are spread over the tokens that the sequence emits.
"""

from __future__ import annotations

import math

import numpy as np

from mpissd.engine.decode.row_times import RowTimes

_MEMORY = 1 / 256  # forgotten of earlier requests with each that ends


class StoredPrice:
    """The price of stored tokens, and how long drafting waits for them."""

    def __init__(self, times: RowTimes) -> None:
        """Takes the target's times, which have the draft's as well."""
        self._times = times
        # Of the requests that are over: tokens of prompts, of answers, and the squares of these.
        self._ended = np.zeros(3)

    def ended(self, prompt: int, answer: int) -> None:
        """Takes the tokens of a request that is over; one without an answer stored nothing."""
        if answer:
            self._ended = (1 - _MEMORY) * self._ended + [prompt, answer, answer**2]

    def seconds(self, count: int, lacking: int) -> float:
        """Returns the seconds of storing per emitted token.

        The larger of two ratios counts: the `lacking` tokens of `count` sequences over the tokens
        that these are expected to emit yet, and the prompts of future requests over their answers.
        """
        prompts, answers, _ = self._ended.tolist()
        each = max(prompts / answers, lacking / count / self._left) if answers else 0.0
        return each * self._times.caught_up_s

    def ready(self, count: int, lacking: int) -> float:
        """Returns the share of the time to come in which the draft has a whole sequence stored.

        It catches up with one sequence after the other: a mean one waits for half of the lacking
        tokens, a single one does not wait.
        """
        if not lacking or count == 1:
            return 1.0
        rounds = lacking / 2 / self._times.caught_up_a_round(2 * count)
        return 1 / (1 + rounds / self._left)

    @property
    def _left(self) -> float:
        """Tokens that a live sequence is expected to emit yet: one that is met at any time is
        likelier a long one."""
        _, answers, squares = self._ended.tolist()
        return squares / (2 * answers) if answers else math.inf
