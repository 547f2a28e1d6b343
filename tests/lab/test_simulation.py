"""The means of the simulation against closed formulas, at fixed seeds."""

import itertools
from typing import Any

import numpy as np
import pytest

from mpissd.common import theory
from mpissd.common.config import RunConfig
from mpissd.engine.job import Job, resolve
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.grid import Grid
from mpissd.lab.predict.simulation import expect, expected

FREE = HostCosts()
EXACT, NEAR = 1e-9, 6e-3  # largest relative errors: without growth, and of 8,192 rounds


def make_job(**flags: Any) -> Job:
    config = RunConfig(**{"pair": "8b/1b", "backend": "emulated", **flags})
    return resolve(config, 1, backend="emulated", memory_bytes=None)


def test_a_mean_does_not_depend_on_the_others_in_the_grid() -> None:
    """Bit for bit: all configurations read the same draws, of SSD, SD and AR, of every K."""
    ways = itertools.product((0.5, 0.9), ("uniform:2", "geometric:30"), ("jit", "fast"), (1, 6))
    names = ("alpha", "fan_out", "backup", "backup_lookahead")
    jobs = [
        make_job(mode="ssd", lookahead=6, batch_size=3, **dict(zip(names, way, strict=True)))
        for way in ways
    ]
    jobs += [make_job(mode="ssd", lookahead=k, batch_size=3) for k in (1, 9)]
    jobs += [make_job(mode=mode, batch_size=3) for mode in ("ar", "sd")]
    lists = {1: {1: 9e-4, 90: 2e-3}, 9: {1: 1.1e-3, 90: 3e-3}}
    device = DeviceCosts.from_points({1: 5e-3, 64: 7e-3}, {1: 9e-4, 90: 2e-3}, lists)
    host = HostCosts(link=2e-5, keys=5e-5, step=4e-5, nap=1e-4, patience=2e-4)
    together = expect(Grid.of(jobs, device, host))
    alone = [expect(Grid.of([job], device, host)) for job in jobs]
    for name in ("tok_per_s", "round_s", "tokens", "hit_rate", "wait_s"):
        assert getattr(together, name).tolist() == [getattr(one, name)[0] for one in alone]


def speedup_sd(tokens: float, ratio: float, t_draft: float) -> float:
    """SD over AR [Leviathan, theorem 3.8, with r = t_target(b(K+1)) / t_target(1) for its 1]."""
    return tokens / (ratio + t_draft)


def speedup_ssd(
    p_hit: float, hit: float, miss: float, ratio: float, growth: float, backup: float, b: int = 1
) -> float:
    """SSD over AR [Kumar, Dao, May, theorem 7; corollary 16 for b sequences]; hit, miss: tokens."""
    all_hit = p_hit**b
    round_s = all_hit * max(ratio, growth) + (1 - all_hit) * (ratio + backup)
    return (p_hit * hit + (1 - p_hit) * miss) / round_s


# Time is counted in single-row forwards: t_target(1) = 1.


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(("alpha", "lookahead"), [(0.9, 2), (0.6, 5), (0.0, 3), (1.0, 4)])
def test_sd_is_leviathan_s(alpha: float, lookahead: int, inline: bool) -> None:
    ratio, step = 1.05, 0.12
    device = DeviceCosts.from_points({1: 1.0, lookahead + 1: ratio}, {1: step})
    job = make_job(mode="sd", lookahead=lookahead, alpha=alpha, num_drafts=0 if inline else 1)
    tokens = theory.expected_tokens(alpha, lookahead)
    speedup = speedup_sd(tokens, ratio, lookahead * step)
    assert expected(job, device, FREE).tok_per_s[0] == pytest.approx(speedup, rel=EXACT)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("p_hit", [0.0, 0.4, 0.9, 1.0])
def test_ssd_is_the_paper_s_where_growth_hides(p_hit: float, batch: int) -> None:
    """T_p ≤ r: theorem 7 and its batch form, H = h^b."""
    lookahead, alpha, ratio, step = 4, 0.8, 1.1, 0.15
    device = DeviceCosts.from_points({1: 1.0, batch: 1.0, batch * 5: ratio}, {1: step})
    job = make_job(mode="ssd", lookahead=lookahead, alpha=alpha, p_hit=p_hit, batch_size=batch)
    tokens = theory.expected_tokens(alpha, lookahead)
    assert 5 * step < ratio  # glue and K steps
    speedup = speedup_ssd(p_hit, tokens, tokens, ratio, 5 * step, 4 * step, batch)
    found = expected(job, device, FREE)
    assert found.tok_per_s[0] / batch == pytest.approx(speedup, rel=NEAR)
    assert found.hit_rate[0] == pytest.approx(p_hit, abs=NEAR)


def test_ssd_with_a_fast_backup_hides_everything() -> None:
    """T_b = 0; misses verify K_b tokens of another acceptance model."""
    device = DeviceCosts.from_points({1: 1.0}, {1: 0.1})
    job = make_job(mode="ssd", lookahead=4, alpha=0.9, p_hit=0.6, backup="fast",
                   acceptance_fast="alpha:0.2", backup_lookahead=3)  # fmt: skip
    hit, miss = theory.expected_tokens(0.9, 4), theory.expected_tokens(0.2, 3)
    speedup = speedup_ssd(0.6, hit, miss, 1.0, 0.5, 0.0)
    assert expected(job, device, FREE).tok_per_s[0] == pytest.approx(speedup, rel=NEAR)


def test_hit_rate_is_the_stationary_one_of_two_laws() -> None:
    """After a miss only K_b = 1 token is verified, so another mix of k, hence of F_k, follows."""
    device = DeviceCosts.from_points({1: 1.0}, {1: 0.01})
    flags = {"fan_out": "list:1,2,4,8", "backup_lookahead": 1, "hit_law": "power:A=.75,r=1"}
    job = make_job(mode="ssd", lookahead=3, alpha=0.7, **flags)
    p_hits = [1 - theory.power_law_miss(f, 0.75, 1.0) for f in (1, 2, 4, 8)]
    after_hit = sum(
        w * p for w, p in zip(theory.accept_probabilities([0.7] * 3), p_hits, strict=True)
    )
    after_miss = 0.3 * p_hits[0] + 0.7 * p_hits[1]
    found = expected(job, device, FREE)
    rate = after_miss / (1 - after_hit + after_miss)  # of a chain of two states
    assert found.hit_rate[0] == pytest.approx(rate, rel=NEAR)


def test_a_round_that_takes_no_time_has_no_rate() -> None:
    device = DeviceCosts.from_points({1: 0.0}, {1: 0.0})
    for flags in ({"mode": "ar"}, {"mode": "sd"}, {"mode": "ssd"}):
        assert expected(make_job(**flags), device, FREE).tok_per_s[0] == np.inf
