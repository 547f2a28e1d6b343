"""Pools: the simulation against the recurrence, and the pools that `plan` prints.

Statistical tests fix their seeds and allow five standard errors: false-alarm rate 6e-7 each.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from typing import Any

import numpy as np
import pytest

from mpissd.__main__ import main
from mpissd.common.config import RunConfig
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.job import resolve
from mpissd.lab.predict.advisor import Use, frontier, rivals_of, sizes
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.derive import host_of
from mpissd.lab.predict.pool import Pool, simulate
from mpissd.lab.predict.search import Choice
from mpissd.lab.predict.simulation import expected

H200 = load_profile("h200")


def pool_of(targets: int, device: str = "h200", tp: int = 1, **flags: Any) -> Pool:
    flags = {
        "mode": "ssd",
        "pair": "8b/1b",
        "alpha": 0.8,
        "fuse": True,
        "num_tokens": 1000,
        **flags,
    }
    config, profile = RunConfig(num_drafts=1, **flags), load_profile(device)
    job = resolve(config, tp, backend="emulated", memory_bytes=None)
    return Pool.of(job, targets, profile, host_of(profile, job))


CASES: dict[str, dict[str, Any]] = {
    "in time": {"lookahead": 4, "fan_out": "geometric:20", "backup_lookahead": 2},
    "late": {"lookahead": 7, "fan_out": "uniform:3"},
    "batch, fast": {"lookahead": 4, "fan_out": "uniform:3", "batch_size": 5, "backup": "fast"},
    "sd": {"mode": "sd", "lookahead": 4, "batch_size": 2},
    "imposed": {"lookahead": 3, "fan_out": "uniform:1", "p_hit": 0.9},
}


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("device", ["h200"])
def test_one_target_is_a_draft_of_its_own(device: str, flags: dict[str, Any]) -> None:
    pool = pool_of(1, device, **flags)
    alone = DeviceCosts.from_profile(load_profile(device), pool.job)
    mean = float(expected(pool.job, alone, pool.host).tok_per_s[0])
    rates = [simulate(pool, 200, seed).tok_per_s for seed in range(12)]
    error = float(np.std(rates, ddof=1) / np.sqrt(12)) + 0.002 * mean  # its own, and the mean's
    assert abs(np.mean(rates) - mean) < 5 * error


def test_a_draft_that_takes_no_time_serves_any_number_of_targets() -> None:
    pool = pool_of(1, lookahead=4, fan_out="uniform:3")
    free = dataclasses.replace(pool.device, draft=type(pool.device.verify)((1,), (0.0,)), lists=())
    rates = []
    for targets in (1, 300):
        many = Pool(pool.job, targets, free, HostCosts())
        found = simulate(many, 40, 1)
        assert (found.wait_s, found.busy) == (0, 0)
        rates.append(found.round_s)
    assert rates[1] == pytest.approx(rates[0], rel=0.01)


def test_more_targets_make_their_drafts_slower_and_a_gpu_worth_more_up_to_a_point() -> None:
    flags: dict[str, Any] = {"pair": "70b/1b", "lookahead": 8, "fan_out": "uniform:3"}
    found = {n: simulate(pool_of(n, tp=2, **flags), 1600 // n) for n in (1, 4, 16, 64)}
    waits = [each.wait_s for each in found.values()]
    assert waits == sorted(waits)
    per_gpu = {n: each.tok_per_s / (2 * n + 1) for n, each in found.items()}
    assert per_gpu[1] < per_gpu[4] > per_gpu[64]


def use(tok_per_s: float, token_s: float, targets: int = 1, mode: str = "sd", tp: int = 1) -> Use:
    choice = Choice(mode, tp, 1, 1, 4, None, "jit", 4, tok_per_s / targets, 1.0, None)
    return Use(choice, targets, 1, tok_per_s, token_s, None)


def test_the_frontier_keeps_what_nothing_beats_in_both() -> None:
    fast, mid, slow = use(10, 1.0), use(20, 2.0), use(30, 4.0)
    worse = use(19, 2.5), use(20, 2.5), use(9, 1.0)
    assert frontier([*worse, fast, slow, mid]) == [slow, mid, fast]


def test_a_pool_is_compared_with_what_is_no_later_and_with_the_most() -> None:
    pool, each = use(20, 2.0, 4, "ssd"), use(8, 1.0, 1, "ssd")
    late, same = use(30, 4.0), use(15, 2.0)
    rivals = rivals_of(pool, [use(25, 2.0, 3, "ssd"), late, same, each, pool])
    assert rivals == {"in_time": same, "most": late, "each": each}


@pytest.mark.parametrize(
    ("tp", "gpus", "counts"), [(1, 2, []), (1, 3, [2]), (1, 9, [2, 3, 8]), (4, 8, []), (4, 9, [2])]
)
def test_pools_fill_the_gpus(tp: int, gpus: int, counts: list[int]) -> None:
    assert sizes(tp, gpus) == counts


def test_plan_knows_pools(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile=h200", "--pair=8b/1b", "--alpha=.8", "--gpus=5"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["pools"]
    names = [(use["mode"], use["tp"], use["targets"]) for use in found["frontier"]]
    assert ("ssd", 1, 4) in names and ("sd", 1, 1) in names
    rates = [(use["tok_per_s"], use["token_ms"]) for use in found["frontier"]]
    assert rates == sorted(rates, reverse=True) and len({ms for _, ms in rates}) == len(rates)
    for gain in found["gains"]:
        for rival in ("in_time", "most"):
            other = gain[rival]
            assert other["gain"] == pytest.approx(gain["pool"]["tok_per_s"] / other["tok_per_s"])
        assert gain["in_time"]["token_ms"] <= gain["pool"]["token_ms"]
        assert gain["pool"]["gpus"] <= 5 >= gain["most"]["gpus"]
    assert any("SSD T=1 G=4 D=1 over the most with tokens no later" in line for line in lines)
    (command,) = (line for line in lines if line.startswith("   run the pool "))
    ranks = int(re.findall(r"-np (\d+)", command)[0])
    words = shlex.split(command.partition(" mpissd ")[2])
    assert main([*words, "--backend=emulated", f"--dry_run={ranks}"]) == 0
    assert ranks <= 5 and "--groups=" in command


def predicted(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    common = ("--profile=h200", "--pair=8b/1b", "--mode=ssd", "--num_drafts=1", "--alpha=.8")
    assert main(["plan", *common, "--rounds=200", *flags]) == 0
    row: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return row


def test_predict_takes_groups(capsys: pytest.CaptureFixture[str]) -> None:
    alone, pool = (predicted(capsys, f"--groups={n}") for n in (1, 4))
    assert alone["tok_per_s"] < pool["tok_per_s"] < 4 * alone["tok_per_s"]
    assert pool["tok_per_s_per_gpu"] == pytest.approx(pool["tok_per_s"] / 5)
    assert pool["round_us"]["n"] == 800 and pool["groups"] == 4
    assert pool["expected_tok_per_s"] == pytest.approx(pool["tok_per_s"], rel=0.1)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--mode=ssd", "--num_tokens=100"), "and rounds"),
        (("--rows=results",), "groups=3 with rows"),
    ],
)
def test_predict_refuses_groups_without_a_recurrence(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], why: str
) -> None:
    words = ["--profile=h200", "--pair=8b/1b", "--groups=3", *flags]
    assert main(["plan", *words]) == 2
    assert why in capsys.readouterr().err
