"""The markov workload in the real loops: the emitted tokens, and the messages sent for them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.records import outcome_digest
from tests.loop.markov_rig import Pair, decode, greedy

GREEDY = Pair(temperature=0.0, vocab=12, order=2, lookahead=3, prompt_tokens=3, seed=4)


@settings(max_examples=25)
@given(st.data())
def test_any_pair_emits_what_its_target_or_sd_emits(data: st.DataObject) -> None:
    """At temperature 0 the target's likeliest tokens, in every mode. Above it SSD draws what SD
    draws, token by token and round by round."""
    draw = data.draw
    K, F = draw(st.integers(1, 5), "K"), st.integers(0, 12)
    lists = st.lists(F, min_size=K + 1, max_size=K + 1).filter(any)
    pair = replace(
        GREEDY,
        temperature=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0, 2.0]), "temperature"),
        divergence=draw(st.sampled_from([0.0, 0.3, 1.0]), "divergence"),
        saguaro_c=draw(st.sampled_from([1.0, 1.0, 0.0]), "C"),
        seed=draw(st.integers(0, 99), "seed"),
        batch=draw(st.integers(1, 6), "b"),
        lookahead=K,
        fan_out=tuple(draw(lists, "F")),
        fan_out_miss=tuple(draw(lists, "F after a miss")),
    )
    if pair.temperature:
        pair = replace(pair, saguaro_c=1.0)
        ssd, sd = decode(pair, 15), decode(replace(pair, mode="sd"), 15)
        inline = decode(replace(pair, mode="sd", is_inline=True), 15)
        assert ssd.tokens == sd.tokens == inline.tokens
        assert outcome_digest(ssd.rows) == outcome_digest(sd.rows)
        return
    way = draw(st.sampled_from(["ar", "sd", "inline", "ssd"]), "way")
    pair = replace(
        pair,
        mode="sd" if way == "inline" else way,
        is_inline=way == "inline",
        backup=draw(st.sampled_from(["jit", "fast"]), "backup"),
        backup_lookahead=draw(st.integers(1, K), "K_b"),
    )
    assert decode(pair, 15).first(15) == greedy(pair, 15)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_token_ends_a_sequence_in_every_mode(temperature: float) -> None:
    """Later tokens of the same round were never emitted; the others go on."""
    base = replace(GREEDY, temperature=temperature, batch=6, vocab=8, divergence=0.2)
    modes = [
        base,
        replace(base, mode="sd"),
        replace(base, mode="sd", is_inline=True),
    ]
    if temperature == 0:
        modes += [replace(base, mode="ar"), replace(base, backup="fast")]
    found = [decode(pair, 40, stop_token=7).tokens for pair in modes]
    found = [{n: tokens[:40] for n, tokens in each.items()} for each in found]
    assert all(each == found[0] for each in found)
    if temperature == 0:
        assert found[0] == greedy(base, 40, stop_token=7)
    ended = {n: tokens for n, tokens in found[0].items() if 7 in tokens}
    assert len({len(tokens) for tokens in ended.values()}) > 1, "choose another stop token"
    assert all(tokens.index(7) == len(tokens) - 1 for tokens in ended.values())
