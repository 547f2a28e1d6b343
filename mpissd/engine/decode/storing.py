"""What a draft on the lead's own device pays for the tokens that it stores before it drafts.

Such a draft stores nothing while K = 0. What it then lacks takes seconds in which it does not
draft: these are spread over the tokens that they are for.
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
        """Returns the seconds in which the draft stores what it needs for drafting, for each token.

        What it lacks of `count` sequences now, over what they are expected to emit yet, or the
        prompts of requests to come, over their answers: the larger, as no token pays both.
        """
        prompts, answers, _ = self._ended.tolist()
        each = max(prompts / answers, lacking / count / self._left) if answers else 0.0
        return each * self._times.caught_up_s

    def ready(self, count: int, lacking: int) -> float:
        """Returns the share of the time to come in which the draft lacks nothing of a sequence.

        It catches up with one after the other: with half of what it lacks before a mean one; with
        one alone at once.
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
