"""Arrivals in virtual time: every token is accounted for, and goodput follows the best way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.rounds import Control
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

ROWS = Path("results/serving-control")  # measured forwards of a real pair
BASE = {"backend": "emulated", "device": "h200", "pair": "8b/1b", "batch_size": "16"}
REPLAY = {"workload": "replay", "recording": "results/recordings/smollm2-chat.npz"}
INLINE = {"num_drafts": "0", "batch_size": "32"}  # the draft on the target's own GPU
LONGER = {"prompts": (20, 201), "tokens": (50, 251)}  # as in results/serving-control


def config(mode: str, lookahead: int = 0, **flags: str) -> RunConfig:
    given = {**BASE, "mode": mode, **flags}
    if mode == "ar":
        given.pop("num_drafts", None)
    if "workload" not in flags:
        given = {"alpha": "0.8", **given}
    return parse_flags(given | ({"lookahead": str(lookahead)} if lookahead else {}))


def arrivals(
    rate: float,
    count: int,
    seed: int = 0,
    prompts: tuple[int, int] = (10, 120),
    tokens: tuple[int, int] = (40, 160),
) -> list[Arrival]:
    """Poisson arrivals, with uniform numbers of tokens of the prompt and of the answer."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    sizes = rng.integers(*prompts, count).tolist(), rng.integers(*tokens, count).tolist()
    return [Arrival(*one) for one in zip(times, *sizes, strict=True)]


def busy_s(requests: Sequence[Arrival]) -> float:
    """Seconds from arrivals to last tokens, of all requests."""
    return sum(one.token_s[-1] - one.at_s for one in requests)


def measured(name: str) -> tuple[DeviceCosts, HostCosts]:
    """SmolLM2's costs on a machine."""
    row = json.loads((ROWS / f"{name}_rows.json").read_text())
    tables = row["verify"], row.get("draft"), row.get("lists")
    return DeviceCosts.from_points(*tables), HostCosts(**row.get("host", {}))


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


Fixed = list[tuple[str, int]]  # ways: (mode, K)


@dataclass
class Load:
    """A load, the fixed (mode, K) that the controller is compared with, and its largest K."""

    asked: list[Arrival]
    flags: dict[str, str]
    fixed: Fixed
    lookahead: int
    costs: str | None = None  # the profile's, or measured ones


WAYS: Fixed = [("ar", 0), ("sd", 2), ("ssd", 2), ("ssd", 6)]
SAME_GPU: Fixed = [("ar", 0), ("sd", 3)]
LOADS = {
    "low, poor draft": Load(arrivals(5.0, 60), {"alpha": "0.3"}, WAYS, 6),
    "high, good draft": Load(arrivals(100.0, 60), {}, WAYS, 6),
    "inline": Load(arrivals(100.0, 60), INLINE, [*SAME_GPU, ("sd", 1), ("sd", 6)], 6),
    "inline, busy": Load(arrivals(128.0, 120, **LONGER), INLINE | REPLAY, SAME_GPU, 7, "h200"),
    "prompts wait": Load(
        arrivals(1.5, 120, 2, **LONGER),
        {**REPLAY, "seed": "2", "fan_out": "uniform:3", "batch_size": "32"},
        [("ar", 0), ("ssd", 1)],
        7,
        "cpu",
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_goodput_is_near_the_best_fixed_way(name: str) -> None:
    load = LOADS[name]
    costs = None if load.costs is None else measured(load.costs)
    is_inline = "num_drafts" in load.flags

    def seconds(mode: str, lookahead: int, *, auto: bool = False) -> float:
        run = config(mode, lookahead, **load.flags)
        done = simulate(run, 1, load.asked, auto=auto, costs=costs)
        assert not (auto and is_inline and done.rounds_by["ssd"])
        return busy_s(done.requests)

    fixed = {way: seconds(*way) for way in load.fixed}
    auto = seconds("sd" if is_inline else "ssd", load.lookahead, auto=True)
    assert auto <= min(fixed.values()) / 0.95, fixed
    assert name == "prompts wait" or auto <= fixed["ar", 0] / 0.98


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("ar", {}),
        ("sd", {"lookahead": "4"}),
        ("sd", {"lookahead": "4", "num_drafts": "0"}),
        ("ssd", {"lookahead": "7", "fan_out": "geometric:40"}),
    ],
)
@pytest.mark.parametrize("batch", [1, 4])
def test_full_batches_are_as_fast_as_the_predictor_says(
    mode: str, flags: dict[str, str], batch: int
) -> None:
    run = config(mode, rounds="400", **{**flags, "batch_size": str(batch)})
    done = simulate(run, 1, [Arrival(0.0, 1, 4000)] * batch)
    until = min(one.token_s[-1] for one in done.requests)
    tokens = sum(at <= until for one in done.requests for at in one.token_s)
    profile, _ = role_profiles(run.device, None)
    job = resolve(run, 1, backend="emulated", memory_bytes=None)
    costs = costs_of(job, profile, profile), host_of(profile, job)
    expected = sampled(job, *costs, chains=64, num_rounds=64)
    noise = expected.tok_per_s_noise(done.requests[0].rounds)
    assert tokens / until == pytest.approx(expected.tok_per_s, abs=4 * noise, rel=0.005)


@dataclass
class Round:
    """One round of a simulated loop. growth: by how much storing lengthens it, as a share."""

    control: Control
    result: RoundResult
    is_storing: bool
    growth: float


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """The rounds that verify, of all loops that are simulated."""
    seen = list[Round]()

    class Noted(VirtualLoop):
        def step(self) -> RoundResult:
            is_storing, control, result = self.unstored > 0, self.control, super().step()
            drafted = result.speculation.num_draft
            if len(drafted):
                wait_s = result.wait_s if self._job.inline else 0.0
                own_s = self.forward_s(len(drafted) + int(drafted.sum())) + wait_s
                growth = (result.t_target_s + wait_s + result.stored_s) / own_s - 1
                seen.append(Round(control, result, is_storing, growth))
            return result

    monkeypatch.setattr(server, "VirtualLoop", Noted)
    return seen


@pytest.mark.parametrize(
    ("pair", "tp", "device", "rate"), [("8b/1b", 1, "h100", 8.0), ("70b/1b", 4, "h200", 4.0)]
)
@pytest.mark.parametrize(
    ("mode", "lookahead", "drafts"), [("ar", 0, "0"), ("ssd", 4, "1"), ("sd", 2, "0")]
)
def test_prompts_make_nine_rounds_in_ten_at_most_30_percent_longer(
    rounds: list[Round],
    pair: str,
    tp: int,
    device: str,
    rate: float,
    mode: str,
    lookahead: int,
    drafts: str,
) -> None:
    rng, asked = np.random.default_rng(0), arrivals(rate, 60)
    asked = [replace(one, prompt_tokens=int(rng.integers(200, 2000))) for one in asked]
    flags = {"pair": pair, "device": device, "batch_size": "64", "num_drafts": drafts}
    simulate(config(mode, lookahead, **flags), tp, asked)
    growth = [each.growth for each in rounds if each.is_storing]
    assert len(growth) > 100 and np.percentile(growth, 90) <= 0.3


def auto_inline(asked: Sequence[Arrival]) -> list[Arrival]:
    """A load of SmolLM2 with its draft on the same H200, at K = 7."""
    run = config("sd", 7, **INLINE, **REPLAY)
    return simulate(run, 1, asked, auto=True, costs=measured("h200")).requests


def test_a_draft_on_the_same_gpu_makes_nine_rounds_in_ten_at_most_30_percent_longer(
    rounds: list[Round],
) -> None:
    auto_inline(arrivals(64.0, 100, **LONGER))
    assert sum(each.result.stored_s > 0 for each in rounds) > 100
    assert np.percentile([each.growth for each in rounds], 90) <= 0.3


def test_a_draft_on_the_same_gpu_stores_nothing_while_k_is_0_and_is_back_after_a_burst(
    rounds: list[Round],
) -> None:
    load = [Arrival(0.0, 20, 3000), *(Arrival(0.3, 150, 200) for _ in range(80))]
    auto = busy_s(auto_inline(load))
    seen = list(rounds)
    fixed = (("ar", 0), ("sd", 3))
    runs = [config(mode, k, **INLINE, **REPLAY) for mode, k in fixed]
    assert auto < min(
        busy_s(simulate(run, 1, load, costs=measured("h200")).requests) for run in runs
    )
    rounds[:] = seen
    assert not any(each.result.stored_s for each in rounds if not each.control.lookahead)
    counts = [len(each.result.outcome.rows) for each in rounds]
    busy = [n for n, count in enumerate(counts) if count > 16]
    burst = rounds[busy[100] : busy[-1]]
    assert np.mean([each.control.lookahead == 0 for each in burst]) > 0.5
    lone = next(n for n, count in enumerate(counts[busy[-1] :], busy[-1]) if count == 1)
    assert any(each.result.stored_s for each in rounds[busy[-1] :]), "what the burst committed"
    drafted = [each.result.speculation.num_draft[0] > 0 for each in rounds[lone + 40 :]]
    assert np.mean(drafted) > 0.9


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Way, RoundResult, float]]:
    """What goodput observes: the way, the result and the seconds of each round."""
    every = list[tuple[Way, RoundResult, float]]()
    observe = Goodput.observe

    def noted(self: Goodput, way: Way, result: RoundResult, round_s: float) -> None:
        every.append((way, result, round_s))
        observe(self, way, result, round_s)

    monkeypatch.setattr(Goodput, "observe", noted)
    return every


def test_what_is_stored_is_no_part_of_the_host_s_time_nor_subtracted_twice(
    seen: list[tuple[Way, RoundResult, float]],
) -> None:
    auto_inline(arrivals(8.0, 20, **LONGER))
    assert sum(result.stored_s > 0 for _, result, _ in seen) > 5
    host = measured("h200")[1]
    for _, result, round_s in seen:
        host_s = round_s - result.wait_s - result.t_target_s - result.stored_s
        assert host_s == pytest.approx(host.ask_s + host.lead_s)


def test_ssd_is_back_within_20_rounds_of_a_burst(
    seen: list[tuple[Way, RoundResult, float]],
) -> None:
    asked = [Arrival(0.0, 20, 2000), *(Arrival(1.0, 20, 150) for _ in range(60))]
    simulate(config("ssd", 6, batch_size="64", alpha="0.2"), 1, asked, auto=True)
    counts = [len(result.outcome.rows) for _, result, _ in seen]
    is_ssd = [way.mode == "ssd" for way, _, _ in seen]  # another mode is tried now and then
    busy = [n for n, count in enumerate(counts) if count > 30]
    lone = next(n for n, count in enumerate(counts) if n > busy[-1] and count == 1)
    assert np.mean(is_ssd[20 : busy[0]]) > 0.9
    assert np.mean(is_ssd[busy[20] : busy[-1]]) < 0.5
    assert np.mean(is_ssd[lone + 20 : lone + 120]) > 0.9


def test_a_recording_gives_the_outcomes_of_a_replay() -> None:
    flags = {"device": "null", "batch_size": "3", "fan_out": "uniform:3"}
    run = config("ssd", 4, **flags, **REPLAY, num_tokens="60")
    with Decoder(run) as decoder:
        while not decoder.is_over:
            decoder.step()
    rows = decoder.records.sequences()
    job = resolve(run, 1, backend="emulated", memory_bytes=None)
    for name in range(3):
        mine, emitted, hit = outcomes_of(job, name), 0, False
        for k, found in rows[rows[:, 1] == name][:, [3, 6]].tolist():
            assert (mine.accepted(emitted, 4, hit), hit) == (k, bool(found)), (name, emitted)
            hit = mine.hits(emitted, k, 3, k == 4)
            emitted += k + 1
    done = simulate(replace(run, device="h200"), 1, [Arrival(0.0, 10, 60)] * 3)
    assert sum(one.hits for one in done.requests) > 0
