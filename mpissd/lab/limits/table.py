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
    line = f"all-reduce {row['group']:8s} T={row['tp']} {size:4d} KB {taken:7.2f} us"
    return f"{line}, error {row['error']:.1e}"


def _forward(row: Row) -> str:
    line = f"{row['model']} T={row['tp']} M={row['rows']:<2d} {row['way']:6s} {row['group']:7s} "
    line += f"{1e3 * row['seconds']:7.3f} ms, p99 {1e3 * row['p99_s']:.3f}"
    line += f" = {row['floor_fraction']:.3f} of the floor"
    return line + (" (not stable)" if row["stable"] is False else "")


def _launch(row: Row) -> str:
    taken = 1e6 * row["seconds"]
    line = f"launch of {row['model']} T={row['tp']} {row['way']} {taken:.1f} us of the host"
    return f"{line}, the forward alone {1e3 * row['forward_s']:.3f} ms"


def _agreement(row: Row) -> str:
    line = f"agreement {row['model']} T={row['tp']} M={row['rows']:<2d} {row['error']:.1e}"
    return f"{line}, at most {row['bar']:.1e}{'' if row['error'] <= row['bar'] else ': WRONG'}"


_LINES = {
    "read": _read,
    "refused": _refused,
    "all_reduce": _all_reduce,
    "forward": _forward,
    "launch": _launch,
    "agreement": _agreement,
}
