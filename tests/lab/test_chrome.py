"""Traces: structure, one clock, and no slice over another."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.lab.measure.chrome import (
    Arrow,
    Clock,
    ClockReading,
    Int64s,
    RankTrace,
    Track,
    document,
    write,
)

START = 7_000_000_123_456  # a perf_counter far from 0
SAME_CLOCK = Clock((ClockReading(0, 0, 0),))


def table(ends_us: list[list[float]], start: int = START) -> Int64s:
    """Slices one after the other, a list of ends a round; labels 0, 1, …"""
    rows, at = [], start
    for round_, ends in enumerate(ends_us):
        for label, end in enumerate(ends):
            stop = START + round(end * 1e3)
            rows.append((round_, label, at, stop))
            at = stop
    return np.array(rows, np.int64)


def rank(number: int, *tracks: Track, clock: Clock = SAME_CLOCK) -> RankTrace:
    return RankTrace(number, ["lead", "draft"][number], "node1", "null device", clock, tracks)


LEAD = Track("host", ["send", "wait"], table([[10, 50], [60, 100]]))
DEVICE = Track("device", ["verify"], np.array([[0, 0, START + 20_000, START + 49_000]]))
DRAFT = Track("host", ["wait", "work"], table([[15, 40], [70, 90]]))
ARROWS = [Arrow("outcome", (0, 0, 0), (1, 0, 1))]


def shown(trace: dict[str, Any], ph: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == ph]


def check_structure(trace: dict[str, Any]) -> None:
    """What a viewer relies on: named rows, slices in time that don't overlap, arrows in slices."""
    named = {(e["pid"], e["tid"]) for e in shown(trace, "M") if e["name"] == "thread_name"}
    processes = {e["pid"] for e in shown(trace, "M") if e["name"] == "process_name"}
    rows = defaultdict(list)
    for event in shown(trace, "X"):
        assert event["name"] and event["dur"] >= 0 and event["ts"] >= 0
        assert event["args"]["round"] >= 0
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(rows) <= named and {pid for pid, _ in rows} <= processes
    for spans in rows.values():
        assert spans == sorted(spans)
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - 1e-6  # µs; times are whole nanoseconds
    starts = {event["id"]: event for event in shown(trace, "s")}
    ends = {event["id"]: event for event in shown(trace, "f")}
    assert starts.keys() == ends.keys() and len(starts) == len(shown(trace, "s"))
    for event in [*starts.values(), *ends.values()]:
        spans = rows[event["pid"], event["tid"]]
        assert any(start <= event["ts"] <= end for start, end in spans)
    assert all(event["bp"] == "e" for event in ends.values())


def test_a_trace_of_two_ranks() -> None:
    trace = document([rank(0, LEAD, DEVICE), rank(1, DRAFT)], ARROWS, {"run_id": "x"})
    check_structure(trace)
    names = {e["pid"]: e["args"]["name"] for e in shown(trace, "M") if e["name"] == "process_name"}
    assert names == {
        0: "rank 0 lead · node1 · null device",
        1: "rank 1 draft · node1 · null device",
    }
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
    """A host that booted an hour earlier: its clock is ahead by 3.6e12 ns."""
    ahead = 3_600 * 10**9
    late = Track("host", DRAFT.labels, DRAFT.slices + np.array([0, 0, ahead, ahead]))
    reading = ClockReading(START + ahead, ahead, 900)
    trace = document([rank(0, LEAD), rank(1, late, clock=Clock((reading,)))], ARROWS)
    assert (
        trace["traceEvents"][2:]
        == document([rank(0, LEAD), rank(1, DRAFT)], ARROWS)["traceEvents"][2:]
    )
    notes = trace["otherData"]["clock"]["ranks"]
    assert notes[1] == {"rank": 1, "offset_ns": [ahead], "error_ns": 900}
    assert "half" in trace["otherData"]["clock"]["method"]


def test_a_clock_that_drifts_is_followed() -> None:
    """Ahead by 1 ms, then by 1.1 ms a second later: linear between, constant outside."""
    first = ClockReading(START, 1_000_000, 500)
    clock = Clock((first, ClockReading(START + 10**9, 1_100_000, 700)))
    times = START + np.array([-5, 0, 5 * 10**8, 10**9, 2 * 10**9])
    ahead = times - clock.on_lead(times)
    assert ahead.tolist() == [1_000_000, 1_000_000, 1_050_000, 1_100_000, 1_100_000]
    assert clock.error_ns == 700


def test_long_clocks_keep_their_nanoseconds() -> None:
    """Clocks of 300 days, 2.6e16 ns, are beyond a float's whole numbers."""
    at = 300 * 86_400 * 10**9 + 1
    clock = Clock((ClockReading(at, at - 7, 1), ClockReading(at + 10**9, at - 7, 1)))
    assert clock.on_lead(np.array([at, at + 1, at + 10**9])).tolist() == [7, 8, 10**9 + 7]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([[0, 0, 10, 5]], r"slice \[0, 0, 10, 5\] ends before it starts"),
        ([[0, 0, 10, 20], [1, 0, 15, 30]], r"slice \[0, 0, 10, 20\] overlaps the next one"),
    ],
)
def test_impossible_slices_are_refused(rows: list[list[int]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        document([rank(0, Track("host", ["a"], np.array(rows)))])


def test_nothing_to_show_is_a_trace_too() -> None:
    empty = Track("host", ["a"], np.zeros((0, 4), np.int64))
    trace = document([rank(0, empty)])
    check_structure(trace)
    assert shown(trace, "X") == []


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_what_is_written_is_what_was_made(name: str, tmp_path: Path) -> None:
    trace = document([rank(0, LEAD, DEVICE), rank(1, DRAFT)], ARROWS)
    path = tmp_path / name
    write(path, trace)
    data = path.read_bytes()
    text = (gzip.decompress(data) if name.endswith("gz") else data).decode()
    assert json.loads(text) == trace
    assert len(text.splitlines()) == len(trace["traceEvents"]) + 3
    assert [p.name for p in tmp_path.iterdir()] == [name]  # nothing half-written
