"""Random draws that decide a round's outcome: those of a run, or fresh ones from its laws.

Draws come for `chains` independent copies of a job's b sequences, [chains, b]. `length` is n, the
committed tokens of a sequence; x_i of a round is at position n + i − 1, with i from 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rng import Purpose, uniforms
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import Floats
from mpissd.lab.predict.timing import Ints

Mask = NDArray[np.bool_]

# The sequence id for the streams of `LawDraws`; no request of a run has such a large id.
_LAW_SEQUENCE = 1 << 29


class Draws(ABC):
    """The source of uniforms for acceptance and hits, round by round."""

    chains: int

    @abstractmethod
    def coins(self, length: Ints) -> Floats:
        """Returns the uniforms of x_1..x_K at these lengths, [chains, b, K]."""

    @abstractmethod
    def hits(self, length: Ints, accepted: Ints, limit: Ints, end: Mask) -> Mask:
        """Returns whether the true bonus is among the `limit` = F_k candidates kept, [chains, b].

        end: whether all served tokens were accepted.
        """

    @abstractmethod
    def bonus(self, length: Ints, accepted: Ints) -> Ints:
        """Returns the bonus tokens t*, [chains, b]."""


class ReplayDraws(Draws):
    """The draws of one run (one chain): the same seed, sequences and positions."""

    chains = 1

    def __init__(self, job: Job, num_rounds: int, seed: int | None = None) -> None:
        seed = job.config.seed if seed is None else seed
        lookahead, batch = job.lookahead, job.config.batch_size
        # A sequence starts with length 1 and grows by at most K+1 a round.
        count = 2 + (num_rounds + 1) * (lookahead + 1)

        def table(purpose: Purpose) -> Floats:
            return np.array([uniforms(seed, purpose, s, 0, count) for s in range(batch)])

        self._true = (table(Purpose.TOKEN) * job.target.vocab_size).astype(np.int64)
        self._coins = table(Purpose.ACCEPT)
        uniform, law = table(Purpose.RANK), job.hit_law
        self._ranks = np.array([law.ranks(uniform, end) for end in law.ends])
        self._ahead = np.arange(lookahead)
        self._rows = np.arange(batch)

    def coins(self, length: Ints) -> Floats:
        places = length[..., None] + self._ahead
        return np.asarray(self._coins[self._rows[:, None], places])

    def hits(self, length: Ints, accepted: Ints, limit: Ints, end: Mask) -> Mask:
        law = np.minimum(end, len(self._ranks) - 1)
        rank = self._ranks[law, self._rows, length + accepted]
        return np.asarray(rank <= limit)

    def bonus(self, length: Ints, accepted: Ints) -> Ints:
        return np.asarray(self._true[self._rows, length + accepted])


class LawDraws(Draws):
    """Fresh draws from the same laws, for many independent copies of the job.

    No round reads a coin that an earlier round has read, so coins need no position.
    """

    def __init__(self, job: Job, chains: int, seed: int = 0) -> None:
        self.chains = chains
        self._seed, self._lookahead = seed, job.lookahead
        self._p_hit = job.hit_law.hit_probabilities(job.fan_outs.widest)
        self._used = {Purpose.ACCEPT: 0, Purpose.RANK: 0}

    def coins(self, length: Ints) -> Floats:
        return self._next(Purpose.ACCEPT, (*length.shape, self._lookahead))

    def hits(self, length: Ints, accepted: Ints, limit: Ints, end: Mask) -> Mask:
        chance = self._p_hit[end.astype(np.int64), limit]
        return np.asarray(self._next(Purpose.RANK, length.shape) < chance)

    def bonus(self, length: Ints, accepted: Ints) -> Ints:
        return np.zeros_like(length)

    def _next(self, purpose: Purpose, shape: tuple[int, ...]) -> Floats:
        count = int(np.prod(shape))
        start = self._used[purpose]
        self._used[purpose] = start + count
        return uniforms(self._seed, purpose, _LAW_SEQUENCE, start, count).reshape(shape)
