"""Arrivals in virtual time: every token is accounted for, and goodput follows the best way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest

from mpissd.common.config import RunConfig, parse_flags
from mpissd.serve.simulated import Arrival, simulate

EMULATED = {"backend": "emulated", "device": "h200", "batch_size": "16", "alpha": "0.8"}


def config(mode: str, lookahead: int = 0, **flags: str) -> RunConfig:
    drafts = {"lookahead": str(lookahead)} if lookahead else {}
    return parse_flags({**EMULATED, "pair": "8b/1b", "mode": mode, **drafts, **flags})


def arrivals(rate: float, count: int, seed: int = 0) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompts, tokens = rng.integers(10, 120, count).tolist(), rng.integers(40, 160, count).tolist()
    return [Arrival(*one) for one in zip(times, prompts, tokens, strict=True)]


def busy_s(requests: Sequence[object]) -> float:
    """Seconds from arrivals to last tokens, of all requests."""
    return sum(one.token_s[-1] - one.at_s for one in requests)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("mode", "lookahead"), [("ar", 0), ("sd", 4), ("ssd", 4)])
@pytest.mark.parametrize("auto", [False, True])
def test_every_token_of_every_arrival_is_sent_once_and_in_time(
    mode: str, lookahead: int, auto: bool
) -> None:
    asked = arrivals(200.0, 60)
    done = simulate(config(mode, lookahead), 1, asked, auto=auto, kv_tokens=768)
    assert [len(one.token_s) for one in done.requests] == [one.num_tokens for one in asked]
    for one in done.requests:
        assert one.token_s == sorted(one.token_s) and one.token_s[0] > one.at_s
        assert one.accepted <= one.drafted and one.hits <= one.rounds
    assert done.seconds == max(one.token_s[-1] for one in done.requests)
    assert done.preempted > 0, "768 tokens are too few for 16 sequences"


def test_a_lone_sequence_takes_as_long_as_the_emulated_backend_says() -> None:
    done = simulate(config("ar"), 1, [Arrival(0.0, 5, 101)])
    times = done.requests[0].token_s
    steps = np.diff(times)
    assert steps.min() == pytest.approx(steps.max(), rel=0.01)  # rounds of one row


@lru_cache(maxsize=64)
def load(rate: float, mode: str, lookahead: int, alpha: str, auto: bool = False) -> float:
    """Mean seconds a request takes, over 100 of them."""
    done = simulate(config(mode, lookahead, alpha=alpha), 1, arrivals(rate, 100), auto=auto)
    return busy_s(done.requests) / len(done.requests)


@pytest.mark.parametrize("alpha", ["0.3", "0.8"])
@pytest.mark.parametrize("rate", [5.0, 100.0])
def test_goodput_is_near_the_best_fixed_way_at_every_load(rate: float, alpha: str) -> None:
    fixed = {
        (mode, lookahead): load(rate, mode, lookahead, alpha)
        for mode, lookahead in [("ar", 0), ("sd", 2), ("ssd", 2), ("ssd", 6)]
    }
    auto = load(rate, "ssd", 6, alpha, auto=True)
    assert auto <= min(fixed.values()) / 0.95, fixed
    assert auto <= fixed["ar", 0] * 1.02
