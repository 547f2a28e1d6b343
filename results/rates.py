#!/usr/bin/env python3
"""Prints some keys of all rows under folders, as a Markdown table.

results/rates.py KEY,KEY,… FOLDER…      keys of row.md; "draft" alone loses its folder
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(rows: list[dict[str, Any]], keys: list[str]) -> list[str]:
    """Returns the lines of a table: a row of results a line, in their order."""
    lines = [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
    return lines + [f"| {' | '.join(_cell(row.get(key)) for key in keys)} |" for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value < 100 else f"{value:.0f}"
    return "" if value is None else str(value).rpartition("/")[2]


def main() -> int:
    """Prints the table of all runs*.jsonl below the folders."""
    keys, *folders = sys.argv[1:]
    files = [path for folder in folders for path in sorted(Path(folder).rglob("runs*.jsonl"))]
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    rows = [{**line, **line.get("configuration", {})} for line in lines]
    print("\n".join(table(rows, keys.split(","))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
