"""The rows of gpu_limit as lines with their bars."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def line_of(row: Row) -> str:
    """One row as one line."""
    return _LINES[row["what"]](row)


def verdict(value: float, bar: float | None, form: str, *, least: bool = False) -> str:
    """'  (bar <= 3.80: met)'; least: the value has to reach the bar, not to stay below it."""
    if bar is None:
        return ""
    met = value >= bar if least else value <= bar
    return f"  (bar {'>=' if least else '<='} {bar:{form}}: {'met' if met else 'MISSED'})"


def _read(row: Row) -> str:
    return f"{row['device']}: reads {row['rate_tb_per_s']:.3f} TB/s"


def _refused(row: Row) -> str:
    return f"refused: {row['why']}"


def _all_reduce(row: Row) -> str:
    size, taken, bar = row["bytes"] >> 10, 1e6 * row["seconds"], row["bar_s"]
    told = f"all-reduce {row['group']:8s} T={row['tp']} {size:4d} KB {taken:7.2f} us"
    told += f", error {row['error']:.1e}"
    return told + verdict(taken, bar and 1e6 * bar, ".2f")


def _forward(row: Row) -> str:
    told = f"{row['model']} T={row['tp']} M={row['rows']:<2d} {row['way']:6s} {row['group']:7s} "
    told += f"{'fused' if row['fuse'] else 'seven'} {1e3 * row['seconds']:7.3f} ms"
    told += f" = {row['floor_fraction']:.3f} of the floor"
    if "alone_s" in row:
        told += f", alone {1e3 * row['alone_s']:.3f} ms"
    if row["bar_s"] is not None:
        return told + verdict(1e3 * row["seconds"], 1e3 * row["bar_s"], ".2f")
    return told + verdict(row["floor_fraction"], row["bar_fraction"], ".2f", least=True)


def _launch(row: Row) -> str:
    taken = 1e6 * row["seconds"]
    told = f"launch of {row['model']} T={row['tp']} {row['way']} {taken:.1f} us of the host"
    return told + verdict(taken, 1e6 * row["bar_s"], ".0f")


def _agreement(row: Row) -> str:
    told = f"agreement {row['model']} T={row['tp']} M={row['rows']:<2d} {row['error']:.1e}"
    return told + verdict(row["error"], row["bar"], ".1e")


_LINES = {
    "read": _read,
    "refused": _refused,
    "all_reduce": _all_reduce,
    "forward": _forward,
    "launch": _launch,
    "agreement": _agreement,
}
