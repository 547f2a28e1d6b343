"""Tokens that a draft grows: lanes, the outcomes that they are grown for, and their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.spec.lookup import Lookup
from mpissd.engine.workload.placement import LanePlaces


class Guesses:
    """How far each lane of a rollout has grown whose draft verifies looked-up tokens.

    A step reads a lane's last token and those that a lookup guesses behind it; the lane grows by
    the guesses that are the draft's own tokens, and by the draft's token behind them [Spector and
    Re 2023, arXiv 2308.04623]. wanted: tokens of each lane in the end. grown: int64 [lanes].
    chains: the tokens that each lane's step reads, none where it is complete. offered, accepted:
    guesses so far.
    """

    def __init__(self, lookups: Sequence[Lookup], wanted: int) -> None:
        """Takes the index of each lane's committed tokens."""
        self._lookups, self.wanted = lookups, wanted
        self.grown = np.zeros(len(lookups), np.int64)
        self.chains: list[list[int]] = []
        self.offered = self.accepted = 0

    @property
    def num_rows(self) -> int:
        """Tokens of all chains."""
        return sum(map(len, self.chains))

    def look_up(self, first: Ints, tokens: Ints) -> None:
        """Makes the next step's chains, behind the lanes' `first` tokens and those grown [lanes,
        K]."""
        self.chains = []
        for lane, lookup in enumerate(self._lookups):
            count = int(self.grown[lane])
            drafted = tokens[lane, :count].tolist()
            last = drafted[-1] if drafted else int(first[lane])
            room = self.wanted - count
            found = lookup.guessed(drafted, room - 1) if room > 1 else []
            self.chains.append([last, *found] if room > 0 else [])
            self.offered += len(found)

    def take(self, lane: int, count: int) -> None:
        """Grows a lane by the `count` tokens that its step gave."""
        self.grown[lane] += count
        self.accepted += max(0, count - 1)


class Rollout:
    """Token sequences (lanes) that a draft grows together, one token a lane in each step, or more
    where tokens are guessed.

    tokens: int32 [lanes, K]; the first `steps` columns are grown. rows: the batch row of each lane;
    empty while a sequence has several lanes and the outcome has not yet chosen one.
    places: where the lanes grow in the KV cache of a model that keeps one.
    q: float64 [lanes, K], the probability with which each token was drawn; None where all are
    certain.
    """

    q: NDArray[np.float64] | None = None
    places: LanePlaces | None = None
    guesses: Guesses | None = None  # of lanes in the cache, whose draft verifies looked-up tokens

    def __init__(self, rows: NDArray[np.int64], first: Ints, tokens: Ints) -> None:
        self.rows = rows
        self.first = first  # [lanes], the token from which each lane starts
        self.tokens = tokens
        self.steps = 0

    def __len__(self) -> int:
        return len(self.first)

    @property
    def num_rows(self) -> int:
        """Rows of the next step, or of the one that has just ended."""
        return len(self) if self.guesses is None else self.guesses.num_rows

    @property
    def inputs(self) -> Ints:
        """Tokens that the next step reads, int32 [rows]: one of each lane, or a chain."""
        if self.guesses is not None:
            return np.array([token for chain in self.guesses.chains for token in chain], np.int32)
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
