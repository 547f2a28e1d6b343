"""The advisor: against exhaustive search, the break-even of `theory`, and common sense on GPUs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from scipy.optimize import brentq

from mpissd.common import theory
from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.engine.backend.profile import Profile, load_profile
from mpissd.engine.job import resolve
from mpissd.lab.predict.advisor import Advice, by_speed, firsts, plan
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.derive import METHODS, host_of
from mpissd.lab.predict.grid import Config
from mpissd.lab.predict.search import (
    FULL,
    Choice,
    Laws,
    Placement,
    candidates,
    config_of,
    survey,
    weigh,
)
from mpissd.lab.predict.simulation import expected

HOST = HostCosts(
    lead_send=15e-6, lead_commit=10e-6, lead_launch=10e-6, lead_sample=60e-6, lead_record=7e-6,
    link=40e-6, draft_read=44e-6, draft_commit=12e-6, draft_lookup=4e-6, draft_assemble=21e-6,
    draft_send=7e-6, draft_record=4e-6, glue=5e-5, keys=6e-5, keys_lane=2e-7, step=5e-5, wake=6e-5,
)  # fmt: skip


def placements(
    config: RunConfig, profile: Profile, gpus: int, host: HostCosts = HOST
) -> list[Placement]:
    """Placements whose hosts cost as much as `host` where the profile has none."""
    hosts = dict.fromkeys(METHODS, host)
    return [replace(p, hosts=p.hosts or hosts) for p in survey(config, profile, gpus).placements]


def advise(gpus: int, device: str = "h200", **flags: Any) -> Advice:
    config = RunConfig(**{"pair": "70b/1b", **flags})
    return plan(config, placements(config, load_profile(device), gpus), gpus)


def random_cell(rnd: random.Random) -> tuple[RunConfig, list[Placement], int]:
    """A machine, a pair, its models, a batch and a number of GPUs on which the pair fits."""
    flags: dict[str, Any] = {
        "pair": rnd.choice(["70b/1b", "70b/8b", "8b/1b", "8b/0.6b", "32b/0.6b", "65b/noft-1.3b"]),
        "batch_size": rnd.choice([1, 1, 2, 4]),
        "alpha": rnd.uniform(0.2, 0.98),
        "acceptance_fast": f"alpha:{rnd.uniform(0, 0.6):.2f}",
        "lm_head": rnd.random() < 0.3,
        "context": rnd.choice([0, 0, 4096]),
    }
    if rnd.random() < 0.3:
        flags["p_hit"] = rnd.uniform(0.1, 0.99)
    else:
        flags["hit_law"] = f"power:A={rnd.uniform(0.3, 1)},r={rnd.uniform(0.4, 1.8)}"
    config, gpus = RunConfig(**flags), rnd.randint(1, 3)
    profile = load_profile(rnd.choice(["h100", "h200", "a100-80"]))
    scale = rnd.uniform(0, 2)
    host = HostCosts(**{name: scale * value for name, value in HOST.to_dict().items()})
    try:
        return config, placements(config, profile, gpus, host), gpus
    except ConfigError:  # too little memory
        return random_cell(rnd)


def shortfall(seed: int) -> float:
    """1 − advised / exhaustive in one random cell."""
    config, places, gpus = random_cell(random.Random(seed))
    advised, laws = plan(config, places, gpus).best, Laws.of(config)
    every = (c for p in places for c in candidates(p, laws, config.batch_size, gpus, FULL))
    best = by_speed(weigh(every, laws, places, quick=True))[:20]
    return 1 - advised.tok_per_s / by_speed(weigh(best, laws, places))[0].tok_per_s


@pytest.mark.slow
def test_close_to_exhaustive_search() -> None:
    """Within 2% of every K ≤ 16, uniform:1 … 10, fourteen budgets, every K_b and both backups, on
    every T that divides and fits."""
    assert max(shortfall(seed) for seed in range(3)) < 0.02


def test_what_is_advised_is_what_the_model_expects_of_that_job() -> None:
    """The flags of every choice, run through a job of its own, give the same rate."""
    config = RunConfig(pair="70b/1b", batch_size=2, alpha=0.85)
    profile = load_profile("h100")
    advice = plan(config, placements(config, profile, 4), 4)
    assert {c.method for c in advice.judged} == {
        *(("ar", 0), ("sd", 0), ("lookup", 0), ("sd", 1), ("ssd", 1))
    }
    for choice in firsts(advice.judged, lambda c: c.method):
        laws = {"pair": "70b/1b", "batch_size": "2", "alpha": "0.85"}
        job = resolve(
            parse_flags({**laws, **choice.flags()}), choice.tp, backend="emulated",
            memory_bytes=profile.memory_bytes,
        )  # fmt: skip
        device = DeviceCosts.from_profile(profile, job)
        found = expected(job, device, host_of(profile, job))
        assert found.tok_per_s[0] == pytest.approx(choice.tok_per_s, rel=1e-9)
        assert found.round_s[0] * 1e6 == pytest.approx(choice.round_us, rel=1e-9)


def test_memory_and_heads_limit_t() -> None:
    """70B is 137 GB: on 80 GB devices T = 1 doesn't fit; T = 3 and 5 hold unequal shares."""
    config = RunConfig(pair="70b/1b")
    assert [p.tp for p in placements(config, load_profile("h100"), 5)] == [2, 3, 4, 5]
    assert [p.tp for p in placements(config, load_profile("h200"), 5)] == [1, 2, 3, 4, 5]
    on_two = placements(config, load_profile("h100"), 2)
    assert [(p.tp, p.num_drafts) for p in on_two] == [(2, (0,))]  # no third GPU for a draft
    with pytest.raises(ConfigError, match="tp=1 needs"):
        placements(config, load_profile("h100"), 1)
    with pytest.raises(ConfigError, match="gpus=0"):
        placements(config, load_profile("h100"), 0)
    with pytest.raises(ConfigError, match="needs a pair"):
        placements(RunConfig(), load_profile("h100"), 1)


def test_a_good_draft_pays_and_a_bad_one_does_not() -> None:
    good, bad = advise(5, alpha=0.9), advise(5, alpha=0.05, p_hit=0.05, acceptance_fast="alpha:0")
    assert good.best.mode == "ssd" and good.gain is not None and good.gain > 1.2
    assert bad.best.mode == "ar"
    assert bad.gain is not None and bad.gain > 1


def test_unequal_shares_are_judged_between_the_equal_ones() -> None:
    """Products of 70B on three ranks: a + c/T, by T = 2 and T = 4, in AR, SD inline and lookups.
    OPT runs as no whole transformer, so that T = 5 is no use of its 72 heads."""
    config = RunConfig(pair="70b/1b", fuse=True)
    two, three, four = placements(config, load_profile("h200"), 4)[1:]
    assert (two.tp, three.tp, four.tp) == (2, 3, 4) and three.num_drafts == (0,)
    for rows in (1, 7, 16):
        low, middle, high = (float(place.device.verify(rows)) for place in (two, three, four))
        assert middle == pytest.approx(high + (low - high) / 3, rel=1e-9)
    judged = advise(3, alpha=0.8, fuse=True).judged
    assert {(c.mode, c.derived is None) for c in judged if c.tp == 3} == {
        *(("ar", False), ("sd", False), ("lookup", False))
    }
    opt = RunConfig(pair="66b/125m")
    assert [p.tp for p in placements(opt, load_profile("h200"), 6)] == [1, 2, 3, 4, 6]


def test_break_even_alpha_is_theory_s_for_sd() -> None:
    """One GPU, K = 1 … 16 for both; a lookup of no acceptance is slower than AR."""
    device = DeviceCosts.from_points({1: 1.0, 40: 1.4}, {1: 0.3, 40: 0.3})
    places = [Placement(1, device, (0,))]
    for alpha in (0.25, 0.9):
        found = plan(RunConfig(alpha=alpha, acceptance_fast="alpha:0"), places, 1)
        drafting = next(c for c in found.judged if c.mode == "sd")
        k = drafting.lookahead
        cost = float(device.verify(k + 1)) + k * 0.3
        wanted = brentq(lambda a, k, t: theory.expected_tokens(a, k) - t, 0, 1, (k, cost))
        assert found.break_even_alpha == pytest.approx(wanted, abs=1e-3)
        assert found.best.mode == ("ar" if alpha < wanted else "sd")


def test_break_even_p_hit_is_where_ssd_ties() -> None:
    config = RunConfig(pair="8b/1b", alpha=0.8, p_hit=0.9)
    places = placements(config, load_profile("h100"), 2)
    advice = plan(config, places, 2)
    assert advice.best.mode == "ssd" and advice.break_even_p_hit is not None
    ssd, place = advice.best, next(p for p in places if p.tp == advice.best.tp)
    flags = {"pair": "8b/1b", "alpha": "0.8", "p_hit": str(advice.break_even_p_hit)}
    tie = resolve(parse_flags({**flags, **ssd.flags()}), ssd.tp, backend="emulated",
                  memory_bytes=None)  # fmt: skip
    assert advice.rival is not None
    host = place.host(ssd.method)
    assert host is not None
    found = expected(tie, place.device, host).tok_per_s[0]
    assert found == pytest.approx(advice.rival.tok_per_s, rel=1e-3)


def test_a_slow_backup_for_one_a_fast_one_for_many() -> None:
    """Theorem 17: the round waits for its slowest sequence, so b sequences pay for one miss."""
    flags = {"pair": "8b/1b", "alpha": 0.8, "p_hit": 0.8, "acceptance_fast": "alpha:0"}
    alone, crowd = advise(2, "h100", **flags), advise(2, "h100", **flags, batch_size=16)
    assert (alone.best.mode, alone.best.backup) == ("ssd", "jit")
    assert (crowd.best.mode, crowd.best.backup) == ("ssd", "fast")


@pytest.mark.parametrize(
    "law", [{"hit_law": "power:A=.9,r=.7"}, {"p_hit": 0.6}, {}, {"hit_law": "smollm2-chat"}]
)
@pytest.mark.parametrize("way", [("jit", 6), ("fast", 1)])
@pytest.mark.parametrize("fan_out", ["geometric:24", "uniform:4"])
def test_both_fan_outs_of_a_search_are_those_of_a_job(
    fan_out: str, way: tuple[str, int], law: dict[str, Any]
) -> None:
    """After a hit, and after a backup that drafts K_b tokens of its own acceptance model."""
    config = RunConfig(pair="8b/1b", alpha=0.8, acceptance_fast="alpha:0.2", **law)
    choice = Choice("ssd", 1, 1, 2, 6, fan_out, *way, 100.0, 9.0, 0.8)
    flags = {"pair": "8b/1b", "alpha": "0.8", "acceptance_fast": "alpha:0.2", "batch_size": "2"}
    flags |= {name: str(value) for name, value in law.items()} | choice.flags()
    job = resolve(parse_flags(flags), 1, backend="emulated", memory_bytes=None)
    assert config_of(choice, Laws.of(config)) == Config.of(job)
    alike = fan_out == "uniform:4" or way == ("jit", 6)
    assert "p_hit" in law or (job.fan_out == job.fan_out_miss) == alike


def test_needs_a_machine_whose_rounds_take_time() -> None:
    with pytest.raises(ConfigError, match="0 placements"):
        plan(RunConfig(pair="8b/1b"), [], 4)
    config, null = RunConfig(pair="8b/1b"), load_profile("null")
    with pytest.raises(ConfigError, match="rounds take no time"):
        plan(config, survey(config, null, 2).placements, 2)
