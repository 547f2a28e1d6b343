#!/usr/bin/env python3
"""Prints the index of the folder results/: a line for each study, with the title of its README and
what it lacks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
AHEAD = ("expected", "predicted")  # names of files with rows that were not measured
WITHOUT = {"__pycache__", "gpu-limit"}  # left-out folders; `make bench-gpu` writes gpu-limit


def index(results: Path = RESULTS) -> Iterator[str]:
    """Yields the index's lines, one for each study's folder, in alphabetical order."""
    for folder in sorted(results.iterdir()):
        if folder.is_dir() and folder.name not in WITHOUT:
            title = (folder / "README.md").read_text().partition("\n")[0].removeprefix("# ")
            yield f"- [{folder.name}]({folder.name}): {title}{lack(folder)}"


def lack(folder: Path) -> str:
    """Returns the text on what a study's folder lacks: "; no rows yet" if it has no file of rows
    and no profile, "; expected rows, none measured yet" if all rows are expected ones, else ""."""
    names = [path.stem for path in folder.glob("*.jsonl")]
    if not names:
        return "" if any(folder.glob("profiles/*.json")) else "; no rows yet"
    expected = all(name.startswith(AHEAD) for name in names)
    return "; expected rows, none measured yet" if expected else ""


if __name__ == "__main__":
    print("\n".join(index()))
    sys.exit(0)
