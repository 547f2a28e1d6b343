"""A built-in profile from probes: medians of measured values; derived values are marked."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.presets import resolve_model
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.predict.costs import HostCosts
from tests.scripts import load

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "results/h200-probe/build_profile.py"
OLD = ROOT / "results/h200/profiles/h200-70b-T4.json"  # from before profiles distinguished kernels
BASE = json.loads((SCRIPT.parent / "before.json").read_text())


built = load("results/h200-probe/build_profile.py")


def forward(tp: int, seconds: float, most: int | None = 32, **changes: Any) -> Any:
    shard, options = Shard(resolve_model("8b"), tp), ForwardOptions(fuse=True)
    known = vars(shard.key(1, options)) | {"params": shard.num_params(options)}
    kernel = {"kernel": "cublas" if most is None else "chain", "most_rows": most}
    return {**known, **kernel, "from": "measured: here", "seconds": {"1": seconds, **changes}}


def host(mode: str, tp: int, num_drafts: int, **seconds: float) -> Any:
    where = {"mode": mode, "tp": tp, "num_drafts": num_drafts, "batch_size": 1, "lookahead": 4}
    known = {**HostCosts().to_dict(), **seconds}
    return {**where, "lanes": 15, "from": "measured: here", "seconds": known}


def probe(forwards: list[Any], hosts: list[Any], reduces: Any = None, read: float = 4e12) -> Any:
    numbers = copy.deepcopy(BASE["numbers"])
    numbers["read_bytes_per_s"] = {"value": read, "from": "measured: here"}
    unknown = {"from": "not known", "latency_s": None, "bytes_per_s": None}
    known = {"name": "p", "numbers": numbers, "all_reduce": reduces or unknown}
    return {
        **known,
        "tables": {"forwards": forwards},
        "host": hosts,
        "provenance": {"commit": "abc"},
    }


ONE = probe(
    [forward(1, 3.0), forward(1, 4.0, None)],
    [host("sd", 1, 1, link=1e-5, draft_commit=2e-5, lead_sample=9e-5, lead_send=8e-6),
     host("ssd", 1, 1, link=2e-5, keys=3e-5, nap=1e-6)],
)  # fmt: skip
TWO = probe(
    [forward(1, 3.2, None, **{"64": 9.0}), forward(2, 1.7)],
    [host("sd", 2, 0, lead_sample=4e-5, follower=5e-6, wake=7e-6), host("ar", 2, 0)],
    {"from": "measured: oneshot", "latency_s": {"2": 3e-6}, "bytes_per_s": {"2": 5e10}},
    read=5e12,
)


def test_what_several_probes_measured_is_their_median() -> None:
    found = built.build([ONE, TWO, probe([forward(1, 3.1)], [])], BASE)
    fused = {
        (e["tp"], e["most_rows"]): e["seconds"] for e in found["tables"]["forwards"] if e["fuse"]
    }
    assert fused == {
        (1, 32): {"1": 3.05}, (1, None): {"1": 3.6, "64": 9.0}, (2, 32): {"1": 1.7}
    }  # fmt: skip
    assert found["numbers"]["read_bytes_per_s"]["value"] == 4e12
    assert found["numbers"]["memory_bytes"] == BASE["numbers"]["memory_bytes"]


def test_host_costs_of_a_draft_beside_two_targets() -> None:
    found = built.build([ONE, TWO], BASE)["host"]
    derived = {e["mode"]: e for e in found if e["from"].startswith("derived")}
    assert set(derived) == {"sd", "ssd"}
    for entry in derived.values():
        assert (entry["tp"], entry["num_drafts"]) == (2, 1)
        assert entry["seconds"]["lead_sample"] == 4e-5 and entry["seconds"]["wake"] == 7e-6
    sd, ssd = derived["sd"]["seconds"], derived["ssd"]["seconds"]
    assert (sd["link"], sd["draft_commit"], sd["lead_send"]) == (1e-5, 2e-5, 8e-6)
    assert sd["follower"] == pytest.approx(1.5e-5)
    assert ssd["keys"] == 3e-5 and ssd["follower"] == pytest.approx(2.6e-5)


def test_all_reduces_that_no_probe_measured_stay_as_they_were() -> None:
    found = built.build([ONE, TWO, json.loads(OLD.read_text())], BASE)
    reduce = found["all_reduce"]
    assert reduce["latency_s"]["2"] == 3e-6 and reduce["latency_s"]["4"] < 4e-6
    assert reduce["latency_s"]["8"] == BASE["all_reduce"]["latency_s"]["8"]
    assert "8 ranks as before" in reduce["from"]
    assert all(e["tp"] < 4 for e in found["tables"]["forwards"])
    with pytest.raises(ValueError, match="tells kernels apart"):
        built.build([json.loads(OLD.read_text())], BASE)


def test_the_profile_that_is_written_can_be_read_and_models_any_pair(tmp_path: Path) -> None:
    files = []
    for number, data in enumerate((ONE, TWO)):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(data))
    to = tmp_path / "built.json"
    command = [sys.executable, str(SCRIPT), *map(str, files), f"--to={to}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "5 derived" in done.stdout, done.stdout
    profile = load_profile(str(to))
    assert profile.name == "h200" and profile.few_rows == 32 and profile.models_others
    cost = Shard(resolve_model("8b"), 2).cost(1, 1, 2, ForwardOptions(fuse=True))
    assert profile.forward_s(cost) == 1.7
    other = Shard(resolve_model("qwen3-32b"), 2).cost(1, 1, 2, ForwardOptions())
    assert profile.tables.forward(other) is None and profile.forward_s(other) > 0


def test_an_lm_head_that_was_not_probed_goes_by_its_bytes() -> None:
    """70B's is twice as wide as 8B's: at T = 4 as many bytes as 8B's at T = 2."""
    plain, headed = forward(2, 1.7, **{"8": 2.0}), forward(2, 1.9, **{"8": 2.4})
    shard, options = Shard(resolve_model("8b"), 2), ForwardOptions(fuse=True, lm_head=True)
    headed |= {"lm_head": True, "params": shard.num_params(options)}
    big = Shard(resolve_model("70b"), 4)
    fused = ForwardOptions(fuse=True)
    other = forward(4, 8.0, **{"4": 8.5}) | vars(big.key(1, fused))
    other["params"] = big.num_params(fused)
    found = built.with_heads([plain, headed, other])
    assert [(e["model"], e["tp"], e["lm_head"]) for e in found] == [("llama-3.1-70b", 4, True)]
    assert found[0]["params"] == big.num_params(options)
    assert found[0]["seconds"] == pytest.approx({"1": 8.2, "4": 8.5 + 0.2 + 0.2 * 3 / 7})
    assert found[0]["from"].startswith("derived: LM head of llama-3.1-8b T=2")
