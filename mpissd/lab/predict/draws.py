"""What decides the accepted tokens and hits of simulated rounds: models, a run's seed, or records.

Shapes: [G, R, b] for G configurations, R chains of rounds and their b sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Source
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import Floats
from mpissd.lab.predict.grid import Grid, Ints, Mask

_LAW_SEQUENCE = 1 << 29  # sequence id of LawDraws' streams; no request of a run has such a large id


class Draws(ABC):
    """The source of rounds' accepted tokens and hits."""

    chains: int

    @abstractmethod
    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        """Returns k, how many of num_draft tokens each sequence's round accepts, [G, R, b].

        hit: whether a branch of the cache drafted them, or a backup.
        """

    @abstractmethod
    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        """Returns whether the outcomes of this round are keys of the cache, [G, R, b].

        end: whether all served tokens were accepted.
        """

    def bonus(self, accepted: Ints) -> Ints:
        """Returns the bonus tokens t*, [G, R, b]; 0 if unknown."""
        return np.zeros_like(accepted)

    def live(self, number: int, live: Mask) -> Mask:
        """Returns which sequences round `number` decodes, of those that have not ended."""
        return live


class NoHits(Draws):
    """Rounds whose durations do not depend on what is accepted."""

    chains = 1

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        return np.zeros_like(num_draft)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        return np.zeros_like(hit)


class LawDraws(Draws):
    """Fresh draws from the imposed models; all configurations read the same uniforms.

    The draws of a sequence are spread evenly over the chains of a round (one in each R-th of [0,
    1)), so that means come out with less noise than from independent draws.
    """

    def __init__(self, grid: Grid, chains: int, seed: int = 0) -> None:
        self.chains, self._batch, self._seed, self._number = chains, grid.batch_size, seed, 0
        self._fast = grid.fast[:, None, None]
        self._reached, self._kind = _distinct(grid.hazards)
        self._reached_fast, self._kind_fast = _distinct(grid.hazards_fast)
        self._p_hit, self._width = grid.p_hit.ravel(), grid.p_hit.shape[-1]
        self._first = np.arange(len(grid))[:, None, None] * 4 * self._width

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        uniform = self._spread()[None, :, :, None]
        free = (uniform < self._reached).sum(axis=3)[self._kind]
        if self._fast.any():
            other = (uniform < self._reached_fast).sum(axis=3)[self._kind_fast]
            free = np.where(hit | ~self._fast, free, other)
        return np.asarray(np.minimum(free, num_draft), np.int64)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        at = self._first + (2 * hit + end) * self._width + accepted
        return np.asarray(self._spread() < self._p_hit[at])

    def _spread(self) -> Floats:
        """Returns the next uniforms, [R, b]."""
        self._number += 1
        return _spread(self.chains, self._batch, self._seed, self._number)


def _distinct(hazards: Floats) -> tuple[Floats, Ints]:
    """Returns P(k >= i) of the distinct rows, [n, 1, 1, K], and which of them each row is, [G]."""
    rows, kind = np.unique(hazards, axis=0, return_inverse=True)
    reached = np.cumprod(rows, axis=1, dtype=np.float64)
    return reached[:, None, None, :], np.asarray(kind.reshape(-1), np.int64)


@lru_cache(maxsize=512)
def _spread(chains: int, batch: int, seed: int, number: int) -> Floats:
    """Returns the n-th uniforms of a seed, [R, b], each column one in every R-th of [0, 1)."""
    random = np.random.Generator(np.random.Philox(key=[seed, _LAW_SEQUENCE + number]))
    order = random.permuted(np.tile(np.arange(chains)[:, None], batch), axis=0)
    return np.asarray((order + random.random((chains, batch))) / chains)


class Outcomes:
    """The accepted tokens and hits of one sequence under a job's imposed models, by position.

    They are those of a run with the same seed and sequence id; after num_positions they repeat.
    counts [2, n]: tokens that a round accepts from a position on, if a (backup, cached branch)
    drafted K. ranks [2, n]: of a bonus token among the draft's candidates, after (a rejection, all
    served tokens were accepted).
    """

    def __init__(self, job: Job, sequence: int, num_positions: int, seed: int) -> None:
        lookahead, law = job.lookahead, job.hit_law
        self.counts = np.zeros((2, num_positions), np.int64)
        coins = np.array(uniforms(seed, Purpose.ACCEPT, sequence, 0, num_positions + lookahead))
        for source in (Source.NONE, Source.CACHE) if lookahead else ():
            drafter = source or Source[job.config.backup.upper()]
            hazards = np.array(job.acceptance[drafter].hazards)
            ahead = np.lib.stride_tricks.sliding_window_view(coins, lookahead)[:num_positions]
            kept = np.logical_and.accumulate(ahead < hazards, axis=1)
            self.counts[int(source == Source.CACHE)] = kept.sum(axis=1)
        uniform = np.array(uniforms(seed, Purpose.RANK, sequence, 0, num_positions))
        self.ranks = np.array([law.ranks(uniform, end) for end in (False, True)], np.int64)
        self._num_positions = num_positions
        self._counts, self._ranks = self.counts.tolist(), self.ranks.tolist()

    def accepted(self, position: int, drafted: int, hit: bool) -> int:
        """Returns how many of `drafted` tokens are accepted, by whether a cached branch drafted
        them."""
        return int(min(self._counts[hit][position % self._num_positions], drafted))

    def hits(self, position: int, k: int, kept: int, end: bool) -> bool:
        """Returns whether the bonus token after k accepted ones is among `kept` candidates.

        end: whether all served tokens were accepted.
        """
        return bool(self._ranks[end][(position + k) % self._num_positions] <= kept)


class ReplayDraws(Draws):
    """The draws of one run (one configuration, one chain): its seed, sequences and positions."""

    chains = 1

    def __init__(self, job: Job, num_rounds: int, seed: int | None = None) -> None:
        seed, batch = job.config.seed if seed is None else seed, job.config.batch_size
        # A sequence starts with length 1 and grows by at most K+1 a round.
        count = 2 + (num_rounds + 1) * (job.lookahead + 1)
        every = [Outcomes(job, sequence, count, seed) for sequence in range(batch)]
        self._counts = np.array([one.counts for one in every])  # [b, 2, n]
        self._ranks = np.array([one.ranks for one in every])
        tokens = np.array([uniforms(seed, Purpose.TOKEN, s, 0, count) for s in range(batch)])
        self._true = (tokens * job.target.vocab_size).astype(np.int64)
        nothing = (0,) * (job.lookahead + 1)
        self._lists = np.array([job.fan_out_miss or nothing, job.fan_out or nothing])
        self._rows, self._length = np.arange(batch), np.ones((1, 1, batch), np.int64)

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        """Returns the leading i <= k' with U(accept) < a_i, by their drafter's acceptance rates."""
        free = self._counts[self._rows, hit.astype(np.int64), self._length]
        return np.asarray(np.minimum(free, num_draft), np.int64)

    def bonus(self, accepted: Ints) -> Ints:
        return np.asarray(self._true[self._rows, self._length + accepted])

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        at = self._length + accepted
        kept = self._lists[hit.astype(np.int64), accepted]
        self._length = at + 1
        return np.asarray(self._ranks[self._rows, end.astype(np.int64), at] <= kept)


class RecordedDraws(Draws):
    """A run's recorded outcomes, round by round: the rows of RoundRecords.sequences, [n, 8].

    A round's sequences are identified only by their place in it; times depend on no more.
    """

    chains = 1

    def __init__(self, job: Job, sequences: NDArray[np.int64]) -> None:
        rounds = sequences[:, 0]
        place = np.arange(len(rounds)) - np.searchsorted(rounds, rounds)
        self.num_rounds, self._number = int(rounds.max()) + 1, 0
        shape = self.num_rounds + 1, 1, 1, job.config.batch_size  # and an empty round at the end
        self._live, self._hit = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        self._accepted, self._bonus = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        at = rounds, 0, 0, place
        self._live[at] = True
        self._accepted[at], self._bonus[at] = sequences[:, 3], sequences[:, 4]
        self._hit[at] = sequences[:, 6] > 0

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        return np.asarray(np.minimum(self._accepted[self._number], num_draft), np.int64)

    def bonus(self, accepted: Ints) -> Ints:
        return np.asarray(self._bonus[self._number])

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        """Returns whether the next round's lookups hit; a new sequence's first one never does."""
        return np.asarray(self._hit[self._number + 1])

    def live(self, number: int, live: Mask) -> Mask:
        self._number = number
        return np.asarray(self._live[number])
