"""Calibration: host costs off the ledgers of rounds whose costs are known, and all-reduces. A row's
floor, the rank whose GPU a learner shares, and traces of ranks whose clocks differ."""

import dataclasses
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.presets import resolve_model
from mpissd.common.trace import DraftLog, DraftPhase, LeadPhase
from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.backend.profile import EmulatedBackend, load_profile
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.measure import calibrate
from mpissd.lab.measure.calibrate import WarmUp, host_costs
from mpissd.lab.measure.row import floor_of, shares_gpu_of
from mpissd.lab.measure.tracing import Track, events
from mpissd.lab.predict.costs import DeviceCosts

N, K = 9, 4
DEVICE = DeviceCosts.from_points({1: 4e-3, 5: 5e-3}, {1: 1e-3, 5: 2e-3, 16: 3e-3}, {3: {5: 2.5e-3}})
LEAD = {"send": 10, "commit": 20, "broadcast": 1, "upload": 3, "launch": 7, "sample": 9,
        "record": 2, "device_wait": 5040, "draft_wait": 4500}  # fmt: skip
DRAFT = {"wait": 900, "commit": 11, "lookup": 12, "send": 13, "record": 14}


def job(mode: str, **flags: Any) -> Job:
    config = RunConfig(mode=mode, pair="8b/1b", backend="emulated", lookahead=K, **flags)
    return resolve(config, 1, backend="emulated", memory_bytes=None)


def table(phases: Any, us: dict[str, Any]) -> Any:
    """The ledger of N rounds; us: of each phase, of all rounds or by round."""
    columns = [np.broadcast_to(us.get(phase.name.lower(), 0), N) for phase in phases]
    phases_ns = np.rint(np.column_stack(columns) * 1e3).astype(np.int64)
    return np.column_stack([np.arange(N), phases_ns.sum(axis=1), phases_ns])


def lead(**us: Any) -> WarmUp:
    return WarmUp(table(LeadPhase, LEAD | us), np.full(N, K + 1))


def draft(columns: dict[str, Any], grow_s: float | None = None, **us: Any) -> WarmUp:
    rows = [np.broadcast_to(columns.get(name, 0), N) for name in DraftLog.COLUMNS]
    return WarmUp(table(DraftPhase, DRAFT | us), None, np.column_stack(rows), grow_s)


def costs(told: Job, *warm: Any) -> dict[str, float]:
    """The costs in µs, without those that are 0."""
    found = vars(host_costs(told, DEVICE, *warm))
    return {name: round(seconds * 1e6, 3) for name, seconds in found.items() if seconds}


LEADS = {"lead_send": 10, "lead_commit": 20, "lead_broadcast": 1, "lead_upload": 3,
         "lead_sample": 9, "lead_record": 2}  # fmt: skip
DRAFTS = {"draft_commit": 11, "draft_lookup": 12, "draft_record": 14}


def test_what_a_forward_takes_beyond_its_time_in_series_is_the_hosts() -> None:
    assert costs(job("ar"), lead(), None) == {**LEADS, "lead_launch": 7, "wake": 40}
    computed = lead(launch=5100, device_wait=2)  # NumPy computes in the launch
    assert costs(job("ar"), computed, None) == {**LEADS, "lead_launch": 102}
    faster = lead(launch=7, device_wait=4000)
    assert costs(job("ar"), faster, None) == LEADS


def test_misses_show_a_step_and_what_nobody_explains_is_the_link() -> None:
    """4 steps of 1 ms took 4.2; the lead waited for 4520 µs, of which the draft worked 4236."""
    missed = draft({"num_jit": 1, "t_growth_s": np.nan}, speculate=4200)
    found = costs(job("sd"), lead(), missed)
    assert found == {**LEADS, **DRAFTS, "lead_launch": 7, "wake": 40, "draft_send": 13,
                     "step": 50, "link": 142}  # fmt: skip
    inline = costs(job("sd", num_drafts=0), lead(), missed)
    assert "link" not in inline and inline["step"] == 50
    told = job("sd", num_drafts=0, forward="transformer", parallel_drafting=True)
    known = replace(lead(), accepted=np.full(N, 3))  # one forward of K + 3 rows, of 16 compiled
    once = costs(told, known, draft({"num_jit": 1, "t_growth_s": np.nan}, speculate=3070))
    assert once["step"] == 70


def test_growth_shows_its_parts_and_an_outcome_that_waited_shows_its_reading() -> None:
    hits = np.arange(N) % 3 > 0
    growth_s = np.full(N, 9e-3)
    growth_s[[2, 5]] = np.nan  # so that the outcomes of rounds 3 and 6 waited
    us: dict[str, Any] = {"glue": 2560, "keys": 70, "grow": 8000}
    us["speculate"] = np.where(hits, 30, 4230)
    us["wait"] = np.where(np.isin(np.arange(N), [3, 6]), 8, 900)
    waits = np.where(hits, 66 + 100 - 20, 4266 + 100 - 20)
    waits = np.where(np.isin(np.arange(N), [3, 6]), waits + 700, waits)  # after a growth step
    rows = {"num_jit": ~hits, "steps_ready": np.where(hits, K, 0), "t_growth_s": growth_s}
    told = job("ssd", fan_out="uniform:2")
    found = costs(told, lead(draft_wait=waits), draft(rows, 3.02e-3, **us))
    parts = {"draft_assemble": 30, "step": 50, "glue": 60, "keys": 70, "draft_read": 8, "link": 46}
    parts["joined"] = 30  # growth steps of 10 branches took 20 µs more than in series
    assert {name: found[name] for name in parts} == parts
    # Without a full miss the growth itself shows the step: here of 10 branches, 3 ms in series.
    all_hit = draft({**rows, "num_jit": 0, "steps_ready": K}, 3.09e-3, **us)
    assert costs(told, lead(), all_hit)["step"] == pytest.approx(90)


FORWARDS: list[Any] = [  # ms by rows of target and draft, and what is chosen
    ({1: 9.95, 4: 14.0, 8: 18.8}, {1: 2.57, 8: 5.09, 16: 8.2}, (2, "uniform:2")),  # AVX-512
    ({1: 10, 8: 10.5}, {1: 0.3, 16: 0.4}, (7, "uniform:3")),  # flat, and the draft is cheap
    ({1: 10, 8: 80}, {1: 3, 16: 8}, (1, "uniform:3")),  # steep
]


@pytest.mark.parametrize(("verify", "draft", "chosen"), FORWARDS)
def test_k_and_fan_out_follow_the_forwards(verify: Any, draft: Any, chosen: Any) -> None:
    for mode, wanted in (("ssd", chosen), ("sd", (chosen[0], "uniform:3"))):
        own: Any = {"fan_out": "uniform:2"} if mode == "ssd" else {}
        config = RunConfig(pair="toy", backend="numpy", mode=mode, lookahead=2, **own)
        told = resolve(config, 1, backend="numpy", memory_bytes=None)
        assert calibrate.fastest(told, verify, draft) == wanted


def test_a_given_flag_wins_and_only_the_shipped_pair_is_timed() -> None:
    machine: Any = SimpleNamespace(target_backend="numpy")
    config = parse_flags({"prompt": "Why?", "backend": "numpy"})
    others = (replace(config, batch_size=2), set()), (RunConfig(pair="toy"), set())
    for each, given in (*((config, {name}) for name in ("lookahead", "fan_out")), *others):
        assert calibrate.choose(machine, each, given) is each
    with pytest.raises(AttributeError, match="topology"):
        calibrate.choose(machine, config, set())


def floor(device: str, batch: int, **numbers: Any) -> tuple[dict[str, Any], float | None, Any]:
    """(keys, seconds, cost) of the floor of an 8B with so many sequences of 8 rows."""
    config = RunConfig(mode="sd", pair="8b/1b", lookahead=7, batch_size=batch)
    job = resolve(config, 2, backend="emulated", memory_bytes=None)
    profile = dataclasses.replace(load_profile(device), **numbers)
    backend = EmulatedBackend(profile)
    rates = {
        "read_bytes_per_s": backend.read_bandwidth(1),
        "peak_flops_per_s": backend.peak_flops(),
    }
    told, seconds = floor_of(job, backend.itemsize, rates)
    cost = Shard(job.target, 2).cost(job.verify_rows, batch, 2, job.options)
    return told, seconds, (cost, profile)


@pytest.mark.parametrize(("batch", "bound"), [(1, "bytes"), (64, "flops")])
def test_an_emulated_floor_is_its_profile_s(batch: int, bound: str) -> None:
    told, seconds, (cost, profile) = floor("h100", batch)
    params = Shard(resolve_model("8b"), 2).num_params(ForwardOptions())
    assert seconds == profile.floor_s(cost)
    bytes_s = told["floor_bytes"] / told["read_bytes_per_s"]
    flops_s = told["floor_flops"] / told["peak_flops_per_s"]
    assert told["floor_flops"] == 2 * 8 * batch * params
    assert (flops_s > bytes_s) == (bound == "flops") and seconds == max(bytes_s, flops_s)


@pytest.mark.parametrize(("gpu", "shared"), [("GPU-b", 1), ("GPU-c", None), (None, None)])
def test_a_learner_shares_the_gpu_of_its_rank(gpu: str | None, shared: int | None) -> None:
    infos = [DeviceInfo("a GPU", "gpu", uuid=f"GPU-{name}") for name in "ab"]
    measured: Any = SimpleNamespace(lead=SimpleNamespace(learner=gpu and {"gpu": gpu}))
    assert shares_gpu_of(measured, infos) == shared


START = 7_000_000_123_456  # a perf_counter far from 0


def trace_of(ahead: int) -> list[dict[str, Any]]:
    """Two ranks with two slices each, and an arrow; the second rank's clock is `ahead`."""
    slices = START + 1000 * np.array([[0, 10], [10, 50]])
    tracks = [
        [Track("host", ["send", "wait"], np.column_stack([[0, 0], [0, 1], slices + clock]))]
        for clock in (0, ahead)
    ]
    clocks = [(0, 0), (ahead, 900)]
    return list(events(["0", "1"], tracks, clocks, [("outcome", (0, 0), (1, 1))]))


def test_all_ranks_are_on_the_clock_of_rank_0() -> None:
    """A host that booted 300 days earlier: 2.6e16 ns are beyond a float's whole numbers."""
    trace = trace_of(300 * 86_400 * 10**9 + 1)
    assert trace == trace_of(0)
    assert [event["ts"] for event in trace if event["ph"] in "Xsf"] == [0, 10, 0, 10, 0, 10]
