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

    def live(self, number: int, live: Mask) -> Mask:
        """Returns which sequences round `number` decodes, of those that have not ended."""
        return live


class RecordedDraws(Draws):
    """The outcomes that a run had, round by round, whatever decided them.

    A round's sequences are told apart by their place in it alone; no time depends on more.
    """

    def __init__(self, job: Job, sequences: NDArray[np.int64], *, apart: bool = False) -> None:
        """Takes the rows of RoundRecords.sequences, [n, 8].

        apart: each sequence of a run with b = 1 becomes a chain of its own, in the order of their
        ids, so that all of them are followed at once.
        """
        batch = job.config.batch_size
        assert not apart or batch == 1, batch
        rounds, chain, place = _apart(sequences) if apart else _together(sequences)
        self.chains, self.num_rounds = int(chain.max()) + 1, int(rounds.max()) + 1
        shape = self.num_rounds + 1, self.chains, batch  # and a round behind the last one, empty
        at = rounds, chain, place
        self._live: Mask = np.zeros(shape, np.bool_)
        self._hit: Mask = np.zeros(shape, np.bool_)
        self._accepted, self._bonus = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._live[at] = True
        self._accepted[at], self._bonus[at] = sequences[:, 3], sequences[:, 4]
        self._hit[at] = sequences[:, 6] > 0
        self._number, self._ahead = 0, np.arange(job.lookahead)

    def coins(self, length: Ints) -> Floats:
        rejected = self._ahead >= self._accepted[self._number][..., None]
        return np.where(rejected, np.inf, -np.inf)

    def hits(self, length: Ints, accepted: Ints, limit: Ints, end: Mask) -> Mask:
        """Returns whether the next round's lookups hit; a new sequence's first one never does."""
        return np.asarray(self._hit[self._number + 1])

    def bonus(self, length: Ints, accepted: Ints) -> Ints:
        return np.asarray(self._bonus[self._number])

    def live(self, number: int, live: Mask) -> Mask:
        self._number = number
        return np.asarray(self._live[number])


def _together(sequences: NDArray[np.int64]) -> tuple[Ints, Ints, Ints]:
    """Returns (round, chain 0, place in the round) of each row."""
    rounds = sequences[:, 0]
    place = np.arange(len(rounds)) - np.searchsorted(rounds, rounds)
    return rounds, np.zeros_like(rounds), place


def _apart(sequences: NDArray[np.int64]) -> tuple[Ints, Ints, Ints]:
    """Returns (round since the sequence began, its chain, place 0) of each row."""
    first, chain = np.unique(sequences[:, 1], return_index=True, return_inverse=True)[1:]
    chain = chain.reshape(-1)
    return sequences[:, 0] - sequences[first[chain], 0], chain, np.zeros_like(chain)


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
