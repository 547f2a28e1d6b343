"""Clocks, traces, gates and the ledger's A/B in real jobs."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.presets import resolve_model
from mpissd.common.row import Row
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.gates import violations
from tests.mpi.harness import launch, needs_mpi, start

pytestmark = needs_mpi

NULL = "--backend=emulated --device=null --pair=toy --rounds=30 --warmup_rounds=3".split()
READING_US = 5.0  # beyond the stated error: what two readings of one clock may differ by


def told(np_: int, *arguments: str) -> Any:
    """The JSON line of truth_job."""
    with start(np_, "tests.mpi.truth_job", *arguments) as job:
        code, out, err = job.finish()
    assert code == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])


def test_clocks_of_one_host_are_one_clock() -> None:
    """perf_counter is the host's: the true offset is 0, and so within the stated error."""
    found = told(3, "clocks")
    assert [len(readings) for readings in found] == [3, 3, 3]
    for readings in found:
        assert (readings[0]["offset_ns"], readings[0]["error_ns"]) == (0, 0)
        for reading in readings[1:]:
            assert 0 < reading["error_ns"] < 20e6
            assert abs(reading["offset_ns"]) <= reading["error_ns"] + READING_US * 1e3, reading
    at = [readings[1]["at_ns"] for readings in found]
    assert at == sorted(at)


@pytest.mark.parametrize("flags", [("--mode=ar",), ("--num_tokens=40",)])
def test_a_measured_row_passes_its_gates(flags: tuple[str, ...], tmp_path: Path) -> None:
    job = launch(2, *NULL, "--batch_size=2", *flags, folder=tmp_path / "out", direct=True)
    assert violations(Row.from_dict(job.row), job.arrays) == []


@pytest.mark.parametrize(
    ("how", "flags", "says"),
    [
        ("deaf", NULL, "ranks: rank 0 heard "),
        ("slow", [*NULL, "--device=h100", "--pair=8b/1b"], "device: round "),
    ],
)
def test_a_row_that_contradicts_itself_is_no_result(
    how: str, flags: list[str], says: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with start(2, "tests.mpi.truth_job", how, *flags, "--mode=sd", f"--out={out}") as job:
        code, said, err = job.finish()
    assert code == 3, err[-2000:]
    lines = [line for line in err.splitlines() if line.startswith("mpissd")]
    assert len(lines) == 1 and says in lines[0]
    assert "schema" not in said  # no JSON line
    assert not (out / "runs.jsonl").exists()
    (flagged,) = (json.loads(line) for line in (out / "flagged.jsonl").open())
    assert any(line.startswith(says) for line in flagged["gates"])
    assert [path.stem for path in (out / "rounds").iterdir()] == [flagged["run_id"]]


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_ledger_of_an_emulated_run_is_its_profile_s(tp: int, tmp_path: Path) -> None:
    """No round takes less: a verification in the lead's phases, K steps in the draft's.

    How much more depends on what else the machine does. The forwards' own times are the profile's.
    """
    lookahead = 5
    flags = "--backend=emulated --device=h100 --pair=8b@16L/1b --mode=sd --rounds=15".split()
    flags += [f"--lookahead={lookahead}", "--warmup_rounds=1"]
    job = launch(tp + 1, *flags, folder=tmp_path / "out", direct=True)
    profile, options = load_profile("h100"), ForwardOptions()
    target, draft = Shard(resolve_model("8b").scaled(16), tp), Shard(resolve_model("1b"))
    verify_s = profile.forward_s(target.cost(lookahead + 1, 1, 2, options))
    draft_s = lookahead * profile.forward_s(draft.cost(1, 1, 2, options))
    lead, drafts = job.arrays["lead_phases"].tolist(), job.arrays["draft_phases"].tolist()
    waited = [2 + lead.index(name) for name in ("launch", "device_wait")]
    verified = job.arrays["lead_ledger_ns"][:, waited].sum(axis=1) * 1e-9
    drafted = job.arrays["draft_ledger_ns"][:, 2 + drafts.index("speculate")] * 1e-9
    assert len(verified) == len(drafted) == 15
    assert verified.min() >= verify_s and drafted.min() >= draft_s
    assert job.row["t_target_s"] == pytest.approx(verify_s, rel=1e-9)


def test_the_device_s_share_of_a_round(tmp_path: Path) -> None:
    """Timed on the host where it runs the all-reduces, the profile's where they are modelled."""
    real = "--backend=numpy --pair=toy --rounds=12 --warmup_rounds=2 --mode=ar".split()
    for np_, flags in ((2, real), (1, real), (2, [*NULL, "--device=h100", "--mode=ar"])):
        row = launch(np_, *flags, folder=tmp_path / "out", direct=True).row
        parts = row["device_us"]
        assert sum(parts.values()) == pytest.approx(row["round_us"]["mean"], abs=0.1)
        assert parts["forward"] > 0 and parts["idle"] > 0
        assert (parts["all_reduce"] > 0) == (np_ > 1)
    cost = Shard(resolve_model("toy-target"), 2).cost(1, 1, 2, ForwardOptions())
    once = load_profile("h100").all_reduce_s(2, cost.all_reduce_bytes)
    assert parts["all_reduce"] == pytest.approx(cost.num_all_reduces * once * 1e6, abs=1e-3)


def test_a_trace_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json.gz"
    job = launch(3, *NULL, f"--trace={path}", folder=tmp_path / "out", direct=True)
    assert job.code == 0, job.err
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = trace["traceEvents"]
    rows = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert rows == {(0, 0), (0, 1), (1, 0), (2, 0)}
    names = [e["args"]["name"].split()[2] for e in events if e["name"] == "process_name"]
    assert names == ["lead", "target", "draft"]
    for row in rows:
        slices = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == row]
        assert {e["args"]["round"] for e in slices} == set(range(3, 33))
        for before, after in pairwise(slices):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-6
    arrows = Counter((e["name"], e["ph"]) for e in events if e["ph"] in "sf")
    kinds = ("plan", "outcome", "speculation")
    assert arrows == {(kind, end): 30 for kind in kinds for end in "sf"}
    clocks = trace["otherData"]["clock"]["ranks"]
    errors_us = {e["rank"]: e["error_ns"] / 1e3 for e in clocks}
    assert errors_us[0] == 0 and all(len(e["offset_ns"]) == 2 for e in clocks)
    sent = {e["id"]: e for e in events if e["ph"] == "s"}
    for arrow in (e for e in events if e["ph"] == "f"):  # no message arrives before it is sent
        unsure = errors_us[arrow["pid"]] + errors_us[sent[arrow["id"]]["pid"]]
        assert arrow["ts"] >= sent[arrow["id"]]["ts"] - unsure
    assert trace["otherData"]["config_digest"] == job.row["config_digest"]
    assert trace["otherData"]["num_rounds"] == 30


def test_a_trace_changes_nothing_that_is_decided(tmp_path: Path) -> None:
    rows = [
        launch(2, *NULL, *flags, folder=tmp_path / "out", direct=True).row
        for flags in ([], [f"--trace={tmp_path / 'trace.json'}"])
    ]
    for key in ("outcome_digest", "token_digest", "config_digest"):
        assert rows[0][key] == rows[1][key]


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    job = launch(2, *NULL, f"--trace={tmp_path}", folder=tmp_path / "out")
    assert job.code == 2 and job.lines == [
        f"mpissd: trace={str(tmp_path)!r}: is a folder; allowed: a file"
    ]
    assert not (tmp_path / "out").exists()
