"""A draft on the target's own GPU, in virtual time: it costs nothing while K is 0, and stores the
tokens that it lacks before it drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from mpissd.common.config import parse_flags
from mpissd.common.rounds import Control
from mpissd.engine.decode.goodput import Goodput, Way
from mpissd.engine.decode.round import RoundResult
from mpissd.lab.load import simulated as server
from mpissd.lab.load.simulated import Asked as Arrival
from mpissd.lab.load.simulated import VirtualLoop, simulate
from mpissd.lab.predict.costs import DeviceCosts, HostCosts

RECORDING = "results/recordings/smollm2-chat.npz"
H200_ROWS = Path("results/serving-control/h200_rows.json")  # a real pair's forwards on one GPU


def arrivals(rate: float, count: int) -> list[Arrival]:
    """Poisson arrivals, as in results/serving-control."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompts, tokens = rng.integers(20, 201, count).tolist(), rng.integers(50, 251, count).tolist()
    return [Arrival(*one) for one in zip(times, prompts, tokens, strict=True)]


def busy_s(requests: Sequence[Arrival]) -> float:
    """Seconds from arrivals to last tokens, of all requests."""
    return sum(one.token_s[-1] - one.at_s for one in requests)


def h200_costs() -> tuple[DeviceCosts, HostCosts]:
    """SmolLM2's costs on one GPU."""
    told = json.loads(H200_ROWS.read_text())
    return DeviceCosts.from_dict(told), HostCosts(**told["host"])


def inline(asked: Sequence[Arrival], mode: str, lookahead: int = 0) -> list[Arrival]:
    """The requests of a load of SmolLM2 with its draft on the same H200."""
    flags = {"pair": "8b/1b", "backend": "emulated", "device": "h200", "batch_size": "32"}
    flags |= {"workload": "replay", "recording": RECORDING, "mode": "ar" if mode == "ar" else "sd"}
    if mode != "ar":
        flags |= {"num_drafts": "0", "lookahead": str(lookahead)}
    told, auto = parse_flags(flags), mode == "auto"
    return simulate(told, 1, asked, auto=auto, costs=h200_costs()).requests


@pytest.mark.parametrize("rate", [32.0, 128.0])
def test_a_draft_on_a_real_pair_s_own_gpu_never_costs_more_than_two_percent(rate: float) -> None:
    asked = arrivals(rate, 200)
    ar, fixed = busy_s(inline(asked, "ar")), busy_s(inline(asked, "sd", 3))
    auto = busy_s(inline(asked, "auto", 7))
    assert auto <= ar / 0.98
    assert auto <= min(ar, fixed) / 0.95


class Rounds(VirtualLoop):
    """Keeps the control and the result of every round, and how much the storing of a draft's and of
    prompts' tokens lengthens it."""

    seen: ClassVar[list[tuple[Control, RoundResult, float]]] = []

    def step(self) -> RoundResult:
        control, result = self.control, super().step()
        drafted = result.speculation.num_draft
        own_s = self.forward_s(len(drafted) + int(drafted.sum())) + result.wait_s
        if len(drafted):
            self.seen.append((control, result, self._growth(result, own_s)))
        return result

    @staticmethod
    def _growth(result: RoundResult, own_s: float) -> float:
        return (result.t_target_s + result.wait_s + result.stored_s) / own_s - 1


@pytest.mark.parametrize("rate", [64.0])
def test_prompts_and_catching_up_make_nine_rounds_in_ten_at_most_30_percent_longer(
    monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    monkeypatch.setattr(Rounds, "seen", [])
    monkeypatch.setattr(server, "VirtualLoop", Rounds)
    inline(arrivals(rate, 100), "auto", 7)
    stored = [growth for _, result, growth in Rounds.seen if growth > 0]
    assert len(stored) > 100 and sum(result.stored_s > 0 for _, result, _ in Rounds.seen) > 5
    assert np.percentile([growth for *_, growth in Rounds.seen], 90) <= 0.3


def test_a_draft_on_the_same_gpu_stores_nothing_while_k_is_0_and_is_back_after_a_burst(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rounds, "seen", [])
    monkeypatch.setattr(server, "VirtualLoop", Rounds)
    asked = [Arrival(0.0, 20, 3000), *(Arrival(0.3, 150, 200) for _ in range(80))]
    auto, seen = busy_s(inline(asked, "auto", 7)), Rounds.seen
    assert not any(result.stored_s for control, result, _ in seen if not control.lookahead)
    counts = [len(result.outcome.rows) for _, result, _ in seen]
    busy = [n for n, count in enumerate(counts) if count > 16]
    assert np.mean([control.lookahead == 0 for control, *_ in seen[busy[100] : busy[-1]]]) > 0.5
    lone = next(n for n, count in enumerate(counts[busy[-1] :], busy[-1]) if count == 1)
    assert (
        np.mean([result.speculation.num_draft[0] > 0 for _, result, _ in seen[lone + 40 :]]) > 0.9
    )
    assert auto <= min(busy_s(inline(asked, "ar")), busy_s(inline(asked, "sd", 3))) / 0.98


def test_what_is_stored_is_no_part_of_the_host_s_time_nor_taken_off_it_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = list[tuple[RoundResult, float]]()

    def observe(self: Goodput, way: Way, result: RoundResult, round_s: float) -> None:
        seen.append((result, round_s - result.wait_s - result.t_target_s - result.stored_s))
        plain(self, way, result, round_s)

    plain = Goodput.observe
    monkeypatch.setattr(Goodput, "observe", observe)
    inline(arrivals(8.0, 20), "auto", 7)
    assert sum(result.stored_s > 0 for result, _ in seen) > 5
    host = h200_costs()[1]
    assert [host_s for _, host_s in seen] == pytest.approx([host.ask_s + host.lead_s] * len(seen))
