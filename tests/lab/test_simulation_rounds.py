"""Simulated rounds against the decoding loops in virtual time and against cases solved by hand;
the means and the noise that simulated chains give against those of simulated runs.

Statistical tests fix their seeds and allow five standard errors: false-alarm rate 6e-7 each.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mpissd.engine.backend.profile import load_profile
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.simulation import expected, follow, replay, sampled
from tests.lab.test_predict_loops import check, make_job

HOST = HostCosts(lead_sample=6e-5, link=4e-5, draft_read=4e-5, step=4e-5, keys=6e-5, wake=6e-5)


CASES: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "sd": {"mode": "sd", "lookahead": 5},
    "sd, short drafts": {"mode": "sd", "lookahead": 6, "backup_lookahead": 2},
    "sd, fast": {"mode": "sd", "lookahead": 4, "backup": "fast"},
    "sd, inline": {"mode": "sd", "num_drafts": 0, "lookahead": 4, "batch_size": 2},
    "ssd, late": {"mode": "ssd", "lookahead": 4},
    "ssd, very late": {"mode": "ssd", "lookahead": 7},
    "ssd, batch": {"mode": "ssd", "lookahead": 5, "batch_size": 5, "fan_out": "geometric:24"},
    "ssd, fast, short": {
        "mode": "ssd", "lookahead": 6, "batch_size": 4, "backup": "fast",
        "backup_lookahead": 2, "fan_out": "uniform:6",
    },
    "ssd, hits of a real pair": {
        "mode": "ssd", "lookahead": 5, "hit_law": "smollm2-chat", "batch_size": 3,
        "fan_out": "geometric:30", "backup_lookahead": 3,
    },
    "ssd, hits of two ends": {
        "mode": "ssd", "lookahead": 7, "hit_law": "power:A=1.1/0.1,r=0.3/0.9",
    },
    "ssd, lists of candidates": {
        "mode": "ssd", "lookahead": 4, "batch_size": 2, "fan_out": "geometric:40", "lm_head": True,
    },
    "ssd, tokens": {"mode": "ssd", "lookahead": 4, "batch_size": 3, "num_tokens": 60},
    "ssd, tokens, crowd": {
        "mode": "ssd", "lookahead": 5, "batch_size": 6, "num_tokens": 50, "fan_out": "uniform:2",
    },
}  # fmt: skip


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
def test_predicts_what_the_loops_do(flags: dict[str, Any]) -> None:
    check(make_job(**flags))


@pytest.mark.parametrize("seed", range(10))
def test_predicts_random_configurations(seed: int) -> None:
    rnd = random.Random(seed)
    lookahead = rnd.randint(1, 9)
    fan_outs = [f"uniform:{rnd.randint(1, 9)}", f"geometric:{rnd.randint(8, 60)}"]
    job = make_job(
        mode="ssd",
        pair=rnd.choice(["8b/1b", "3b/1b", "70b/8b", "8b/0.6b"]),
        lookahead=lookahead,
        batch_size=rnd.choice([1, 1, 2, 3, 4, 7, 16]),
        fan_out=rnd.choice(fan_outs),
        alpha=rnd.choice([0.5, 0.8, 0.95]),
        backup=rnd.choice(["jit", "fast"]),
        backup_lookahead=rnd.randint(1, lookahead),
        seed=seed,
    )
    check(job, rounds=40)


def test_only_a_glue_reads_lists_of_candidates() -> None:
    """By hand: a glue of 3.0 instead of 1.5 leaves room for one growth step less."""
    job = make_job(mode="ssd", lookahead=8, p_hit=1.0, alpha=1.0, lm_head=True, fan_out="uniform:3")
    device = DeviceCosts.from_points({1: 10.0}, {1: 1.5}, {4: {1: 3.0}})
    finish = replay(job, device, HostCosts(), 20)
    # glue ends at 3.0, steps at 4.5 … 9.0, 10.5: 5 of 8 when the outcome of t = 10 is seen.
    assert finish.steps[2:, 0].tolist() == [5] * 18
    np.testing.assert_allclose(finish.wait_s[2:, 0], 0.5 + 3 * 1.5)


def test_a_late_round_waits_for_whole_growth_steps() -> None:
    """By hand: hits are seen when the running step ends, then finished one lane at a time."""
    device = DeviceCosts.from_points({1: 10.0}, {1: 1.5})
    job = make_job(mode="ssd", lookahead=8, p_hit=1.0, alpha=1.0)
    finish = replay(job, device, HostCosts(), 20)
    # glue ends at 1.5, steps at 3.0 … 9.0, 10.5: the outcome of t = 10 is seen at 10.5 with 6 of 8.
    assert finish.steps[2:, 0].tolist() == [6] * 18
    np.testing.assert_allclose(finish.wait_s[2:, 0], 0.5 + 2 * 1.5)


def test_a_lead_that_commits_slowly_delays_the_round() -> None:
    """The speculation arrives at 2 · link + drafting = 2.4; the lead looks at 5."""
    device = DeviceCosts.from_points({1: 10.0}, {1: 0.1})
    job = make_job(mode="sd", lookahead=4)
    host = HostCosts(link=1.0, lead_commit=5.0)
    found = replay(job, device, host, 5)
    np.testing.assert_allclose(found.round_s, 15.0)
    np.testing.assert_allclose(found.wait_s, 0.0)
    assert expected(job, device, host).round_s[0] == pytest.approx(15.0)


def test_laws_give_the_mean_and_the_noise_of_runs() -> None:
    """300 runs of 30 rounds spread as the chains predict: their standard deviation is known to 4%,
    so 20% is five of its standard errors (false-alarm rate 6e-7); the mean is tested as well."""
    job = make_job(mode="ssd", lookahead=4, alpha=0.7)
    device = DeviceCosts.from_profile(load_profile("h100"), job)
    law = sampled(job, device, HOST, chains=512, num_rounds=30, seed=3)
    runs = [replay(job, device, HOST, 31, seed=s) for s in range(300)]
    rates = [r.tokens[1:].sum() / r.round_s[1:].sum() for r in runs]
    noise = law.tok_per_s_noise(30)
    assert np.std(rates) == pytest.approx(noise, rel=0.2)
    error = np.hypot(noise / np.sqrt(len(rates)), noise / np.sqrt(512))
    assert abs(np.mean(rates) - law.tok_per_s) < 5 * error


@pytest.mark.parametrize("name", CASES)
def test_given_its_outcomes_a_run_takes_as_long(name: str) -> None:
    """Whatever decided them: the outcomes of a replay, as a run's records."""
    job = make_job(**{"num_tokens": 60, "seed": 3, **CASES[name]})
    device = DeviceCosts.from_profile(load_profile("h100"), job)
    drawn = replay(job, device, HOST)
    followed = follow(job, device, HOST, drawn.sequences())
    assert np.array_equal(followed.round_s, drawn.round_s)
    decided = [0, 3, 4, 6]  # round, k, t*, hit; a sequence's place is not its id once others ended
    assert np.array_equal(followed.sequences()[:, decided], drawn.sequences()[:, decided])
