#!/usr/bin/env python3
"""Prints the index of this folder: a line a study, with its README's title and what it lacks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
AHEAD = ("expected", "predicted")  # files of rows that were not measured
WITHOUT = {"__pycache__", "gpu-limit"}  # make bench-gpu writes the latter unless OUT says otherwise


def index(results: Path = RESULTS) -> Iterator[str]:
    """Yields the lines, in the folders' order."""
    for folder in sorted(results.iterdir()):
        if folder.is_dir() and folder.name not in WITHOUT:
            title = (folder / "README.md").read_text().partition("\n")[0].removeprefix("# ")
            yield f"- [{folder.name}]({folder.name}): {title}{lack(folder)}"


def lack(folder: Path) -> str:
    """Returns "; no rows yet" for a study without a file of rows or a profile.

    Where every file has expected rows it is "; expected rows, none measured yet", else nothing.
    """
    names = [path.stem for path in folder.glob("*.jsonl")]
    if not names:
        return "" if any(folder.glob("profiles/*.json")) else "; no rows yet"
    expected = all(name.startswith(AHEAD) for name in names)
    return "; expected rows, none measured yet" if expected else ""


if __name__ == "__main__":
    print("\n".join(index()))
    sys.exit(0)
