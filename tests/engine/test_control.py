"""The choice of a backup and of a late hit's length, against brute force and a simulated round.

Statistical tests fix their seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Source
from mpissd.common.theory import expected_tokens, expected_tokens_from_rates
from mpissd.engine.spec.control import EXPLORE, BackupController, steps_to_serve

SEED = 20260304
BOTH = (Source.JIT, Source.FAST)


@dataclass
class Rounds:
    """b sequences, round by round: hits with h whatever came before, times with 5% noise.

    together: share of rounds in which all sequences hit, or miss, as one.
    """

    batch: int
    hit: float
    lookahead: int
    step: float  # of a JIT backup, in verifications
    alpha: float
    alpha_fast: float
    growth: float = 0.5
    together: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([SEED, self.seed, self.batch])
        self.won = np.zeros(self.batch, np.bool_)

    def run(self, controller: BackupController, count: int) -> tuple[float, float]:
        """(tokens a unit of time and sequence, share of rounds that it chose JIT for)."""
        of_draft, of_fast = (self._lengths(a, count) for a in (self.alpha, self.alpha_fast))
        u = self.rng.random((count, self.batch))
        as_one = self.rng.random(count) < self.together
        keys = np.where(as_one[:, None], u[:, :1], u) < self.hit
        times = 1 + 0.05 * self.rng.standard_normal((count, 2))
        late_s = 0.1 + max(0.0, self.growth - 1)
        total = seconds = jit = 0.0
        for n, (verify_s, noise) in enumerate(times.tolist()):
            backup = controller.choose(self.batch)
            k = np.where(self.won, of_draft[n], (of_fast if backup is Source.FAST else of_draft)[n])
            source = np.where(self.won, int(Source.CACHE), int(backup))
            missed = not self.won.all()
            backup_s = noise * self._backup_s(backup) if missed else 0.0
            round_s = verify_s + backup_s + (0.1 if missed else late_s)
            self.won = keys[n]
            controller.observe(
                k, source, self.won, round_s=round_s, backup_s=backup_s, verify_s=verify_s
            )
            total, seconds = total + k.mean() + 1, seconds + round_s
            jit += backup is Source.JIT
        return total / seconds, jit / count

    def _lengths(self, alpha: float, count: int) -> np.ndarray:
        passed = self.rng.random((self.lookahead, count, self.batch)) < alpha
        return np.logical_and.accumulate(passed, axis=0).sum(axis=0)

    def _backup_s(self, backup: Source) -> float:
        return 0.01 if backup is Source.FAST else self.step * self.lookahead

    def rate(self, backup: Source) -> float:
        """The expectation, with one backup throughout."""
        alone = self.hit**self.batch
        all_hit = self.together * self.hit + (1 - self.together) * alone
        alpha = self.alpha_fast if backup is Source.FAST else self.alpha
        tokens = self.hit * expected_tokens(self.alpha, self.lookahead)
        tokens += (1 - self.hit) * expected_tokens(alpha, self.lookahead)
        hit_s = 1.1 + max(0.0, self.growth - 1)
        return tokens / (all_hit * hit_s + (1 - all_hit) * (1.1 + self._backup_s(backup)))

    @property
    def best(self) -> float:
        return max(self.rate(backup) for backup in BOTH)


def cells() -> list[Rounds]:
    rng = np.random.default_rng(SEED)
    return [
        Rounds(
            batch,
            hit=float(rng.choice([0.3, 0.5, 0.7, 0.85, 0.95])),
            lookahead=int(rng.choice([3, 5, 7])),
            step=float(rng.choice([0.05, 0.05, 0.1, 0.3, 1.0, 3.0])),
            alpha=float(rng.choice([0.6, 0.8, 0.9])),
            alpha_fast=float(rng.choice([0.1, 0.3])),
            growth=float(rng.choice([0.5, 1.5])),
        )
        for batch in range(1, 65)
    ]


@pytest.mark.slow
def test_auto_is_within_2_percent_of_the_better_backup_at_every_batch_size() -> None:
    """Start included. Neither backup alone is, in an eighth of the cells or more."""
    rounds = cells()
    short = [1 - r.run(BackupController(r.lookahead), 3000)[0] / r.best for r in rounds]
    assert len(short) == 64 and max(short) <= 0.02
    assert np.mean(short) < 0.01
    for backup in BOTH:
        assert np.mean([r.rate(backup) < 0.98 * r.best for r in rounds]) > 1 / 8


@pytest.mark.parametrize("step", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("batch", [1, 16])
def test_trying_the_other_backup_costs_less_than_a_percent(step: float, batch: int) -> None:
    """Of the rounds behind the first 2000; the noise of their lengths is allowed for."""
    rounds = Rounds(batch, 0.7, 5, step, 0.8, 0.3)
    controller = BackupController(5)
    rounds.run(controller, 2000)
    rate, jit = rounds.run(controller, 8000)
    noise = 5 * 2 / (3 * math.sqrt(8000 * batch))  # of the mean length: 2 of 3, and 5 σ
    assert rate >= (1 - EXPLORE - noise) * rounds.best
    assert 0 < jit < 1  # neither is given up


def test_what_changes_is_noticed() -> None:
    """A text that prompt lookup suits, then a draft that another job slows down."""
    rounds = Rounds(4, 0.7, 5, 0.3, 0.8, 0.02)
    rounds.step = 0.05
    controller = BackupController(5)
    assert rounds.run(controller, 2000)[1] > 0.9
    rounds.alpha_fast = 0.8
    rounds.run(controller, 4000)
    assert rounds.run(controller, 500)[1] < 0.2
    rounds.alpha_fast = 0.02
    rounds.run(controller, 4000)
    assert rounds.run(controller, 500)[1] > 0.6
    rounds.step = 3.0
    rounds.run(controller, 500)
    assert rounds.run(controller, 500)[1] < 0.05


@pytest.mark.parametrize(("batch", "hit"), [(30, 0.95), (59, 0.95), (8, 0.85)])
def test_sequences_that_miss_together_are_seen_to(batch: int, hit: float) -> None:
    """h^b says that nearly every round has a miss; half of them are decided for all at once."""
    rounds = Rounds(batch, hit, 3, 0.2, 0.9, 0.1, together=0.5, seed=4)
    controller = BackupController(3)
    rounds.run(controller, 3000)
    chosen = Source.JIT if rounds.run(controller, 1000)[1] > 0.5 else Source.FAST
    assert rounds.rate(chosen) >= 0.98 * rounds.best


def test_one_slow_first_round_does_not_condemn_a_backup() -> None:
    rounds = Rounds(1, 0.5, 5, 0.05, 0.8, 0.1)
    controller = BackupController(5)
    controller.observe(
        np.array([3]),
        np.array([Source.JIT]),
        np.array([False]),
        round_s=500.0,
        backup_s=499.0,
        verify_s=1.0,
    )
    rounds.run(controller, 200)
    assert rounds.run(controller, 500)[1] > 0.9


def test_a_short_backup_is_judged_by_its_own_length() -> None:
    """Cached tokens of which the first K_b alone would have been drafted tell what JIT yields."""
    controllers = [BackupController(8, short) for short in (1, 8)]
    for controller in controllers:
        for n in range(400):
            backup = controller.choose(1)
            won = n % 2 == 0
            source = Source.CACHE if won else backup
            k = 8 if won else (controller is controllers[1]) * 8 if backup is Source.JIT else 2
            backup_s = 0.0 if won else 0.2 if backup is Source.JIT else 0.0
            controller.observe(
                np.array([max(k, 1)]),
                np.array([source]),
                np.array([not won]),
                round_s=1 + backup_s,
                backup_s=backup_s,
                verify_s=0.0,
            )
    assert [c.choose(1) for c in controllers] == [Source.FAST, Source.JIT]


def test_a_device_that_takes_no_time_breaks_nothing() -> None:
    controller = BackupController(2)
    for _ in range(50):
        source = np.full(2, controller.choose(2))
        controller.observe(
            np.zeros(2, np.int32),
            source,
            np.zeros(2, np.bool_),
            round_s=0.0,
            backup_s=0.0,
            verify_s=0.0,
        )
    assert controller.choose(2) in BOTH
    assert steps_to_serve(0, 2, 0.0, [0.0] * 3, [0.5, 0.5]) == 2


def test_errors_name_the_value_and_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"backup_lookahead=4: allowed: 0\.\.3"):
        BackupController(3, 4)
    with pytest.raises(ConfigError, match=r"explore=1\.5: allowed: 0 to 1"):
        BackupController(3, explore=1.5)
    with pytest.raises(ConfigError, match=r"steps_done=4 .* allowed: 0\.\.3"):
        steps_to_serve(4, 3, 1.0, [1.0] * 4, [0.5] * 3)
    with pytest.raises(ConfigError, match="with 2 hazards"):
        steps_to_serve(0, 3, 1.0, [1.0] * 4, [0.5] * 2)


Hazards = st.lists(st.floats(0.05, 0.99), min_size=1, max_size=9)


@settings(max_examples=200)
@given(Hazards, st.floats(0.01, 1), st.floats(0, 0.2), st.floats(0, 1), st.data())
def test_late_hits_are_grown_to_the_best_rate(
    hazards: list[float], step: float, slope: float, rest: float, data: st.DataObject
) -> None:
    lookahead = len(hazards)
    done = data.draw(st.integers(0, lookahead))
    verify = [1 + slope * k for k in range(lookahead + 1)]
    n = steps_to_serve(done, lookahead, step, verify, hazards, rest)
    assert 0 <= n <= lookahead - done

    def worth(more: int) -> float:
        tokens = expected_tokens_from_rates(hazards[: done + more])
        return tokens / (more * step + verify[done + more] + rest)

    assert worth(n) == pytest.approx(max(worth(m) for m in range(lookahead - done + 1)), rel=1e-12)
    assert n == steps_to_serve(done, lookahead, step, verify.__getitem__, hazards, rest)
    assert n >= steps_to_serve(done, lookahead, 1.5 * step, verify, hazards, rest)
    assert n <= steps_to_serve(done, lookahead, step, verify, hazards, rest + 0.5)


def test_free_steps_are_all_taken_and_dear_ones_are_not() -> None:
    assert steps_to_serve(3, 7, 0.0, [1.0] * 8, [0.8] * 7) == 4
    assert steps_to_serve(3, 7, 5.0, [1.0] * 8, [0.8] * 7) == 0
    assert steps_to_serve(7, 7, 0.0, [1.0] * 8, [0.8] * 7) == 0


@settings(max_examples=60)
@given(st.floats(0.5, 0.95), st.floats(0.02, 0.5), st.floats(0.1, 0.9), st.floats(0, 3))
def test_where_other_rounds_differ_the_long_run_s_rate_decides(
    alpha: float, step: float, share: float, backup: float
) -> None:
    """`share` of the rounds are late hits, the rest misses that last longer. Of all lengths, the
    one that is best in the long run is what its own long-run rate asks for."""
    lookahead, verify = 7, [1.0] * 8
    hazards = [alpha] * lookahead

    def long_run(n: int) -> float:
        tokens = share * expected_tokens(alpha, n) + (1 - share) * expected_tokens(alpha, 5)
        return tokens / (1 + share * n * step + (1 - share) * backup)

    best = max(range(lookahead + 1), key=long_run)
    n = steps_to_serve(0, lookahead, step, verify, hazards, rate=long_run(best))
    assert long_run(n) == pytest.approx(long_run(best), rel=1e-9)
