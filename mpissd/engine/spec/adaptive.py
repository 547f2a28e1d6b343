"""Estimates hazards and hit laws while decoding, and allots the fan-out from them.

The inputs are committed outcomes alone: how many tokens were accepted of how many, what drafted
them, and the rank of the committed bonus token among the candidates kept. So SSD stays lossless:
the fan-out decides what hits, never what is proposed. The allotment solves theorem 12 of Kumar, Dao
(May 2026) in whole numbers.

Outcomes are kept in a window of fixed size. Compared with exponential forgetting, a window costs
less each round (a copy, no arithmetic), forgets a change of text entirely, and has whole counts, so
that all draft ranks, which see the same outcomes, allot the same fan-out.
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

WINDOW = 2048  # Outcomes. If all of them reach a position, a hazard of .8 is known to ±.009.
PRIOR_COUNT = 4.0  # The least weight of a prior hazard, in outcomes.
_MOST_PRIOR_COUNT = 500.0
# The fields of Seen, as row numbers.
_ACCEPTED, _NUM_DRAFT, _SOURCE, _HIT, _RANK, _LIMIT = range(6)
_DRAFTED_FAST = int(Source.FAST)
Counts = NDArray[np.int64]
Whole = NDArray[np.integer[Any]]


class Seen(NamedTuple):
    """One round's outcomes, each field [b].

    `accepted` of `num_draft` tokens that `source` drafted were accepted; `hit` is whether they came
    from the cache. `rank` is the bonus token's rank among the `limit` candidates kept for k =
    accepted, or 0 if it was not among them.
    """

    accepted: Whole
    num_draft: Whole
    source: Whole
    hit: NDArray[np.generic]
    rank: Whole
    limit: Whole


class OutcomeEstimator:
    """Estimates acceptance hazards and the power laws of the bonus token's rank.

    It uses the last `window` outcomes, and keeps the draft model's tokens (CACHE, JIT) apart from
    FAST tokens.
    """

    def __init__(
        self,
        lookahead: int,
        prior_hazards: Sequence[float],
        prior_fast: Sequence[float] | None = None,
        window: int = WINDOW,
    ) -> None:
        """Takes K prior hazards in 0..1 for the draft model's tokens, and for FAST (default: the
        same).

        Raises ConfigError for another number of hazards, or for a window below 1.
        """
        priors = (tuple(prior_hazards), tuple(prior_hazards if prior_fast is None else prior_fast))
        for prior in priors:
            accept_probabilities(prior)  # Raises ConfigError for a hazard outside 0..1.
            if len(prior) != lookahead:
                raise ConfigError(
                    f"prior hazards {prior}: allowed: lookahead = {lookahead} of them"
                )
        if window < 1:
            raise ConfigError(f"window={window}: allowed: at least 1")
        self._priors, self._width = priors, lookahead + 1
        self._rows = np.zeros((6, window), np.int32)
        self._seen = 0  # Outcomes since the start.

    def observe(self, seen: Seen) -> None:
        """Adds one round's outcomes to the window."""
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
        """The number of outcomes in the window."""
        return min(self._seen, self._rows.shape[1])

    def hazards(self, *, fast: bool = False) -> tuple[float, ...]:
        """Returns P(x_i accepted | x_1..x_{i−1} accepted) for i = 1..K.

        Each position's rate is drawn towards the prior, whose rejections are first scaled to the
        overall rejection rate. The prior weighs c outcomes: c follows from how much the positions
        differ beyond chance (χ²), and is at least PRIOR_COUNT. Without outcomes the result is the
        prior.
        """
        table = self._tables()[:, int(fast)].sum(axis=0)  # [num_draft, accepted]
        # [num_draft, accepted]: outcomes that drafted and accepted at least so many tokens
        beyond = table[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
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
        """Counts outcomes after a hit, or after a miss: [draft model or FAST, num_draft]."""
        return np.asarray(self._tables()[int(hit)].sum(axis=2))

    def fits(self, *, fast: bool = False) -> tuple[PowerLawFit | None, PowerLawFit | None]:
        """Fits the hit law of k < num_draft (the bonus token replaces a rejection) and of k =
        num_draft.

        Each is None where the outcomes do not determine it.
        """
        within, end = self.groups()[2 * fast : 2 * fast + 2]
        return fit_power_law(*within), fit_power_law(*end)

    def groups(self) -> list[Group]:
        """Returns (ranks, limits) for each of the four hit laws.

        Their order: draft model with k < num_draft, draft model with k = num_draft, then FAST
        likewise.
        """
        rows = self._rows[:, : self.count]
        law = 2 * (rows[_SOURCE] == _DRAFTED_FAST) + (rows[_ACCEPTED] == rows[_NUM_DRAFT])
        return [(rows[_RANK, law == n], rows[_LIMIT, law == n]) for n in range(4)]

    def _tables(self) -> Counts:
        """Counts outcomes by [hit, FAST, num_draft, accepted]."""
        rows, width = self._rows[:, : self.count], self._width
        index = 2 * rows[_HIT] + (rows[_SOURCE] == _DRAFTED_FAST)
        index = (index * width + rows[_NUM_DRAFT]) * width + rows[_ACCEPTED]
        return np.bincount(index, minlength=4 * width**2).reshape(2, 2, width, width)


class AdaptiveFanOut:
    """Allots a budget of branches anew every `every` rounds, from the outcomes seen so far.

    The fan-out after a hit and after a miss differ, because what drafted the trunk and its length
    (num_draft) differ. A trunk row beyond num_draft has no outcome and gets no branch. All hit laws
    share one r; each has its own A.
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
        """Makes an allotment of at most `budget` branches, renewed every `every` rounds.

        minimum: the smallest F_k of a served row.

        Raises ConfigError if the budget cannot hold the minimum, or a number is outside its range.
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
        """Adds one round's outcomes to the estimator."""
        self.estimator.observe(seen)
        self._rounds += 1

    def plan(self) -> FanOuts:
        """Returns the fan-outs to use now.

        One call in `every` rounds computes them anew, in about 1 ms on one core with K = 7 and a
        full window at B = 24, and 2 ms at B = 64: .5 ms for the fit, and .5 or 1.3 ms for the
        dynamic program, which runs twice if hits and misses differ. With every = 64 that is 20 to
        50 µs a round.
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
        """Returns P(k accepted) and A_k for the rows that are served after a hit, or after a miss.

        Because all laws share one r, a mixture of lengths and sources again has a power law, with
        the mean A, except at those F where one part is clipped to 1.
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
        # Keep at least one outcome's candidates: without any, no hit could ever be observed.
        if not any(fan_out):
            fan_out[int(np.argmax(weights))] = self._budget
        return (*fan_out, *(0,) * (self._lookahead + 1 - len(fan_out)))
