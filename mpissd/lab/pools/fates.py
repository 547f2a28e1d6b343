"""Accepted tokens and hits of the rounds of a target in a pool.

They follow the imposed models of a run's workload (engine.spec): leading tokens are accepted by the
acceptance rates ("hazards") of their drafter, and an outcome hits if the bonus token is among the
F_k candidates. Coins come from `common.rng`, a stream for each sequence. `Drawn` reads one a round,
so that a simulation depends only on its seed. `Replayed` reads the coins that a run of this job
reads at the same positions, so that its rounds equal the run's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Source
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import Floats

_SEQUENCE = 1 << 28  # of the first target's draws; no request of a run has such a large id


@dataclass(frozen=True)
class Laws:
    """A job's acceptance and hit models as tables, by whether the drafted tokens came from the
    cache (1) or from a backup (0).

    hazards: [2][K], acceptance rates. p_hit: [2][2][K+1], P(hit) after k accepted tokens, by
    whether all served tokens were accepted.
    """

    hazards: tuple[tuple[float, ...], tuple[float, ...]]
    p_hit: tuple[tuple[tuple[float, ...], ...], ...]

    @classmethod
    def of(cls, job: Job) -> Laws:
        """Makes the tables of a job that drafts."""
        nothing, backup = (0,) * (job.lookahead + 1), Source[job.config.backup.upper()]
        chance = job.hit_law.hit_probabilities(job.fan_outs.widest)
        lists = job.fan_out_miss or nothing, job.fan_out or nothing
        p_hit = tuple(tuple(tuple(row[list(f)].tolist()) for row in chance) for f in lists)
        missed, cached = (tuple(job.acceptance[s].hazards) for s in (backup, Source.CACHE))
        return cls((missed, cached), p_hit)


class Fates(ABC):
    """The coming rounds of one target's b sequences, in their order."""

    def __init__(self, laws: Laws) -> None:
        self._laws = laws

    def next(self, hits: Sequence[bool], served: tuple[int, int]) -> tuple[int, list[bool]]:
        """Returns the tokens that a round commits, and whether each sequence's outcome hits.

        hits: of the lookups that began the round. served: tokens after a (miss, hit).
        """
        tokens, found = 0, []
        for place, hit in enumerate(hits):
            k = min(self._accepted(place, hit), served[hit])
            found.append(self._hits(place, hit, k, k == served[hit]))
            self._commit(place, k + 1)
            tokens += k + 1
        return tokens, found

    @abstractmethod
    def _accepted(self, place: int, hit: bool) -> int:
        """Returns how many of K drafted tokens a sequence's round accepts."""

    @abstractmethod
    def _hits(self, place: int, hit: bool, k: int, end: bool) -> bool:
        """Returns whether the outcome after k accepted tokens hits; end: k is all served tokens."""

    @abstractmethod
    def _commit(self, place: int, tokens: int) -> None:
        """Goes on to a sequence's next round."""


class Drawn(Fates):
    """Fresh draws: coins of a round of their own, whatever was accepted before."""

    def __init__(self, laws: Laws, batch: int, target: int, num_rounds: int, seed: int) -> None:
        """Draws num_rounds rounds; later rounds repeat them."""
        super().__init__(laws)
        lookahead, first = len(laws.hazards[0]), _SEQUENCE + target * batch
        each = range(first, first + batch)
        coins = [uniforms(seed, Purpose.ACCEPT, s, 0, num_rounds * lookahead) for s in each]
        shaped = np.reshape(coins, (batch, num_rounds, lookahead))
        self._counts = [_leading(shaped, law) for law in laws.hazards]
        self._ranks = [uniforms(seed, Purpose.RANK, s, 0, num_rounds).tolist() for s in each]
        self._round, self._num_rounds = [0] * batch, num_rounds

    def _accepted(self, place: int, hit: bool) -> int:
        return self._counts[hit][place][self._round[place]]

    def _hits(self, place: int, hit: bool, k: int, end: bool) -> bool:
        return bool(self._ranks[place][self._round[place]] < self._laws.p_hit[hit][end][k])

    def _commit(self, place: int, tokens: int) -> None:
        self._round[place] = (self._round[place] + 1) % self._num_rounds


class Replayed(Fates):
    """The draws of group `target` in a run of the `gemm` workload, in order."""

    def __init__(self, job: Job, target: int, num_rounds: int) -> None:
        """Takes the rounds of the run."""
        super().__init__(Laws.of(job))
        batch, lookahead, seed = job.config.batch_size, job.lookahead, job.config.seed
        count = 2 + (num_rounds + 1) * (lookahead + 1)
        each = range(target * batch, (target + 1) * batch)
        coins = np.array([uniforms(seed, Purpose.ACCEPT, s, 0, count) for s in each])
        ahead = np.lib.stride_tricks.sliding_window_view(coins, lookahead, axis=1)
        self._counts = [_leading(ahead, law) for law in self._laws.hazards]
        ranks = np.array([uniforms(seed, Purpose.RANK, s, 0, count) for s in each])
        law = job.hit_law
        self._ranks = [law.ranks(ranks, end).tolist() for end in law.ends]
        nothing = (0,) * (lookahead + 1)
        self._lists = job.fan_out_miss or nothing, job.fan_out or nothing
        self._lengths = [1] * batch

    def _accepted(self, place: int, hit: bool) -> int:
        return self._counts[hit][place][self._lengths[place]]

    def _hits(self, place: int, hit: bool, k: int, end: bool) -> bool:
        ranks = self._ranks[min(end, len(self._ranks) - 1)]
        return bool(ranks[place][self._lengths[place] + k] <= self._lists[hit][k])

    def _commit(self, place: int, tokens: int) -> None:
        self._lengths[place] += tokens


def _leading(coins: Floats, hazards: Sequence[float]) -> list[list[int]]:
    """Returns how many leading coins [b, n, K] the acceptance rates accept, [b][n]."""
    kept = np.logical_and.accumulate(coins < np.array(hazards), axis=2)
    counts: list[list[int]] = kept.sum(axis=2).tolist()
    return counts
