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


def _whole(row: Row) -> str:
    rows = f"{row['lanes']} lanes" if row["lanes"] else f"M={row['rows']}"
    line = f"{row['model']} {rows} of {row['sequences']}, context {row['context']}, {row['way']}"
    line += f" {1e3 * row['seconds']:.3f} ms, p99 {1e3 * row['p99_s']:.3f}"
    line += f" = {row['floor_fraction']:.3f} of the floor"
    return line + (" (not stable)" if row["stable"] is False else "")


def _parity(row: Row) -> str:
    line = f"parity {row['model']}: {row['equal']} of {row['tokens']} tokens are Hugging Face's, "
    return f"{line}margins up to {row['margin']:.1e}{'' if row['parity'] else ': WRONG'}"


def _whole_launch(row: Row) -> str:
    parts = (f"{name} {1e6 * row[f'{name}_s']:.1f}" for name in ("warm", "polled", "slept"))
    return f"launch of {row['model']}: {', '.join(parts)} us of the host"


def _prompt(row: Row) -> str:
    line = f"{row['model']}, prompt of {row['tokens']} tokens in chunks of {row['chunk']}: "
    line += f"{1e3 * row['seconds']:.1f} ms = {row['peak_fraction']:.3f} of "
    return f"{line}{row['peak_tflops']:.0f} Tflop/s; the next logit differs by {row['error']:.1e}"


def _bits(row: Row) -> str:
    line = f"{row['model']}, up to {row['rows']} rows behind {row['context']} tokens: "
    return f"{line}{row['different']} with other bits than alone"


def _inline(row: Row) -> str:
    how = "chained" if row["chained"] else "by the host"
    line = f"{row['model']} inline K={row['lookahead']} {how}: round {1e3 * row['round_p50_s']:.3f}"
    line += f" ms, {row['tok_per_s']:.1f} tok/s, idle {1e6 * row['idle_p50_s']:.1f} us (p99 "
    return f"{line}{1e6 * row['idle_p99_s']:.1f}), {row['of_floors']:.3f} of the floors"


_LINES = {
    "whole": _whole,
    "parity": _parity,
    "whole_launch": _whole_launch,
    "prompt": _prompt,
    "bits": _bits,
    "inline": _inline,
    "read": _read,
    "refused": _refused,
    "all_reduce": _all_reduce,
    "forward": _forward,
    "launch": _launch,
    "agreement": _agreement,
}
