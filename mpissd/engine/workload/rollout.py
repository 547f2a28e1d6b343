"""Tokens that a draft grows: lanes, the outcomes that they are grown for, and their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.workload.placement import LanePlaces


class Rollout:
    """Token sequences (lanes) that a draft grows together, one token a lane in each step.

    tokens: int32 [lanes, K]; the first `steps` columns are grown. rows: the batch row of each lane;
    empty while a sequence has several lanes and the outcome has not yet chosen one. places: the
    lanes' places in the KV cache of a model that keeps one. q: float64 [lanes, K], the probability
    with which each token was drawn; None if all are certain.
    """

    q: NDArray[np.float64] | None = None
    places: LanePlaces | None = None

    def __init__(self, rows: NDArray[np.int64], first: Ints, tokens: Ints) -> None:
        self.rows = rows
        self.first = first  # [lanes], the token from which each lane starts
        self.tokens = tokens
        self.steps = 0

    def __len__(self) -> int:
        return len(self.first)

    @property
    def inputs(self) -> Ints:
        """The token of each lane that the next step reads, int32 [lanes]."""
        return self.tokens[:, self.steps - 1] if self.steps else self.first

    def keep(self, lanes: Sequence[int], rows: Sequence[int]) -> None:
        """Keeps only `lanes`, chosen for batch rows `rows`, and drops all other lanes."""
        chosen = np.array(lanes, np.int64)
        self.rows = np.array(rows, np.int64)
        self.first, self.tokens = self.first.take(chosen), self.tokens.take(chosen, axis=0)
        if self.places is not None:
            self.places = self.places.keep(chosen)

    def fill(self, count: int) -> None:
        """Gives every lane `count` tokens, without a forward: those that it lacks repeat its first
        one, and are certain."""
        if self.steps < count:
            self.tokens[:, self.steps : count] = self.first[:, None]
            self.steps = count

    def proposals(self, lane: int, steps: int) -> list[NDArray[np.float32]]:
        """Returns the distributions [V] of the lane's first `steps` tokens that were drawn with
        q < 1."""
        return []


@dataclass(frozen=True)
class Lanes:
    """The outcome for which each lane is grown; all arrays are [lanes].

    rows: the lane's batch row. k: the number of accepted tokens in its outcome. place: the rank of
    its bonus candidate among the candidates of that k, from 0.
    """

    rows: NDArray[np.int64]
    k: Ints
    place: Ints

    @cached_property
    def lists(self) -> tuple[list[int], list[int]]:
        """Pair (rows, k) as lists, cached because the same lanes serve many rounds."""
        return self.rows.tolist(), self.k.tolist()


class Branches(NamedTuple):
    """One lane for each bonus candidate, and the rollout that grows these lanes."""

    lanes: Lanes
    rollout: Rollout
