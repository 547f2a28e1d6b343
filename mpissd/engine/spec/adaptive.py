"""Estimates while decoding, and the fan-out that they ask for.

All that is read is what was committed: how many tokens were accepted of how many, what drafted
them, and the rank of the committed bonus token among the candidates kept [Kumar, Dao, May 2026,
theorem 12 and its F_k, here by exact whole numbers]. That leaves SSD lossless: what is kept decides
only what a hit is, never what is proposed.

Memory is a window of whole outcomes. Against exponential forgetting it costs less a round (a copy,
no arithmetic), forgets a change of text entirely, and its counts are whole numbers, so that every
draft rank that saw the same outcomes allots the same fan-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Source
from mpissd.common.theory import accept_probabilities
from mpissd.engine.spec.fanout import MAX_BRANCHES, FanOuts, optimal_fan_out
from mpissd.engine.spec.fit import Group, PowerLawFit, fit_power_law, shrunk_power_laws

WINDOW = 2048  # outcomes: a hazard of .8 that every one of them tells of is known to ±.009
PRIOR_COUNT = 4.0  # outcomes that a prior hazard weighs as many as, at least
_MOST_PRIOR_COUNT = 500.0
_ACCEPTED, _NUM_DRAFT, _SOURCE, _HIT, _RANK, _LIMIT = range(6)  # the fields of Seen
_DRAFTED_FAST = int(Source.FAST)
Counts = NDArray[np.int64]
Whole = NDArray[np.integer[Any]]


class Seen(NamedTuple):
    """One round's outcomes, each [b]: k accepted of num_draft tokens from `source` (hit: cached);
    the rank of the bonus among the `limit` candidates that were kept at k, 0: not among them."""

    accepted: Whole
    num_draft: Whole
    source: Whole
    hit: NDArray[np.generic]
    rank: Whole
    limit: Whole


class OutcomeEstimator:
    """Hazards of acceptance and power laws of the bonus's rank, from the last `window` outcomes.

    Tokens of the draft model (CACHE, JIT) and FAST tokens are told apart.
    """

    def __init__(
        self,
        lookahead: int,
        prior_hazards: Sequence[float],
        prior_fast: Sequence[float] | None = None,
        window: int = WINDOW,
    ) -> None:
        """prior_hazards, prior_fast (default: the same): K hazards each, in 0..1.

        ConfigError: another number of them, or a window below 1.
        """
        priors = (tuple(prior_hazards), tuple(prior_hazards if prior_fast is None else prior_fast))
        for prior in priors:
            accept_probabilities(prior)  # refuses what is no probability
            if len(prior) != lookahead:
                raise ConfigError(
                    f"prior hazards {prior}: allowed: lookahead = {lookahead} of them"
                )
        if window < 1:
            raise ConfigError(f"window={window}: allowed: at least 1")
        self._priors, self._width = priors, lookahead + 1
        self._rows = np.zeros((6, window), np.int32)
        self._seen = 0  # outcomes, ever

    def observe(self, seen: Seen) -> None:
        """Takes in a round."""
        window, done, batch = self._rows.shape[1], 0, len(seen.accepted)
        while done < batch:
            at = self._seen % window
            count = min(batch - done, window - at)
            block = self._rows[:, at : at + count]
            for column in range(6):
                block[column] = seen[column][done : done + count]
            self._seen += count
            done += count

    @property
    def count(self) -> int:
        """Outcomes in the window."""
        return min(self._seen, self._rows.shape[1])

    def hazards(self, *, fast: bool = False) -> tuple[float, ...]:
        """P(x_i accepted | x_1..x_{i−1} accepted), i = 1..K.

        Positions are pulled to the prior with its rejections scaled to those of all positions
        together, as if by c outcomes each: c from how far the positions' rates lie apart beyond
        chance (their χ²), PRIOR_COUNT at least. No outcomes: the prior.
        """
        table = self._tables()[:, int(fast)].sum(axis=0)  # [num_draft, accepted]
        beyond = table[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]  # at least so many
        reached, passed = beyond[1:, :-1].diagonal(), beyond[1:, 1:].diagonal()
        rejects = 1.0 - np.array(self._priors[fast])
        few = PRIOR_COUNT * (rejects.mean() if rejects.any() else 1.0)
        rejects *= ((reached - passed).sum() + few) / ((reached * rejects).sum() + few)
        target = np.maximum(0.0, 1.0 - rejects)
        spread = np.clip(target, 1e-3, 1 - 1e-3)
        apart = (passed - reached * spread) ** 2 / (np.maximum(reached, 1) * spread * (1 - spread))
        excess = float(apart.sum()) - np.count_nonzero(reached)
        count = reached.sum() / excess if excess > 0 else _MOST_PRIOR_COUNT
        count = min(max(count, PRIOR_COUNT), _MOST_PRIOR_COUNT)
        return tuple(((passed + count * target) / (reached + count)).tolist())

    def trunks(self, hit: bool) -> Counts:
        """Outcomes whose tokens were cached, or were not: [draft model or FAST, num_draft]."""
        return np.asarray(self._tables()[int(hit)].sum(axis=2))

    def fits(self, *, fast: bool = False) -> tuple[PowerLawFit | None, PowerLawFit | None]:
        """The fitted laws of k < num_draft (the bonus replaces a rejection) and k = num_draft."""
        within, end = self.groups()[2 * fast : 2 * fast + 2]
        return fit_power_law(*within), fit_power_law(*end)

    def groups(self) -> list[Group]:
        """(ranks, limits) by law: draft model k < num_draft, = num_draft; FAST <, =."""
        rows = self._rows[:, : self.count]
        law = 2 * (rows[_SOURCE] == _DRAFTED_FAST) + (rows[_ACCEPTED] == rows[_NUM_DRAFT])
        return [(rows[_RANK, law == n], rows[_LIMIT, law == n]) for n in range(4)]

    def _tables(self) -> Counts:
        """Outcomes by [hit, FAST, num_draft, accepted]."""
        rows, width = self._rows[:, : self.count], self._width
        index = 2 * rows[_HIT] + (rows[_SOURCE] == _DRAFTED_FAST)
        index = (index * width + rows[_NUM_DRAFT]) * width + rows[_ACCEPTED]
        return np.bincount(index, minlength=4 * width**2).reshape(2, 2, width, width)


class AdaptiveFanOut:
    """Fan-outs of a budget, allotted anew every `every` rounds to what was seen of the outcomes.

    Hits and misses differ in what drafted and how far (num_draft): a row of the trunk that is not
    served has no outcome, and gets nothing. r is one for all; A is one for each law.
    """

    def __init__(
        self,
        budget: int,
        lookahead: int,
        every: int,
        prior_hazards: Sequence[float],
        prior_a: float,
        prior_r: float,
        minimum: int = 0,
        prior_fast: Sequence[float] | None = None,
        window: int = WINDOW,
    ) -> None:
        """budget: most ΣF_k; minimum: least F_k of a row that is served; every: in rounds.

        ConfigError: a budget that can't hold the minimum, or a number outside its range.
        """
        least = max(1, minimum * (lookahead + 1))
        if not least <= budget <= MAX_BRANCHES:
            raise ConfigError(f"fan-out budget {budget}: allowed: {least} to {MAX_BRANCHES}")
        for what, value in (("every", every), ("lookahead", lookahead), ("minimum", minimum + 1)):
            if value < 1:
                raise ConfigError(f"adaptive fan-out: {what}={value}: allowed: at least 1")
        for what, number in (("hit_a", prior_a), ("hit_r", prior_r)):
            if not 0 < number < float("inf"):
                raise ConfigError(f"{what}={number}: allowed: above 0 and finite")
        self.estimator = OutcomeEstimator(lookahead, prior_hazards, prior_fast, window)
        self._budget, self._lookahead, self._every = budget, lookahead, every
        self._prior, self._minimum = (prior_a, prior_r), minimum
        self._rounds = 0
        self._plan = self._allot()

    def observe(self, seen: Seen) -> None:
        """Takes in a round."""
        self.estimator.observe(seen)
        self._rounds += 1

    def plan(self) -> FanOuts:
        """The fan-outs to use now.

        One call in `every` rounds allots: about 1 ms on one core with K = 7 and a full window at
        B = 24, 2 ms at B = 64 (a fit .5, a dynamic program .5 and 1.3, twice where hits and misses
        differ). every = 64 makes that some 20 to 50 µs a round.
        """
        if self._rounds >= self._every:
            self._rounds = 0
            self._plan = self._allot()
        return self._plan

    def _allot(self) -> FanOuts:
        laws, hit_r = shrunk_power_laws(self.estimator.groups(), *self._prior)
        hazards = [self.estimator.hazards(fast=fast) for fast in (False, True)]
        problems = [self._problem(hit, hazards, laws) for hit in (True, False)]
        after_hit = self._solve(*problems[0], hit_r)
        same = problems[0] == problems[1]
        return FanOuts(after_hit, after_hit if same else self._solve(*problems[1], hit_r))

    def _problem(
        self, hit: bool, hazards: Sequence[Sequence[float]], laws: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """P(k accepted) and A_k of the rows that are served, behind a hit or a miss.

        One r makes miss_k of a mixture of lengths and sources a power law again, of the mean A
        (but for the F at which one of them is still clipped to 1).
        """
        trunks = self.estimator.trunks(hit)
        if not trunks.any():
            trunks[0, self._lookahead] = 1
        reach = int(np.flatnonzero(trunks.sum(axis=0))[-1]) + 1
        weights, scaled = np.zeros(reach), np.zeros(reach)
        for fast, num_draft in np.argwhere(trunks):
            chances = np.array(accept_probabilities(hazards[fast][:num_draft]))
            chances *= trunks[fast, num_draft] / trunks.sum()
            weights[: num_draft + 1] += chances
            scaled[:num_draft] += laws[2 * fast] * chances[:-1]
            scaled[num_draft] += laws[2 * fast + 1] * chances[-1]
        return weights.tolist(), (scaled / np.where(weights > 0, weights, 1.0)).tolist()

    def _solve(self, weights: list[float], hit_a: list[float], hit_r: float) -> tuple[int, ...]:
        fan_out = list(optimal_fan_out(weights, self._budget, hit_a, hit_r, self._minimum))
        if not any(fan_out):  # no candidate is believed to hit; keeping none would never tell
            fan_out[int(np.argmax(weights))] = self._budget
        return (*fan_out, *(0,) * (self._lookahead + 1 - len(fan_out)))
