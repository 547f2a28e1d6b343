"""Traces: structure, one clock, and no slice over another."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.lab.measure.tracing import RankTrace, Track, document, write

START = 7_000_000_123_456  # a perf_counter far from 0


def table(ends_us: list[list[float]], start: int = START) -> NDArray[np.int64]:
    """Slices one after the other, a list of ends a round; labels 0, 1, …"""
    rows, at = [], start
    for round_, ends in enumerate(ends_us):
        for label, end in enumerate(ends):
            stop = START + round(end * 1e3)
            rows.append((round_, label, at, stop))
            at = stop
    return np.array(rows, np.int64)


LEAD = Track("host", ["send", "wait"], table([[10, 50], [60, 100]]))
DEVICE = Track("device", ["verify"], np.array([[0, 0, START + 20_000, START + 49_000]]))
DRAFT = Track("host", ["wait", "work"], table([[15, 40], [70, 90]]))


def shown_of(*tracks: list[Track], clock: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Two ranks, the second with a clock of its own, and an arrow from `send` to `work`."""
    ranks = [RankTrace("rank 0", tracks[0]), RankTrace("rank 1", tracks[1], *clock)]
    return document(ranks, [("outcome", (0, 0), (1, 1))], {"run_id": "x"})


def shown(trace: dict[str, Any], ph: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == ph]


def test_a_trace_of_two_ranks() -> None:
    trace = shown_of([LEAD, DEVICE], [DRAFT])
    names = {e["pid"]: e["args"]["name"] for e in shown(trace, "M") if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    slices = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in shown(trace, "X")]
    assert slices[:5] == [
        (0, 0, "send", 0.0, 10.0),
        (0, 0, "wait", 10.0, 40.0),
        (0, 0, "send", 50.0, 10.0),
        (0, 0, "wait", 60.0, 40.0),
        (0, 1, "verify", 20.0, 29.0),
    ]
    assert [e["args"]["round"] for e in shown(trace, "X")][:4] == [0, 0, 1, 1]
    arrows = [(e["ph"], e["pid"], e["ts"]) for e in shown(trace, "s") + shown(trace, "f")]
    assert arrows == [("s", 0, 0.0), ("s", 0, 50.0), ("f", 1, 15.0), ("f", 1, 70.0)]
    assert trace["otherData"]["run_id"] == "x" and trace["displayTimeUnit"] == "ms"


def test_all_ranks_are_on_the_clock_of_rank_0() -> None:
    """A host that booted 300 days earlier: 2.6e16 ns are beyond a float's whole numbers."""
    ahead = 300 * 86_400 * 10**9 + 1
    late = Track("host", DRAFT.labels, DRAFT.slices + np.array([0, 0, ahead, ahead]))
    trace = shown_of([LEAD], [late], clock=(ahead, 900))
    assert trace["traceEvents"] == shown_of([LEAD], [DRAFT])["traceEvents"]
    notes = trace["otherData"]["clock"]["ranks"]
    assert notes[1] == {"rank": 1, "offset_ns": ahead, "error_ns": 900}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_what_is_written_is_what_was_made(name: str, tmp_path: Path) -> None:
    trace = shown_of([LEAD, DEVICE], [DRAFT])
    path = tmp_path / name
    write(path, trace)
    data = path.read_bytes()
    text = (gzip.decompress(data) if name.endswith("gz") else data).decode()
    assert json.loads(text) == trace
    assert len(text.splitlines()) == len(trace["traceEvents"]) + 3
    assert [p.name for p in tmp_path.iterdir()] == [name]  # nothing half-written
