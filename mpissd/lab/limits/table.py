"""Formats the rows of replays.py as lines while they are measured."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def line_of(row: Row) -> str:
    """Formats one row as one line."""
    return _LINES[row["what"]](row)


def _read(row: Row) -> str:
    return f"{row['device']}: reads {row['rate_tb_per_s']:.3f} TB/s"


def _refused(row: Row) -> str:
    return f"refused: {row['why']}"


def _all_reduce(row: Row) -> str:
    size, taken = row["bytes"] >> 10, 1e6 * row["seconds"]
    told = f"all-reduce {row['group']:8s} T={row['tp']} {size:4d} KB {taken:7.2f} us"
    return f"{told}, error {row['error']:.1e}"


def _forward(row: Row) -> str:
    told = f"{row['model']} T={row['tp']} M={row['rows']:<2d} {row['way']:6s} {row['group']:7s} "
    told += f"{1e3 * row['seconds']:7.3f} ms, p99 {1e3 * row['p99_s']:.3f}"
    told += f" = {row['floor_fraction']:.3f} of the floor"
    return told + (" (not stable)" if row["stable"] is False else "")


def _launch(row: Row) -> str:
    taken = 1e6 * row["seconds"]
    told = f"launch of {row['model']} T={row['tp']} {row['way']} {taken:.1f} us of the host"
    return f"{told}, the forward alone {1e3 * row['forward_s']:.3f} ms"


def _agreement(row: Row) -> str:
    told = f"agreement {row['model']} T={row['tp']} M={row['rows']:<2d} {row['error']:.1e}"
    return f"{told}, at most {row['bar']:.1e}{'' if row['error'] <= row['bar'] else ': WRONG'}"


_LINES = {
    "read": _read,
    "refused": _refused,
    "all_reduce": _all_reduce,
    "forward": _forward,
    "launch": _launch,
    "agreement": _agreement,
}
