"""Puts the tokens of rollouts into the speculation that answers an outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Source, Speculation
from mpissd.engine.workload.rollout import Rollout


class Part(NamedTuple):
    """Tokens for some rows of the batch. source: their origin; CACHE for rows that hit."""

    rollout: Rollout
    source: Source


class Answer:
    """Builds the draft's answers; keeps the distributions that the last answer was drawn from."""

    def __init__(self, lookahead: int, *, sampled: bool) -> None:
        """Takes K of the job, and whether tokens are sampled."""
        self._lookahead, self._sampled = lookahead, sampled
        # Of the last answer: the distributions [V] of its uncertain tokens, by batch row.
        self.rows: dict[int, list[NDArray[np.float32]]] = {}

    def assemble(
        self, round_: int, count: int, parts: Sequence[Part], most: int, version: int
    ) -> Speculation:
        """Returns the speculation of a round for `count` sequences; rows in no part have source
        NONE.

        most: tokens of a row, at most. version: of the weights that drafted.
        """
        head, sampled = Speculation.HEAD, self._sampled
        speculation = Speculation.empty(round_, count, self._lookahead, sampled=sampled)
        speculation.version = version
        if sampled:
            self.rows = {}
        for rollout, source in parts:
            steps = min(rollout.steps, most)
            # A slice if the rollout covers all rows in order.
            rows = slice(None) if len(rollout) == count else rollout.rows
            speculation.rows[rows, :head] = source, int(source == Source.CACHE), steps
            speculation.rows[rows, head : head + steps] = rollout.tokens[:, :steps]
            if sampled:
                speculation.q[rows, :steps] = 1.0 if rollout.q is None else rollout.q[:, :steps]
                for lane, row in enumerate(rollout.rows.tolist()):
                    self.rows[row] = rollout.proposals(lane, steps)
        return speculation

    def proposals(self) -> list[NDArray[np.float32]]:
        """Returns the distributions of the last answer, by sequence."""
        every = [row for _, rows in sorted(self.rows.items()) for row in rows]
        return [np.asarray(row) for row in every]  # some are kept on a device
