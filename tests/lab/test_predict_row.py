"""A predicted row: keys of a result row, the run's own draws, sampling apart from the model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.real_pairs import DEFAULT, hit_rate, least_uniform
from mpissd.common.row import Row
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.job import resolve
from mpissd.engine.spec.acceptance import named_hit_law
from mpissd.lab.measure.card import print_summary
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.row import predict_row

LOOKAHEAD = 4  # a run's default K
HOST = HostCosts(lead_sample=6e-5, link=4e-5, step=4e-5, keys=6e-5, wake=6e-5)


def predict(device: str = "h100", host: HostCosts = HOST, **flags: Any) -> dict[str, Any]:
    config = RunConfig(**{"pair": "8b/1b", "backend": "emulated", **flags})
    job = resolve(config, 1, backend="emulated", memory_bytes=None)
    return predict_row(job, DeviceCosts.from_profile(load_profile(device), job), host)


def test_has_the_keys_of_a_row_and_is_json() -> None:
    row = predict(mode="ssd", rounds=50)
    json.dumps(row, allow_nan=False)
    assert row["num_rounds"] == row["round_us"]["n"] == 50
    assert set(row["round_us"]) == {"mean", "p50", "p90", "p99", "n"}
    assert row["tok_per_s"] == pytest.approx(row["num_tokens"] / row["wall_s"])
    assert row["tok_per_s_per_gpu"] == row["tok_per_s"] / 2
    assert row["round_us"]["mean"] == pytest.approx(row["wall_s"] / 50 * 1e6)
    assert 0 < row["hit_rate"] < 1 and 1 <= row["acceptance_length"] <= 5
    assert row["T_SD"] == pytest.approx(row["t_draft_s"] / row["t_target_s"])
    assert row["T_p"] == pytest.approx(row["t_growth_s"] / row["t_target_s"])
    assert row["exposed_us"] > 0


def test_imposed_hits_have_a_price() -> None:
    """p_hit = .8 is imposed on 15 branches; the default hit model needs more, which have a cost."""
    row = predict(mode="ssd", rounds=20, p_hit=0.8)
    hazards, width = [0.8] * LOOKAHEAD, LOOKAHEAD + 1
    least = next(f for f in range(1, 99) if hit_rate(hazards, [f] * width, DEFAULT) >= 0.8)
    assert least == least_uniform(0.8, hazards, DEFAULT, 99) > 3
    honest = predict(mode="ssd", rounds=20, fan_out=f"uniform:{least}")
    assert row["imposed_hits"] == {
        "hit_law": named_hit_law("smollm2").label,
        "branch_budget": least * width,
        "expected_tok_per_s": honest["expected_tok_per_s"],
    }
    named = predict(mode="ssd", rounds=20, hit_law="p_hit:0.8")
    assert named["imposed_hits"] == row["imposed_hits"]
    # Imposed on fewer branches, the hit model's own rate costs less if a branch costs anything.
    costly = dataclasses.replace(HOST, keys_lane=2e-6)
    own = hit_rate(hazards, [least] * width, DEFAULT)
    alike = predict(host=costly, mode="ssd", rounds=20, p_hit=own)
    assert alike["imposed_hits"]["expected_tok_per_s"] < alike["expected_tok_per_s"]
    never = predict(mode="ssd", rounds=20, p_hit=1.0)["imposed_hits"]
    assert never["branch_budget"] is never["expected_tok_per_s"] is None
    for flags in ({"mode": "ssd", "p_hit": 0.0}, {"mode": "ssd"}, {"mode": "sd"}, {"mode": "ar"}):
        assert predict(rounds=20, **flags)["imposed_hits"] is None


def test_a_card_says_the_price_of_imposed_hits(capsys: pytest.CaptureFixture[str]) -> None:
    row = json.loads(
        Path(__file__)
        .parents[2]
        .joinpath("results/h200-sweep/runs_8b.jsonl")
        .read_text()
        .splitlines()[0]
    )
    price = {"hit_law": "power:A=0.75,r=1.0", "branch_budget": 40, "expected_tok_per_s": 827.1}
    shown = {**row, "hit_rate": 0.9, "expected_tok_per_s": 906.0}
    print_summary(Row.from_dict({**shown, "imposed_hits": price}))
    assert "imposed: with the 40 branches" in (text := capsys.readouterr().out)
    assert "827.1 tok/s predicted, 906.0 as run" in text
    whole, floor = row["t_target_s"] * 1e3, row["floor_us"] / 1e3
    share = f"its floor is {floor:.2f} ms, {floor / whole:.0%} of that"
    assert f"  target  {whole:.2f} ms a forward; {share}\n" in text
    print_summary(Row.from_dict({**shown, "num_prompts": 3}), "out")
    assert f"answers  out/text/{row['run_id']}.jsonl: of 3 prompts\n" in capsys.readouterr().out
    print_summary(Row.from_dict(shown), "out")  # a row from before there was this key
    print_summary(Row.from_dict({**shown, "imposed_hits": None}))
    assert "imposed:" not in (text := capsys.readouterr().out) and "answers" not in text
    print_summary(Row.from_dict({**shown, "imposed_hits": {**price, "branch_budget": None}}))
    assert "imposed: no fan-out of power:A=0.75,r=1.0 hits as often" in capsys.readouterr().out


def test_sampling_is_told_apart() -> None:
    """Longer runs stray less; the replayed error is within five of its standard deviations."""
    short, long = predict(mode="ssd", rounds=50, seed=4), predict(mode="ssd", rounds=800, seed=4)
    assert long["expected_tok_per_s"] == short["expected_tok_per_s"]
    assert long["sampling_sd"] == pytest.approx(short["sampling_sd"] / 4)
    for row in (short, long):
        assert row["tok_per_s"] == pytest.approx(
            row["expected_tok_per_s"] * (1 + row["sampling_error"])
        )
        assert abs(row["sampling_error"]) < 5 * row["sampling_sd"]


def test_a_null_device_without_host_costs_has_no_rate() -> None:
    row = predict("null", HostCosts(), mode="ssd", rounds=10)
    json.dumps(row, allow_nan=False)
    assert row["tok_per_s"] is row["expected_tok_per_s"] is row["sampling_error"] is None
    assert row["T_SD"] is None
