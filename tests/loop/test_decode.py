"""AR, SD and SSD by the same loops: every decision is as the models impose it, in any scenario.

The imposed model gives each sequence's tokens whatever the mode, K, policy or timing, so every way
emits the same tokens.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.engine.workload import gemm
from tests.loop.harness import Scenario, check_against_the_law, run


@pytest.mark.parametrize(("batch", "lookahead"), [(1, 7), (64, 2)])
def test_sd_and_ssd_decide_alike(batch: int, lookahead: int) -> None:
    scenario = Scenario("ssd", batch, lookahead, p_hit=0.5, rounds=12, seed=2)
    ssd, sd = run(scenario), run(replace(scenario, mode="sd"))
    inline = run(replace(scenario, mode="sd", inline=True))
    assert ssd.outcome_digest == sd.outcome_digest == inline.outcome_digest
    assert ssd.records.tokens() == sd.records.tokens() == inline.records.tokens()
    for result in (ssd, sd, inline):  # the draft's own rows, whatever its rank
        assert result.rig.drafter.table(0, 99)[:, 0].tolist() == list(range(12))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("lookahead", "backup"), [(1, "jit"), (4, "fast"), (9, "jit")])
def test_windows_of_draws_are_refilled(
    batch: int, lookahead: int, backup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten windows; each sequence has a pace of its own."""
    monkeypatch.setattr(gemm, "WINDOW", 64)
    rates = tuple(0.9 - 0.08 * n for n in range(lookahead))
    told = {"rates": rates, "backup": backup, "num_tokens": 640, "rounds": None, "seed": 3}
    check_against_the_law(run(Scenario("ssd", batch, lookahead, **told)))


@settings(max_examples=120)
@given(st.data())
def test_any_scenario(data: st.DataObject) -> None:
    """Sequences end raggedly, a round may bring more tokens than requested, and followers run the
    lead's forwards."""
    draw = data.draw
    lookahead = draw(st.integers(1, 7), "K")
    p_hit = draw(st.sampled_from([None, 0.0, 0.5, 1.0]), "p_hit")
    least = 1 if p_hit else 0
    fans = st.lists(st.integers(least, 5), min_size=lookahead + 1, max_size=lookahead + 1)
    fan_out = draw(fans.filter(any), "F")
    rates = st.sampled_from([0.0, 0.4, 0.9, 1.0])
    mode, inline = draw(
        st.sampled_from([*3 * [("ssd", False)], ("sd", False), ("sd", True), ("ar", False)]), "mode"
    )
    scenario = Scenario(
        mode=mode,
        inline=inline,
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
        num_followers=draw(st.sampled_from([0, 0, 1, 3]), "followers"),
    )
    result = run(scenario)
    check_against_the_law(result)
    log = result.rig.target_forwards.log
    assert [rows for rows, _ in log] == list(result.records.num_rows())
    assert result.follower_logs == [log] * scenario.num_followers
    sizes = np.bincount(result.rows[:, 0])
    assert (np.diff(sizes) <= 0).all() and sizes[0] == scenario.batch
