"""The lines of the GPU's limits, and whether a bar is met."""

from __future__ import annotations

from typing import Any

import pytest

from mpissd.bench.limit_table import line_of, verdict


@pytest.mark.parametrize(
    "value, bar, least, expected",
    [
        (1.0, None, False, ""),
        (3.8, 3.8, False, "  (bar <= 3.80: met)"),
        (3.81, 3.8, False, "  (bar <= 3.80: MISSED)"),
        (0.92, 0.92, True, "  (bar >= 0.92: met)"),
        (0.91, 0.92, True, "  (bar >= 0.92: MISSED)"),
    ],
)
def test_a_bar_is_met_or_missed(
    value: float, bar: float | None, least: bool, expected: str
) -> None:
    assert verdict(value, bar, ".2f", least=least) == expected


def forward(**more: Any) -> dict[str, Any]:
    row = {"what": "forward", "model": "m", "tp": 2, "rows": 16, "way": "fast", "group": "oneshot"}
    row |= {"fuse": True, "seconds": 0.002, "floor_fraction": 0.9, "bar_s": None}
    return row | {"bar_fraction": None} | more


@pytest.mark.parametrize(
    "bars, end",
    [
        ({}, "0.900 of the floor"),
        ({"bar_fraction": 0.88}, "(bar >= 0.88: met)"),
        ({"bar_s": 0.0019}, "(bar <= 1.90: MISSED)"),
        ({"alone_s": 0.00201}, "alone 2.010 ms"),
    ],
)
def test_a_forward_has_a_bar_of_its_own_kind(bars: dict[str, Any], end: str) -> None:
    line = line_of(forward(**bars))
    assert line.endswith(end) and "T=2 M=16 fast   oneshot fused   2.000 ms" in line


def test_every_kind_of_row_has_a_line() -> None:
    rows = [
        {"what": "read", "device": "GPU", "rate_tb_per_s": 4.5},
        {"what": "refused", "why": "no NCCL"},
        {"what": "all_reduce", "group": "nccl", "tp": 2, "bytes": 16384, "seconds": 3e-6,
         "error": 1e-4, "bar_s": 3.8e-6},
        {"what": "launch", "model": "m", "tp": 1, "way": "fast", "seconds": 11e-6, "bar_s": 1e-5},
        {"what": "agreement", "model": "m", "tp": 1, "rows": 1, "error": 1e-2, "bar": 5e-3},
    ]  # fmt: skip
    lines = [line_of(row) for row in rows]
    assert lines[2].endswith("16 KB    3.00 us, error 1.0e-04  (bar <= 3.80: met)")
    assert [line.count("MISSED") for line in lines] == [0, 0, 0, 1, 1]
