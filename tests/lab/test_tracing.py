"""Traces of ranks whose clocks differ."""

from typing import Any

import numpy as np

from mpissd.lab.measure.tracing import RankTrace, Track, document

START = 7_000_000_123_456  # a perf_counter far from 0


def trace_of(ahead: int, error_ns: int) -> dict[str, Any]:
    """Two ranks with two slices each, and an arrow; the second rank's clock is `ahead`."""
    slices = START + 1000 * np.array([[0, 10], [10, 50]])
    tracks = [
        Track("host", ["send", "wait"], np.column_stack([[0, 0], [0, 1], slices + clock]))
        for clock in (0, ahead)
    ]
    ranks = [RankTrace("0", tracks[:1]), RankTrace("1", tracks[1:], ahead, error_ns)]
    return document(ranks, [("outcome", (0, 0), (1, 1))], {"run_id": "x"})


def test_all_ranks_are_on_the_clock_of_rank_0() -> None:
    """A host that booted 300 days earlier: 2.6e16 ns are beyond a float's whole numbers."""
    ahead = 300 * 86_400 * 10**9 + 1
    trace = trace_of(ahead, 900)
    assert trace["traceEvents"] == trace_of(0, 0)["traceEvents"]
    notes = trace["otherData"]["clock"]["ranks"]
    assert notes[1] == {"rank": 1, "offset_ns": ahead, "error_ns": 900}
