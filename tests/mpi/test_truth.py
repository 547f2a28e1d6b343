"""Traces and gates in real jobs.

As a program (`python -m mpi4py -m tests.mpi.test_truth FLAGS…`) it is a run whose last rank hears
outcomes of its own.
"""

import gzip
import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

from tests.mpi.harness import ended, launch, needs_mpi, start

pytestmark = needs_mpi

NULL = "--backend=emulated --device=null --pair=toy --rounds=30 --warmup_rounds=3".split()


def test_a_row_that_contradicts_itself_is_no_result(tmp_path: Path) -> None:
    flags = [*NULL, "--mode=sd", f"--out={tmp_path}"]
    done = ended(start(2, "tests.mpi.test_truth", *flags))
    assert done.code == 3, done.err[-2000:]
    assert len(done.lines) == 1 and "ranks: rank 0 heard " in done.lines[0]
    assert "schema" not in done.out  # no JSON line
    assert not (tmp_path / "runs.jsonl").exists()
    (flagged,) = (json.loads(line) for line in (tmp_path / "flagged.jsonl").open())
    assert any(line.startswith("ranks: rank 0 heard ") for line in flagged["gates"])
    assert [path.stem for path in (tmp_path / "rounds").iterdir()] == [flagged["run_id"]]


def test_a_trace_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json.gz"
    told = f"--trace={path}", "--cache=draft"  # each round has an answer
    job = launch(3, *NULL, *told, folder=tmp_path / "out", direct=True)
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
    errors_us = [clock["error_ns"] / 1e3 for clock in trace["otherData"]["ranks"]]
    assert errors_us[0] == 0
    sent = {e["id"]: e for e in events if e["ph"] == "s"}
    for arrow in (e for e in events if e["ph"] == "f"):  # no message arrives before it is sent
        unsure = errors_us[arrow["pid"]] + errors_us[sent[arrow["id"]]["pid"]]
        assert arrow["ts"] >= sent[arrow["id"]]["ts"] - unsure
    assert trace["otherData"]["config_digest"] == job.row["config_digest"]
    assert trace["otherData"]["num_rounds"] == 30


if __name__ == "__main__":
    from mpi4py import MPI

    from mpissd.__main__ import main
    from mpissd.engine.round import sequence

    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        sequence.crc32 = lambda data, before: 7  # type: ignore[assignment]
    sys.exit(main(["run", *sys.argv[1:]]))
