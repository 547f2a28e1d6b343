"""AR, SD and SSD by the same loops: equal tokens, and decisions as the models impose them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.rounds import Source
from tests.loop.harness import Scenario, check_against_the_law, run

SHAPES = [(1, 7), (64, 2)]  # (batch, K)


@pytest.mark.parametrize("p_hit", [0.5, None])
@pytest.mark.parametrize(("batch", "lookahead"), SHAPES)
def test_sd_and_ssd_decide_alike(p_hit: float | None, batch: int, lookahead: int) -> None:
    scenario = Scenario("ssd", batch, lookahead, p_hit=p_hit, rounds=12, seed=2)
    ssd, sd = run(scenario), run(replace(scenario, mode="sd"))
    inline = run(replace(scenario, mode="sd", inline=True))
    assert ssd.outcome_digest == sd.outcome_digest == inline.outcome_digest
    assert ssd.records.tokens() == sd.records.tokens() == inline.records.tokens()
    assert set(sd.rows[:, 5]) == {Source.JIT} and not sd.rows[:, 6].any()
    for result in (ssd, sd, inline):  # the draft's own rows, whatever its rank
        assert result.rig.drafter.table(0, 99)[:, 0].tolist() == list(range(12))


EVERY_WAY = [
    Scenario("ar"),
    Scenario("sd", lookahead=1),
    Scenario("sd", lookahead=7),
    Scenario("sd", inline=True),
    Scenario("sd", backup="fast"),
    Scenario("sd", backup_lookahead=2),
    Scenario("ssd", lookahead=1, fan_out=(1, 5)),
    Scenario("ssd", fan_out=(0, 3, 0, 1, 2)),
    Scenario("ssd", p_hit=0.5),
    Scenario("ssd", p_hit=1.0),
    Scenario("ssd", backup="fast", p_hit=0.7),
    Scenario("ssd", backup_lookahead=1),
    Scenario("ssd", rates=(1.0, 0.0, 1.0, 0.5)),
    Scenario("ssd", rates=(0.0,) * 4),
    Scenario("ssd", rates=(1.0,) * 4),
]


@pytest.mark.parametrize("batch", [1, 3])
def test_every_way_emits_the_same_tokens(batch: int) -> None:
    """By any mode, K, acceptance model, policy and timing; the first 40 tokens of each sequence."""
    digests = set()
    for scenario in EVERY_WAY:
        result = run(replace(scenario, batch=batch, num_tokens=40, rounds=None, seed=9))
        check_against_the_law(result)
        assert result.fewest_tokens >= 40
        digests.add(result.token_digest(40))
    assert len(digests) == 1


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 33])
def test_sequences_finish_raggedly_and_the_batch_shrinks(mode: str, num_tokens: int) -> None:
    """A round may bring more tokens than requested, the first one too."""
    scenario = Scenario(mode, 5, 4, num_tokens=num_tokens, rounds=None, seed=4)
    result = run(scenario)
    check_against_the_law(result)
    tokens = result.records.tokens()
    assert all(num_tokens <= len(t) <= num_tokens + scenario.K for t in tokens.values())
    sizes = np.bincount(result.rows[:, 0])
    assert (np.diff(sizes) <= 0).all() and sizes[0] == 5 and sizes[-1] >= 1
    assert [rows for rows, _ in result.rig.target_forwards.log] == list(result.records.num_rows())
    if num_tokens == 33 and mode != "ar":
        assert len(set(sizes)) > 1, "all finished at once: choose another seed"


@pytest.mark.parametrize("num_followers", [1, 3])
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_followers_run_the_lead_s_forwards(mode: str, num_followers: int) -> None:
    result = run(
        Scenario(mode, 3, num_tokens=20, rounds=None, num_followers=num_followers, p_hit=0.5)
    )
    check_against_the_law(result)
    assert len(result.follower_logs) == num_followers
    for log in result.follower_logs:
        assert log == result.rig.target_forwards.log


@settings(max_examples=60)
@given(st.data())
def test_any_scenario(data: st.DataObject) -> None:
    draw = data.draw
    lookahead = draw(st.integers(1, 6), "K")
    p_hit = draw(st.sampled_from([None, 0.0, 0.5, 1.0]), "p_hit")
    least = 1 if p_hit else 0
    fans = st.lists(st.integers(least, 5), min_size=lookahead + 1, max_size=lookahead + 1)
    fan_out = draw(fans.filter(any), "F")
    rates = st.sampled_from([0.0, 0.4, 0.9, 1.0])
    scenario = Scenario(
        mode=draw(st.sampled_from(["ssd", "ssd", "ssd", "sd"]), "mode"),
        batch=draw(st.integers(1, 6), "b"),
        lookahead=lookahead,
        fan_out=tuple(fan_out),
        rates=tuple(draw(st.lists(rates, min_size=lookahead, max_size=lookahead), "a")),
        fast_rate=draw(rates, "fast"),
        p_hit=p_hit,
        backup=draw(st.sampled_from(["jit", "fast"]), "backup"),
        backup_lookahead=draw(st.integers(1, lookahead), "K_b"),
        num_tokens=draw(st.sampled_from([None, 1, 9, 30]), "N"),
        rounds=draw(st.integers(1, 8), "rounds"),
        vocab=max(fan_out) + 2 + draw(st.sampled_from([0, 1, 1000]), "V"),
        seed=draw(st.integers(0, 2**64 - 1), "seed"),
    )
    check_against_the_law(run(scenario))
