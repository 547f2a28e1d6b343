"""What a round of a target in a pool accepts, and which of its outcomes the draft has a branch for.

By the same laws as a run's workload (engine.spec): the leading accepted tokens by the hazards of
what drafted them, a hit where the bonus token is among the F_k candidates. Coins are those of
`common.rng`, one stream a sequence, one coin a token and round, so that a simulation depends on its
seed alone and the same round of two pools draws alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Source
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import Floats

_SEQUENCE = 1 << 28  # of the first target; no request of a run has such a large id


@dataclass(frozen=True)
class Laws:
    """A job's laws as tables, by whether a trunk came from the cache (1) or from a backup (0).

    hazards: [2][K]. p_hit: [2][2][K+1], P(hit) behind k accepted tokens, by whether all served
    tokens were accepted.
    """

    hazards: tuple[tuple[float, ...], tuple[float, ...]]
    p_hit: tuple[tuple[tuple[float, ...], ...], ...]

    @classmethod
    def of(cls, job: Job) -> Laws:
        """Makes the tables of a job that drafts."""
        backup = Source[job.config.backup.upper()]
        chance, nothing = (
            job.hit_law.hit_probabilities(job.fan_outs.widest),
            (0,) * (job.lookahead + 1),
        )
        lists = job.fan_out_miss or nothing, job.fan_out or nothing
        hazards = tuple(tuple(job.acceptance[s].hazards) for s in (backup, Source.CACHE))
        p_hit = tuple(tuple(tuple(row[list(f)].tolist()) for row in chance) for f in lists)
        return cls((hazards[0], hazards[1]), p_hit)


class Fates:
    """The coming rounds of one target's b sequences, in their order."""

    def __init__(self, laws: Laws, batch: int, target: int, num_rounds: int, seed: int) -> None:
        """Draws num_rounds rounds; those behind them begin again."""
        self._laws, self._round, self._num_rounds = laws, 0, num_rounds
        lookahead = len(laws.hazards[0])
        first = _SEQUENCE + target * batch
        each = range(first, first + batch)
        shape = batch, num_rounds, lookahead
        coins = [uniforms(seed, Purpose.ACCEPT, s, 0, num_rounds * lookahead) for s in each]
        self._accepted = [_leading(np.reshape(coins, shape), law) for law in laws.hazards]
        self._ranks = [uniforms(seed, Purpose.RANK, s, 0, num_rounds).tolist() for s in each]

    def next(self, hits: list[bool], served: tuple[int, int]) -> tuple[int, list[bool]]:
        """Returns the tokens that a round commits, and whether each sequence's outcome hits.

        hits: of the lookups that began the round. served: tokens behind a (miss, hit).
        """
        at, tokens, found = self._round, 0, []
        self._round = (at + 1) % self._num_rounds
        for place, hit in enumerate(hits):
            k = min(self._accepted[hit][place][at], served[hit])
            tokens += k + 1
            chance = self._laws.p_hit[hit][k == served[hit]][k]
            found.append(self._ranks[place][at] < chance)
        return tokens, found


def _leading(coins: Floats, hazards: tuple[float, ...]) -> list[list[int]]:
    """Returns how many leading tokens the hazards accept, [b][rounds]."""
    counts: list[list[int]] = (
        np.logical_and.accumulate(coins < hazards, axis=2).sum(axis=2).tolist()
    )
    return counts
