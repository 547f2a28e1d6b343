"""Traces of ranks whose clocks differ."""

from typing import Any

import numpy as np

from mpissd.lab.measure.tracing import Track, events

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
