"""Controls that choose what drafts after a miss, and how long a late hit is grown.

To keep SSD lossless, they read only how many tokens were committed and how long that took, never
the tokens that are being proposed.

BackupController   chooses between JIT and FAST by theorem 17 [Kumar, Dao, May 2026]
steps_to_serve     growth steps to take before a late hit is served
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Source
from mpissd.common.theory import stationary_hit_rate
from mpissd.engine.spec.adaptive import Whole

BACKUPS = (Source.JIT, Source.FAST)
EXPLORE = 0.005  # The largest share of the time that may go to trying the backup that seems worse.
# Two trials are enough to time JIT: cached tokens give its acceptance length.
_FIRST_JIT_ROUNDS = 2
_FIRST_FAST_ROUNDS, _FIRST_FAST_ROWS = 8, 32
# After 4 rounds and 4 rows FAST may be dropped early, if JIT is better by 2 standard errors.
_LEAST_FAST, _ERRORS = 4, 2.0
_MEMORY_ROWS = 2048.0  # Outcomes of one source that are remembered (exponential forgetting).
_MEMORY_ROUNDS = 4096.0
_TIMES = 32  # How many of the latest durations of each kind are kept.
_LIKE_CACHE = 16.0  # Weight, in outcomes, of the cached tokens' length as a prior for JIT's.
_LIKE_OTHER = 64.0  # Weight, in outcomes, of both backups' common hit rate as a prior for each.
_LEAST_S = 1e-9  # Lower bound of a duration: a modelled device may report 0 s.
_ALONE = 4.0  # Weight, in rounds, of the prior that sequences hit independently.


class BackupController:
    """Chooses JIT or FAST for the next misses: the one that the run's own times say is faster.

    The rate of a backup at batch size b is [h·E_hit + (1−h)·E] / [H·t_hit + (1−H)·t_miss] tokens a
    second and sequence. h follows from the hit rates after a hit and after this backup. H = h^{b·x}
    is the chance that all sequences hit; x is fitted to how often that happened. t_miss is the time
    of a round with a miss without backup and verification, plus this backup's own time. Times are
    means of the middle half of the latest samples.

    The backup that seems worse is tried again as often as the EXPLORE share of the time allows:
    seldom if it is far worse, often if it is nearly as good. The first rounds are two of JIT and
    eight (with 32 outcomes) of FAST. After four, FAST is dropped early if it would lose even with
    an acceptance length two standard errors above the mean seen. The time these first rounds lost
    counts against the same share, so runs longer than 1/EXPLORE times that loss spend no more than
    EXPLORE.
    """

    def __init__(
        self, lookahead: int, backup_lookahead: int | None = None, explore: float = EXPLORE
    ) -> None:
        """Takes K_b of JIT as backup_lookahead (default K) and the share of time to explore,
        0..1."""
        backup_lookahead = lookahead if backup_lookahead is None else backup_lookahead
        if not 0 <= backup_lookahead <= lookahead:
            raise ConfigError(f"backup_lookahead={backup_lookahead}: allowed: 0..{lookahead}")
        if not 0 <= explore <= 1:
            raise ConfigError(f"explore={explore}: allowed: 0 to 1")
        self._short, self._explore = backup_lookahead, explore
        self._outcomes = {source: _Outcomes() for source in Source}
        self._own_s = {backup: _Times() for backup in BACKUPS}
        self._hit_s, self._rest_s = _Times(), _Times()
        self._miss_rounds = dict.fromkeys(BACKUPS, 0)
        self._hits = self._rows = self._rounds = self._all_hit = self._if_alone = 0.0
        self._elapsed_s = self._lost_s = 0.0
        self._best = Source.NONE  # Stays NONE until both backups were tried.
        self._loss_s = 0.0  # Seconds lost in a round with a miss if the other backup answers it.

    def observe(
        self,
        accepted: Whole,
        source: Whole,
        in_cache: NDArray[np.bool_],
        *,
        round_s: float,
        backup_s: float,
        verify_s: float,
    ) -> None:
        """Updates the tallies with one round of b ≥ 1 sequences.

        accepted, source, in_cache: [b] each: accepted tokens, what drafted them, and whether the
        outcome was a key of the cache. round_s: seconds from one outcome to the next. backup_s: the
        part spent drafting for misses (0 without a miss). verify_s: the part spent verifying (0 if
        not known separately).
        """
        tallies = self._count(accepted, source, in_cache)
        hits, rows = tallies[Source.CACHE][0], len(source)
        keep = 1 - 1 / _MEMORY_ROUNDS
        self._hits, self._rows = keep * self._hits + hits, keep * self._rows + rows
        self._rounds = keep * self._rounds + 1
        self._all_hit = keep * self._all_hit + (hits == rows)
        self._if_alone = keep * self._if_alone + (self._hits / self._rows) ** rows
        self._elapsed_s, self._lost_s = keep * self._elapsed_s + round_s, keep * self._lost_s
        backup = next((backup for backup in BACKUPS if tallies[backup][0]), None)
        if backup is None:
            self._hit_s.append(round_s)
            return
        self._rest_s.append(round_s - backup_s - verify_s)
        self._own_s[backup].append(backup_s + verify_s)
        self._miss_rounds[backup] += 1
        if backup is not self._best:
            self._lost_s += self._loss_s

    def choose(self, batch: int) -> Source:
        """Returns JIT or FAST, the backup for the next round's misses at a batch of `batch`
        sequences."""
        if self._miss_rounds[Source.JIT] < _FIRST_JIT_ROUNDS:
            return Source.JIT
        if self._wants_fast(batch):
            return Source.FAST
        (jit, jit_s), (fast, fast_s) = (self._rate(backup, batch) for backup in BACKUPS)
        first = self._best is Source.NONE
        self._best, other = BACKUPS if jit >= fast else BACKUPS[::-1]
        self._loss_s = jit_s * (1 - jit / fast) if fast > jit else fast_s * (1 - fast / jit)
        if first:
            self._lost_s += self._miss_rounds[other] * self._loss_s
        paid = self._lost_s + self._loss_s <= self._explore * self._elapsed_s
        return other if paid else self._best

    def _wants_fast(self, batch: int) -> bool:
        """Returns whether FAST was tried too seldom to compare it with JIT."""
        rounds, rows = self._miss_rounds[Source.FAST], self._outcomes[Source.FAST].ever
        if rounds >= _FIRST_FAST_ROUNDS and rows >= _FIRST_FAST_ROWS:
            return False
        if min(rounds, rows) < _LEAST_FAST:
            return True
        at_best, _ = self._rate(Source.FAST, batch, _ERRORS)
        return at_best >= self._rate(Source.JIT, batch)[0]

    def _count(
        self, accepted: Whole, source: Whole, in_cache: NDArray[np.bool_]
    ) -> list[list[int]]:
        """Counts a round's outcomes by Source and adds the counts to `_outcomes`.

        Returns for each Source [rows, accepted tokens, accepted tokens counted up to K_b in a row,
        outcomes that the cache held]. K_b is the number of tokens that a backup drafts.
        """
        tallies = [[0, 0, 0, 0] for _ in Source]
        for k, kind, key in zip(accepted.tolist(), source.tolist(), in_cache.tolist(), strict=True):
            tally = tallies[kind]
            tally[0] += 1
            tally[1] += k
            tally[2] += min(k, self._short)
            tally[3] += key
        for kind, outcomes in self._outcomes.items():
            if tallies[kind][0]:
                outcomes.add(*tallies[kind])
        return tallies

    def _rate(self, backup: Source, batch: int, errors: float = 0.0) -> tuple[float, float]:
        """Returns (tokens a second and sequence, seconds from one round with a miss to the next).

        errors: standard errors to add to the backup's mean acceptance length.
        """
        cached, own = self._outcomes[Source.CACHE], self._outcomes[backup]
        h = stationary_hit_rate(cached.found_share(0.5, 2.0), self._found_after(own))
        length = own.mean_tokens()
        if backup is Source.JIT:
            length = own.mean_tokens(cached.mean_short(), _LIKE_CACHE if cached.rows else 0.0)
        if errors:
            length = min(length + errors * own.error(), float(self._short))
        tokens = 1 + (h * cached.mean_tokens() if cached.rows else h * length) + (1 - h) * length
        all_hit = h ** max(1.0, batch * self._independence())
        miss_s = self._rest_s.typical() + self._own_s[backup].typical()
        hit_s = self._hit_s.typical() if self._hit_s else miss_s
        round_s = all_hit * hit_s + (1 - all_hit) * miss_s
        return tokens / max(round_s, _LEAST_S), round_s / (1 - all_hit)

    def _independence(self) -> float:
        """Returns the exponent factor x ≤ 1 for which h^{b·x} is the share of rounds where all hit.

        x = 1 means that sequences hit independently of each other.
        """
        if not 0 < self._if_alone < self._rounds:
            return 1.0
        alone = self._if_alone / self._rounds
        seen = (self._all_hit + _ALONE * alone) / (self._rounds + _ALONE)
        return min(1.0, math.log(seen) / math.log(alone))

    def _found_after(self, own: _Outcomes) -> float:
        both = [self._outcomes[backup] for backup in BACKUPS]
        share = (1 + sum(o.in_cache for o in both)) / (2 + sum(o.rows for o in both))
        return own.found_share(share, _LIKE_OTHER)


class _Outcomes:
    """Tallies of one source, which fade over about _MEMORY_ROWS rows: rows, tokens, keys found."""

    def __init__(self) -> None:
        self.ever = 0
        self.rows = self.tokens = self.short = self.in_cache = 0.0

    def add(self, rows: int, tokens: int, short: int, in_cache: int) -> None:
        keep = (1 - 1 / _MEMORY_ROWS) ** rows
        self.ever += rows
        self.rows, self.tokens = keep * self.rows + rows, keep * self.tokens + tokens
        self.short, self.in_cache = keep * self.short + short, keep * self.in_cache + in_cache

    def mean_tokens(self, prior: float = 0.0, weight: float = 0.0) -> float:
        """Returns the mean number of accepted tokens, without the bonus token."""
        return (self.tokens + weight * prior) / (self.rows + weight)

    def error(self) -> float:
        """Returns the standard error of mean_tokens(), with the variance of a geometric law of that
        mean."""
        mean = self.mean_tokens()
        return math.sqrt((mean * (1 + mean) + 0.5) / self.rows)

    def mean_short(self) -> float:
        return self.short / self.rows if self.rows else 0.0

    def found_share(self, prior: float, weight: float) -> float:
        return (self.in_cache + weight * prior) / (self.rows + weight)


class _Times(deque[float]):
    """The latest durations of one kind, in seconds."""

    def __init__(self) -> None:
        super().__init__(maxlen=_TIMES)

    def typical(self) -> float:
        """Returns the mean of the middle half of the durations; of two, the smaller."""
        ordered = sorted(self)
        middle = ordered[len(ordered) // 4 :][: (len(ordered) + 1) // 2]
        return math.fsum(middle) / len(middle)


def steps_to_serve(
    steps_done: int,
    lookahead: int,
    step_s: float,
    verify_s: Sequence[float] | Callable[[int], float],
    hazards: Sequence[float],
    rest_s: float = 0.0,
    rate: float | None = None,
) -> int:
    """Returns how many more growth steps to take before a late hit is served: 0..K − steps_done.

    It is the n that maximises E(k') / (n·step_s + verify_s(k') + rest_s) with k' = steps_done + n,
    or, with `rate`, E(k') − rate·(those seconds); of equal values, the smallest n. verify_s:
    seconds to verify k' tokens, as a function or as K+1 values. hazards: K. rest_s: all other
    seconds of the round. rate: tokens a second and sequence in the long run, which is the right
    measure if rounds differ.

    Raises ConfigError if steps_done is not in 0..K, or hazards are not K.
    """
    if not 0 <= steps_done <= lookahead or len(hazards) != lookahead:
        raise ConfigError(
            f"steps_done={steps_done} with {len(hazards)} hazards: "
            f"allowed: 0..{lookahead} with lookahead = {lookahead} of them"
        )
    tokens = tuple(accumulate(accumulate(hazards, mul), initial=1.0))  # E(k') for k' = 0..K
    best, chosen = -math.inf, 0
    for served in range(steps_done, lookahead + 1):
        verification = verify_s(served) if callable(verify_s) else verify_s[served]
        seconds = (served - steps_done) * step_s + verification + rest_s
        if rate is None:
            worth = tokens[served] / max(seconds, _LEAST_S)
        else:
            worth = tokens[served] - rate * seconds
        if worth > best:
            best, chosen = worth, served - steps_done
    return chosen
