"""Arrivals in virtual time: every token is accounted for, and goodput follows the best way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from mpissd.common.config import RunConfig, parse_flags
from mpissd.engine import Decoder
from mpissd.engine.backend.profile import role_profiles
from mpissd.engine.decode.goodput import Goodput, Way
from mpissd.engine.decode.round import RoundResult
from mpissd.engine.job import resolve
from mpissd.lab.load import simulated as server
from mpissd.lab.load.simulated import Asked as Arrival
from mpissd.lab.load.simulated import VirtualLoop, costs_of, outcomes_of, simulate
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.derive import host_of
from mpissd.lab.predict.simulation import sampled

RECORDING = "results/recordings/smollm2-chat.npz"
CPU_ROWS = Path("results/serving-control/cpu_rows.json")  # a real pair's forwards on two cores
EMULATED = {"backend": "emulated", "device": "h200", "batch_size": "16", "alpha": "0.8"}


def config(mode: str, lookahead: int = 0, **flags: str) -> RunConfig:
    told = {**EMULATED, "pair": "8b/1b", "mode": mode, **flags}
    return parse_flags(told | ({"lookahead": str(lookahead)} if lookahead else {}))


def arrivals(rate: float, count: int, seed: int = 0) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompts, tokens = rng.integers(10, 120, count).tolist(), rng.integers(40, 160, count).tolist()
    return [Arrival(*one) for one in zip(times, prompts, tokens, strict=True)]


def busy_s(requests: Sequence[object]) -> float:
    """Seconds from arrivals to last tokens, of all requests."""
    return sum(one.token_s[-1] - one.at_s for one in requests)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("mode", "lookahead", "auto"), [("ar", 0, False), ("ssd", 4, False), ("ssd", 4, True)]
)
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
    steps = np.diff(times)[:-1]  # the last token is sent after the last round
    assert steps.min() == pytest.approx(steps.max(), rel=0.01)  # rounds of one row


@lru_cache(maxsize=64)
def load(rate: float, mode: str, lookahead: int, alpha: str, auto: bool = False) -> float:
    """Mean seconds a request takes, over 100 of them."""
    done = simulate(config(mode, lookahead, alpha=alpha), 1, arrivals(rate, 100), auto=auto)
    return busy_s(done.requests) / len(done.requests)


@pytest.mark.parametrize("rate", [100.0])
def test_goodput_is_near_the_best_lookahead_of_a_draft_on_the_target_s_device(rate: float) -> None:
    inline = {"num_drafts": "0", "batch_size": "32"}
    fixed = [config("ar"), *(config("sd", k, **inline) for k in (1, 3, 6))]
    every = [busy_s(simulate(one, 1, arrivals(rate, 100)).requests) for one in fixed]
    auto = simulate(config("sd", 6, **inline), 1, arrivals(rate, 100), auto=True)
    assert busy_s(auto.requests) <= min(every) / 0.95
    assert set(auto.rounds_by) == {"ar", "sd", "ssd"} and not auto.rounds_by["ssd"]


@pytest.mark.parametrize(("rate", "alpha"), [(5.0, "0.3"), (100.0, "0.8")])
def test_goodput_is_near_the_best_fixed_way_at_every_load(rate: float, alpha: str) -> None:
    fixed = {
        (mode, lookahead): load(rate, mode, lookahead, alpha)
        for mode, lookahead in [("ar", 0), ("sd", 2), ("ssd", 2), ("ssd", 6)]
    }
    auto = load(rate, "ssd", 6, alpha, auto=True)
    assert auto <= min(fixed.values()) / 0.95, fixed
    assert auto <= fixed["ar", 0] * 1.02


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("ar", {}),
        ("sd", {"lookahead": "4"}),
        ("sd", {"lookahead": "4", "num_drafts": "0"}),
        ("ssd", {"lookahead": "4", "fan_out": "uniform:3"}),
        ("ssd", {"lookahead": "7", "fan_out": "geometric:40"}),
    ],
)
@pytest.mark.parametrize("batch", [1, 4])
def test_full_batches_are_as_fast_as_the_predictor_says(
    mode: str, flags: dict[str, str], batch: int
) -> None:
    told = config(mode, rounds="400", **{**flags, "batch_size": str(batch)})
    done = simulate(told, 1, [Arrival(0.0, 1, 4000)] * batch)
    until = min(one.token_s[-1] for one in done.requests)
    tokens = sum(at <= until for one in done.requests for at in one.token_s)
    profile, _ = role_profiles(told.device, None)
    job = resolve(told, 1, backend="emulated", memory_bytes=None)
    costs = costs_of(job, profile, profile), host_of(profile, job)
    expected = sampled(job, *costs, chains=64, num_rounds=64)
    noise = expected.tok_per_s_noise(done.requests[0].rounds)
    assert tokens / until == pytest.approx(expected.tok_per_s, abs=4 * noise, rel=0.005)


@pytest.mark.parametrize(
    ("pair", "tp", "device", "rate"), [("8b/1b", 1, "h100", 8.0), ("70b/1b", 4, "h200", 4.0)]
)
@pytest.mark.parametrize(
    ("mode", "lookahead", "drafts"), [("ar", 0, "0"), ("ssd", 4, "1"), ("sd", 2, "0")]
)
def test_prompts_make_nine_rounds_in_ten_at_most_30_percent_longer(
    monkeypatch: pytest.MonkeyPatch,
    pair: str,
    tp: int,
    device: str,
    rate: float,
    mode: str,
    lookahead: int,
    drafts: str,
) -> None:
    growth = list[float]()

    class Noted(VirtualLoop):
        """Notes by how much the prompts stored with running sequences lengthen a round."""

        def step(self) -> RoundResult:
            is_storing, rows = self.unstored > 0, len(self.live_ids) * (lookahead + 1)
            result = super().step()
            if is_storing and rows:
                waited_s = 0.0 if drafts == "1" else result.wait_s
                own_s = self.forward_s(rows) + waited_s
                growth.append((result.t_target_s + result.stored_s + waited_s) / own_s - 1)
            return result

    monkeypatch.setattr(server, "VirtualLoop", Noted)
    rng, asked = np.random.default_rng(0), arrivals(rate, 60)
    asked = [replace(one, prompt_tokens=int(rng.integers(200, 2000))) for one in asked]
    flags = {"pair": pair, "device": device, "batch_size": "64", "num_drafts": drafts}
    simulate(config(mode, lookahead, **flags), tp, asked)
    assert len(growth) > 100
    assert np.percentile(growth, 90) <= 0.3


def test_ssd_is_back_within_20_rounds_of_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = list[tuple[int, str]]()

    class Noted(Goodput):
        """Notes how many sequences every round had, and its mode."""

        def observe(self, way: Way, result: RoundResult, round_s: float) -> None:
            ways.append((len(result.outcome.rows), way.mode))
            super().observe(way, result, round_s)

    monkeypatch.setattr(server, "Goodput", Noted)
    asked = [Arrival(0.0, 20, 2000), *(Arrival(1.0, 20, 150) for _ in range(60))]
    simulate(config("ssd", 6, batch_size="64", alpha="0.2"), 1, asked, auto=True)
    busy = [n for n, (count, _) in enumerate(ways) if count > 30]
    after = ways[busy[-1] + 1 :]
    lone = next(n for n, (count, _) in enumerate(after) if count == 1)
    assert share(ways[20 : busy[0]], "ssd") > 0.9
    assert share(ways[busy[20] : busy[-1]], "ssd") < 0.5
    assert share(after[lone + 20 : lone + 120], "ssd") > 0.9


def share(ways: Sequence[tuple[int, str]], mode: str) -> float:
    """The share of rounds in a mode; another one is tried now and then."""
    return float(np.mean([found == mode for _, found in ways]))


def test_goodput_is_near_the_best_way_where_prompts_wait() -> None:
    rng, flags = np.random.default_rng(2), {**EMULATED, "pair": "8b/1b", "batch_size": "32"}
    flags |= {"workload": "replay", "recording": RECORDING, "seed": "2"}
    del flags["alpha"]
    times = np.cumsum(rng.exponential(1 / 1.5, 200)).tolist()
    prompts, tokens = rng.integers(20, 201, 200).tolist(), rng.integers(50, 251, 200).tolist()
    asked = [Arrival(*one) for one in zip(times, prompts, tokens, strict=True)]
    costs = DeviceCosts.from_dict(json.loads(CPU_ROWS.read_text())), HostCosts()
    ar = simulate(parse_flags({**flags, "mode": "ar"}), 1, asked, costs=costs)
    flags |= {"mode": "ssd", "fan_out": "uniform:3"}
    one = simulate(parse_flags({**flags, "lookahead": "1"}), 1, asked, costs=costs)
    auto = simulate(parse_flags({**flags, "lookahead": "7"}), 1, asked, auto=True, costs=costs)
    assert busy_s(auto.requests) <= min(busy_s(ar.requests), busy_s(one.requests)) / 0.95


def test_a_recording_gives_the_outcomes_of_a_replay() -> None:
    flags = {**EMULATED, "pair": "8b/1b", "workload": "replay", "recording": RECORDING}
    del flags["alpha"]
    told = parse_flags({**flags, "device": "null", "batch_size": "3", "fan_out": "uniform:3"})
    with Decoder(told) as decoder:
        while not decoder.is_over:
            decoder.step()
    rows = decoder.records.sequences()
    job = resolve(told, 1, backend="emulated", memory_bytes=None)
    for name in range(3):
        mine, emitted, hit = outcomes_of(job, name), 0, False
        for k, found in rows[rows[:, 1] == name][:, [3, 6]].tolist():
            assert (mine.accepted(emitted, 4, hit), hit) == (k, bool(found)), (name, emitted)
            hit = mine.hits(emitted, k, 3, k == 4)
            emitted += k + 1
    done = simulate(replace(told, device="h200"), 1, [Arrival(0.0, 10, 60)] * 3)
    assert sum(one.hits for one in done.requests) > 0
