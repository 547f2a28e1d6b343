"""The closed model against simulation, and against THEORY's formulas where they hold.

Simulations have fixed seeds. An error counts beyond four standard errors of the simulation: over
the 300 configurations a false alarm has probability 2%, were the bars at 0 %.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpissd.common import theory
from mpissd.common.config import RunConfig
from mpissd.engine.job import Job, resolve
from mpissd.lab.predict.closed import Cells, expect, expected
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.recurrence import expect_by_law
from mpissd.lab.predict.timing import Timing

FREE = HostCosts()
LATE_S = 1.0  # later than any draft


def make_job(**flags: Any) -> Job:
    config = RunConfig(**{"pair": "8b/1b", "backend": "emulated", **flags})
    return resolve(config, 1, backend="emulated", memory_bytes=None)


def random_case(seed: int) -> tuple[Job, DeviceCosts, HostCosts]:
    """A configuration, forwards and host costs, all over the place."""
    rnd = random.Random(seed)
    mode = rnd.choice(["ar", "sd", "ssd", "ssd", "ssd", "ssd"])
    lookahead, batch = rnd.randint(1, 12), rnd.choice([1, 1, 1, 1, 2, 3, 4, 8, 16])
    flags: dict[str, Any] = {"mode": mode, "batch_size": batch, "seed": seed}
    if mode != "ar":
        flags |= {"lookahead": lookahead, "alpha": round(rnd.uniform(0.3, 0.98), 3)}
    if mode == "sd":
        flags |= {"num_drafts": rnd.randint(0, 1), "backup_lookahead": rnd.randint(1, lookahead)}
    if mode == "ssd":
        fan_outs = [f"uniform:{rnd.randint(1, 8)}", f"geometric:{rnd.randint(lookahead + 1, 60)}"]
        flags |= {
            "fan_out": rnd.choice(fan_outs),
            "on_late": rnd.choice(["finish", "serve"]),
            "backup": rnd.choice(["jit", "fast"]),
            "backup_lookahead": rnd.randint(1, lookahead),
            "acceptance_fast": f"alpha:{rnd.uniform(0.1, 0.6):.2f}",
        }
        if rnd.random() < 0.3:
            flags["p_hit"] = rnd.choice([0.0, 0.2, 0.5, 0.8, 0.9, 0.97, 1.0])
        else:
            flags |= {"hit_a": rnd.uniform(0.4, 1), "hit_r": rnd.uniform(0.5, 1.6)}
    if "hit_a" in flags and seed % 2:  # apart behind a rejection and where all were accepted
        a, r = flags.pop("hit_a"), flags.pop("hit_r")
        flags["hit_law"] = f"power:A={a}/{a * 0.4:.3f},r={r * 0.4:.3f}/{r}"
    job = make_job(**flags)
    verify, step = rnd.uniform(2e-3, 2e-2), rnd.uniform(0.02, 0.4)
    top = max(2, job.verify_rows, batch * sum(job.fan_out))
    device = DeviceCosts.from_points(
        {1: verify, top: verify * rnd.uniform(1, 1.6)},
        {1: verify * step, top: verify * step * rnd.uniform(1, 2)},
        {k: {1: verify * step * (1 + k / 20)} for k in (1, 6, 11) if seed % 3},
    )
    costs = {name: rnd.uniform(0, 6e-5) for name in HostCosts().to_dict()}
    costs |= {"keys_lane": rnd.uniform(0, 3e-7), "nap": rnd.choice([0.0, 3e-4])}
    costs |= {"patience": rnd.uniform(0, 3e-3)}
    return job, device, HostCosts(**costs)


@pytest.fixture(scope="module")
def errors(pytestconfig: pytest.Config) -> list[tuple[Job, float, float]]:
    """(job, relative error, relative standard error) of 100 random configurations; 300 if long."""
    found = []
    for seed in range(300 if pytestconfig.getoption("--long") else 100):
        job, device, host = random_case(seed)
        rounds = 60 if job.config.batch_size == 1 else 24
        law = expect_by_law(job, device, host, chains=400, num_rounds=rounds, seed=seed)
        # Of two stationary rounds a chain keeps the one that it begins with.
        means = {float(expected(job, device, host, s).tok_per_s[0]) for s in (0.0, LATE_S)}
        mean = min(means, key=lambda rate: abs(rate - law.tok_per_s))
        found.append((job, mean / law.tok_per_s - 1, law.tok_per_s_error / law.tok_per_s))
    return found


def test_a_lead_that_naps_once_may_nap_in_every_round() -> None:
    """A case with two stationary rounds, whose simulation keeps the longer one."""
    job, device, host = random_case(241)
    short, long = (expected(job, device, host, s) for s in (0.0, LATE_S))
    law = expect_by_law(job, device, host, chains=100, num_rounds=30, seed=241)
    assert long.tok_per_s[0] < 0.9 * short.tok_per_s[0]
    assert float(long.round_s[0]) == pytest.approx(law.round_s.mean(), rel=1e-3)
    calm = replace(host, nap=0.0)
    rates = [float(expected(job, device, calm, s).tok_per_s[0]) for s in (0.0, LATE_S)]
    assert rates[0] == rates[1]


def test_few_cases_have_two_stationary_rounds() -> None:
    cases = [random_case(seed) for seed in range(100)]
    both = [[expected(*case, s).tok_per_s[0] for s in (0.0, LATE_S)] for case in cases]
    assert sum(abs(long / short - 1) > 0.01 for short, long in both) <= 3


def test_within_a_percent_of_the_simulation(errors: list[tuple[Job, float, float]]) -> None:
    """1% at b = 1, 2% where it approximates; beyond the simulation's own error 0.3%."""
    for job, error, noise in errors:
        bar = 0.01 if job.config.batch_size == 1 else 0.02
        assert abs(error) < bar + 4 * noise, (job.config, error, noise)
        assert abs(error) < 0.003 + 4 * noise, (job.config, error, noise)
    assert np.median([abs(error) for _, error, _ in errors]) < 0.002


def test_is_not_biased(errors: list[tuple[Job, float, float]]) -> None:
    """The errors in standard errors are those of noise: mean within 5/√n, spread below 1.2."""
    scores = np.array([error / noise for job, error, noise in errors if job.lookahead])
    assert abs(scores.mean()) < 5 / np.sqrt(len(scores))
    assert scores.std() < 1.2  # 1 ± 0.04 were it noise alone


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    ways = itertools.product(
        (0.5, 0.9), ("uniform:2", "geometric:30"), ("finish", "serve"), ("jit", "fast"), (1, 6)
    )
    names = ("alpha", "fan_out", "on_late", "backup", "backup_lookahead")
    jobs = [
        make_job(mode="ssd", lookahead=6, batch_size=3, **dict(zip(names, way, strict=True)))
        for way in ways
    ]
    lists = {1: {1: 9e-4, 90: 2e-3}, 9: {1: 1.1e-3, 90: 3e-3}}
    device = DeviceCosts.from_points({1: 5e-3, 64: 7e-3}, {1: 9e-4, 90: 2e-3}, lists)
    host = HostCosts(link=2e-5, keys=5e-5, step=4e-5)
    parts = [Cells.of(job) for job in jobs]
    shared = {"lookahead": 6, "batch_size": 3, "inline": False}
    arrays = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in dataclasses.fields(Cells)
        if field.name not in shared
    }
    together = expect(Cells(**shared, **arrays), device, host)
    alone = [expected(job, device, host) for job in jobs]
    for name in ("tok_per_s", "round_s", "tokens", "hit_rate", "wait_s"):
        one_by_one = np.concatenate([getattr(found, name) for found in alone])
        np.testing.assert_allclose(getattr(together, name), one_by_one, rtol=1e-5)


# Time is counted in single-row forwards: t_target(1) = 1.


@pytest.mark.parametrize("batch", [1, 4])
def test_ar_is_the_unit(batch: int) -> None:
    device = DeviceCosts.from_points({1: 1.0, batch + 1: 1.0})
    found = expected(make_job(mode="ar", batch_size=batch), device, FREE)
    assert found.tok_per_s[0] == batch and found.wait_s[0] == 0


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(("alpha", "lookahead"), [(0.9, 2), (0.6, 5), (0.0, 3), (1.0, 4)])
def test_sd_is_leviathan_s(alpha: float, lookahead: int, inline: bool) -> None:
    ratio, step = 1.05, 0.12
    device = DeviceCosts.from_points({1: 1.0, lookahead + 1: ratio}, {1: step})
    job = make_job(mode="sd", lookahead=lookahead, alpha=alpha, num_drafts=0 if inline else 1)
    tokens = theory.expected_tokens(alpha, lookahead)
    speedup = theory.speedup_sd(tokens, ratio, lookahead * step)
    assert expected(job, device, FREE).tok_per_s[0] == pytest.approx(speedup)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("p_hit", [0.0, 0.4, 0.9, 1.0])
def test_ssd_is_the_paper_s_where_growth_hides(p_hit: float, batch: int) -> None:
    """T_p ≤ r: theorem 7 and its batch form, H = h^b."""
    lookahead, alpha, ratio, step = 4, 0.8, 1.1, 0.15
    device = DeviceCosts.from_points({1: 1.0, batch: 1.0, batch * 5: ratio}, {1: step})
    job = make_job(mode="ssd", lookahead=lookahead, alpha=alpha, p_hit=p_hit, batch_size=batch)
    tokens = theory.expected_tokens(alpha, lookahead)
    assert 5 * step < ratio  # glue and K steps
    speedup = theory.speedup_ssd(
        p_hit, tokens, tokens, verify_ratio=ratio, t_growth=5 * step, t_backup=4 * step,
        batch_size=batch,
    )  # fmt: skip
    found = expected(job, device, FREE)
    assert found.tok_per_s[0] / batch == pytest.approx(speedup, rel=1e-9)
    assert found.hit_rate[0] == pytest.approx(p_hit, abs=1e-9)


def test_ssd_with_a_fast_backup_hides_everything() -> None:
    """T_b = 0; misses verify K_b tokens of another law."""
    device = DeviceCosts.from_points({1: 1.0}, {1: 0.1})
    job = make_job(mode="ssd", lookahead=4, alpha=0.9, p_hit=0.6, backup="fast",
                   acceptance_fast="alpha:0.2", backup_lookahead=3)  # fmt: skip
    hit, miss = theory.expected_tokens(0.9, 4), theory.expected_tokens(0.2, 3)
    speedup = theory.speedup_ssd(0.6, hit, miss, verify_ratio=1.0, t_growth=0.5, t_backup=0.0)
    assert expected(job, device, FREE).tok_per_s[0] == pytest.approx(speedup)


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
    rate = theory.stationary_hit_rate(after_hit, after_miss)
    assert found.hit_rate[0] == pytest.approx(rate, rel=1e-5)


def test_the_recurrence_s_worked_numbers() -> None:
    """THEORY, one round: 8B/1B, K = 7, h = .7 served late with K_b = 3 beats K_b = 7 and finish."""
    device = DeviceCosts.from_points({1: 5.3, 8: 5.5}, {1: 0.9, 24: 0.95})
    flags = {"mode": "ssd", "lookahead": 7, "p_hit": 0.7, "fan_out": "uniform:3"}
    finish, serve, short = (
        float(expected(make_job(**flags, **way), device, FREE).tok_per_s[0])
        for way in ({}, {"on_late": "serve"}, {"on_late": "serve", "backup_lookahead": 3})
    )
    assert finish < serve < short


def test_a_round_that_takes_no_time_has_no_rate() -> None:
    device = DeviceCosts.from_points({1: 0.0}, {1: 0.0})
    for flags in ({"mode": "ar"}, {"mode": "sd"}, {"mode": "ssd"}):
        assert expected(make_job(**flags), device, FREE).tok_per_s[0] == np.inf


def test_timing_follows_the_buckets() -> None:
    """7 rows are verified in a program of 8 (b = 2, K = 4: 1, 2, 4, 8 and 10)."""
    job = make_job(mode="sd", lookahead=4, batch_size=2)
    device = DeviceCosts.from_points({n: float(n) for n in range(1, 11)}, {1: 1.0, 10: 10.0})
    timing = Timing.of(job, device, FREE)
    assert timing.verify_s[[1, 2, 3, 7, 9, 10]].tolist() == [1, 2, 4, 8, 10, 10]
    assert timing.lanes_s[[1, 2]].tolist() == [1, 2]


def test_hits_of_two_ends_against_a_simulation() -> None:
    """Rounds drawn by hand: K = 4, K_b = 2, geometric:20, alpha .7, an A and r for each end.

    200,000 rounds, seed 8: the hit rate is known to .0012 (the chain's memory is short), five of
    which are allowed.
    """
    law = ((0.9, 0.4), (0.2, 0.9))  # (A, r) behind a rejection, and where all were accepted
    job = make_job(
        mode="ssd", lookahead=4, alpha=0.7, backup_lookahead=2, fan_out="geometric:20",
        hit_law="power:A=0.9/0.2,r=0.4/0.9",
    )  # fmt: skip
    rnd, hit, hits = random.Random(8), False, 0
    for _ in range(200_000):
        served, fan_out = (4, job.fan_out) if hit else (2, job.fan_out_miss)
        k = 0
        while k < served and rnd.random() < 0.7:
            k += 1
        a, r = law[k == served]
        kept = fan_out[k]
        hit = kept > 0 and rnd.random() >= min(1.0, a * kept**-r)
        hits += hit
    device = DeviceCosts.from_points({1: 5e-3}, {1: 1e-4})
    assert job.fan_out != job.fan_out_miss
    assert float(expected(job, device, FREE).hit_rate[0]) == pytest.approx(hits / 2e5, abs=0.006)
