"""The markov workload in the real loops: the emitted tokens, and the messages sent for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from mpissd.common.records import outcome_digest
from mpissd.common.rounds import Source
from mpissd.engine.comm.link import DraftEnd, LeadEnd
from tests.loop.markov_rig import Pair, decode, greedy

GREEDY = Pair(temperature=0.0, vocab=12, order=2, lookahead=3, prompt_tokens=3, seed=4)
# (divergence, fan-out): nothing hits, some do, nearly all do.
FORCED = {"misses": (1.0, (0, 0, 0, 1)), "natural": (0.35, (1, 1, 1, 2)), "hits": (0.0, (1,) * 4)}


@pytest.mark.parametrize("hits", FORCED)
@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_decoding_is_the_target_s_own(hits: str, batch: int) -> None:
    divergence, fan_out = FORCED[hits]
    pair = replace(GREEDY, divergence=divergence, fan_out=fan_out, batch=batch)
    done = decode(pair, 15)
    assert done.first(15) == greedy(pair, 15)
    counted = done.rows[done.rows[:, 0] > 0]
    rate = counted[:, 6].mean()
    assert rate == {"misses": 0, "hits": 1}.get(hits, rate)


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "ar"},
        {"mode": "sd"},
        {"mode": "sd", "is_inline": True},
        {"mode": "sd", "backup": "fast"},
        {"backup": "fast", "backup_lookahead": 1},
        {"saguaro_c": 0.0},
        {"fan_out": (12, 12, 12, 12)},
        {"fan_out": (1, 2, 0, 5), "fan_out_miss": (2, 0, 1, 1)},
    ],
    ids=str,
)
def test_greedy_decoding_is_the_same_in_every_mode(changes: dict[str, Any]) -> None:
    pair = replace(GREEDY, batch=3, **changes)
    assert decode(pair, 15).first(15) == greedy(pair, 15)


# Some of everything: temperature, seed, b, K, fan-out, its list after a miss.


@pytest.mark.parametrize(
    ("temperature", "seed", "batch", "K", "fan_out", "after_miss"),
    [
        (0.5, 2, 2, 5, (2,) * 6, (1,) * 6),
        (1.0, 2, 8, 3, (2, 2, 1, 4), None),
        (2.0, 2, 5, 2, (9, 9, 9), (3, 3, 3)),
    ],
)
def test_ssd_draws_what_sd_draws(
    temperature: float,
    seed: int,
    batch: int,
    K: int,
    fan_out: tuple[int, ...],
    after_miss: tuple[int, ...] | None,
) -> None:
    """Token by token and round by round, with hits finished and misses drafted just in time."""
    models = {"vocab": 25, "order": 2, "divergence": 0.3, "temperature": temperature, "seed": seed}
    lists = {"lookahead": K, "fan_out": fan_out, "fan_out_miss": after_miss}
    pair = Pair(batch=batch, **models, **lists)  # type: ignore[arg-type]
    ssd, sd = decode(pair, 30), decode(replace(pair, mode="sd"), 30)
    assert ssd.tokens == sd.tokens
    assert outcome_digest(ssd.rows) == outcome_digest(sd.rows)
    sources = Counter(ssd.rows[:, 5].tolist())
    assert sources[Source.CACHE] > 0 < sources[Source.JIT]
    assert 0 < ssd.rows[:, 3].mean() < K, "all accepted, or none"


def test_certain_tokens_among_others() -> None:
    """So cold that some rows are certain: those are sent without their distribution."""
    base = Pair(vocab=9, temperature=0.05, divergence=0.6, lookahead=4, batch=4, seed=1)
    told = dict[int, list[list[float]]]()

    def look(lead: LeadEnd, draft: DraftEnd) -> None:
        heard = lead.speculation

        def speculation(round_: int, count: int) -> Any:
            found = heard(round_, count)
            told[round_] = found.q.tolist()
            return found

        lead.speculation = speculation  # type: ignore[method-assign]

    sd = decode(replace(base, mode="sd"), 120, hook=look)
    wanted = 0  # rejections of an uncertain token after a certain one
    for round_, rows in told.items():
        accepted = sd.rows[sd.rows[:, 0] == round_, 3].tolist()
        wanted += sum(k < 4 and q[k] < 1 in q[:k] for q, k in zip(rows, accepted, strict=True))
    assert wanted > 3
    for pair in (base, replace(base, mode="sd", is_inline=True)):
        assert decode(pair, 120).tokens == sd.tokens


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
