"""The lines of the GPU's limits, as they are measured."""

from __future__ import annotations

from typing import Any

from mpissd.lab.limits.table import line_of


def forward(**more: Any) -> dict[str, Any]:
    row = {"what": "forward", "model": "m", "tp": 2, "rows": 16, "way": "fast", "group": "oneshot"}
    return row | {"seconds": 0.002, "p99_s": 0.0021, "floor_fraction": 0.9, "stable": True} | more


def test_a_forward_says_whether_it_was_stable() -> None:
    line = line_of(forward())
    assert line.endswith("T=2 M=16 fast   oneshot   2.000 ms, p99 2.100 = 0.900 of the floor")
    assert line_of(forward(stable=False)) == line + " (not stable)"


def test_every_kind_of_row_has_a_line() -> None:
    rows = [
        {"what": "read", "device": "GPU", "rate_tb_per_s": 4.5},
        {"what": "refused", "why": "no NCCL"},
        {"what": "all_reduce", "group": "nccl", "tp": 2, "bytes": 16384, "seconds": 3e-6,
         "error": 1e-4},
        {"what": "launch", "model": "m", "tp": 1, "way": "fast", "seconds": 11e-6,
         "forward_s": 2e-3},
        {"what": "agreement", "model": "m", "tp": 1, "rows": 1, "error": 1e-2, "bar": 5e-3},
        {"what": "agreement", "model": "m", "tp": 1, "rows": 1, "error": 1e-3, "bar": 5e-3},
    ]  # fmt: skip
    lines = [line_of(row) for row in rows]
    assert lines[2].endswith("16 KB    3.00 us, error 1.0e-04")
    assert lines[3].endswith("11.0 us of the host, the forward alone 2.000 ms")
    assert [line.count("WRONG") for line in lines] == [0, 0, 0, 0, 1, 0]
