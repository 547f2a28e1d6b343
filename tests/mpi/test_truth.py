"""Clocks, traces, gates and the ledger's A/B in real jobs."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mpissd.gates import violations
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


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_the_ledger_is_switched_on_lead_and_draft(mode: str, tmp_path: Path) -> None:
    """8 quads of 4 · 25 rounds; what it costs is reported, and no bar at null rounds."""
    flags = [*NULL, f"--mode={mode}", f"--out={tmp_path / 'out'}"]
    found = told(2, "ledger", *flags)
    print(found["text"])
    assert found["num_rounds"] == 8 * 2 * 23
    assert found["low"] <= found["overhead"] <= found["high"] and found["low"] < 0.1
    assert found["off_us"] > 0


@pytest.mark.parametrize("flags", [("--mode=ar",), ("--num_tokens=40",)])
def test_a_measured_row_passes_its_gates(flags: tuple[str, ...], tmp_path: Path) -> None:
    job = launch(2, *NULL, "--batch_size=2", *flags, folder=tmp_path / "out", direct=True)
    assert violations(job.row, job.arrays) == []


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
