"""Reads result rows and device profiles; an unreadable one causes a note, not a failure.

`load(["results"])` takes folders (every runs*.jsonl, loads*.jsonl, pools*.jsonl and profiles/*.json
below) and files of runs. A line
that is cut off, of another schema or incomplete is left out and noted with its file and line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import loads as loads_of
from analysis import pools as pools_of
from analysis.loads import tidy_loads
from analysis.pools import tidy_pools
from analysis.tidy import complete, tidy
from mpissd.common.errors import ConfigError
from mpissd.common.row import READABLE, flat

Row = dict[str, Any]


class NothingLeft(ConfigError):
    """Raised if there is no row that a figure could be drawn from; the message says what is
    needed."""


class Notes:
    """A set of lines in the order in which they were added."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def add(self, line: str) -> None:
        """Adds a line, unless it is there already."""
        self._lines[line] = None

    def left_out(self, count: int, what: str, why: str) -> None:
        """Adds "left out N rows …" if N is not 0."""
        if count:
            self.add(f"left out {count} row{'s' if count > 1 else ''} {what}: {why}")

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines."""
        return tuple(self._lines)


@dataclass(frozen=True)
class Data:
    """Result rows and probed profiles, with notes on what was left out.

    rows: one measured run a row (docs/row.md and analysis/tidy.py name the columns). loads: one
    load a row (analysis/loads.py); pools: one sized use a row (analysis/pools.py).
    """

    rows: pd.DataFrame
    profiles: tuple[Row, ...] = ()
    notes: Notes = field(default_factory=Notes)
    loads: pd.DataFrame = field(default_factory=lambda: tidy_loads([]))
    pools: pd.DataFrame = field(default_factory=lambda: tidy_pools([]))

    def with_rows(self, rows: pd.DataFrame) -> Data:
        """Returns the same data with other rows."""
        return replace(self, rows=rows)


def load(paths: Iterable[str | Path]) -> Data:
    """Reads everything below `paths`.

    Raises ConfigError if a path does not exist, NothingLeft if no row can be used.
    """
    notes = Notes()
    rows: dict[str, Row] = {}
    loads: dict[str, Row] = {}
    pools: list[Row] = []
    profiles: list[Row] = []
    places = [Path(path) for path in paths]
    for path in places:
        if not _exists(path):
            raise ConfigError(f"results {str(path)!r}: no such file or folder")
        for file in _files(path, "runs*.jsonl"):
            _add(rows, _rows(file, notes), notes)
        for file in _files(path, "loads*.jsonl") if path.is_dir() else ():
            loads |= {row["load_id"]: row for _, row in _rows(file, notes, _load_of)}
        for file in _files(path, "pools*.jsonl") if path.is_dir() else ():
            pools += [row for _, row in _rows(file, notes, pools_of.complete)]
        profiles += _profiles(path, notes)
    if not rows and not loads and not pools:
        why = "; ".join(notes.lines[-3:]) or "no runs*.jsonl there"
        raise NothingLeft(f"results {', '.join(map(str, places))}: no row is left: {why}")
    frames = tidy_loads(list(loads.values())), tidy_pools(pools)
    return Data(tidy(list(rows.values())), tuple(profiles), notes, *frames)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # The name cannot be that of a file.
        return False


def _files(path: Path, pattern: str) -> list[Path]:
    return sorted(path.rglob(pattern)) if path.is_dir() else [path]


def _add(rows: dict[str, Row], located: Iterable[tuple[str, Row]], notes: Notes) -> None:
    """Adds rows by run_id; of two rows with one run_id the first is kept."""
    for where, row in located:
        kept = rows.setdefault(str(row["run_id"]), row)
        if kept is not row and not _same(kept, row):
            notes.add(f"{where}: left out: run_id {row['run_id']!r} is that of another row, too")


def _same(a: Row, b: Row) -> bool:
    """Compares two rows except for their folders; NaN equals NaN."""
    return repr({**a, "folder": ""}) == repr({**b, "folder": ""})


def _run_of(row: Row, folder: Path) -> Row:
    return complete({**flat(row), "folder": str(folder)})


def _load_of(row: Row, folder: Path) -> Row:
    return loads_of.complete(row, folder)


def _rows(
    path: Path, notes: Notes, made: Callable[[Row, Path], Row] = _run_of
) -> Iterator[tuple[str, Row]]:
    """Yields the usable rows of a file, each with its file and line number; `made` completes
    them."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        notes.add(f"{path}: left out: {error.strerror}")
        return
    if not any(line.strip() for line in lines):
        notes.add(f"{path}: empty: no row")
    schemas: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        row = _parse(line)
        if row is None:
            last = "the last line, cut off" if number == len(lines) else "no JSON object"
            notes.add(f"{where}: left out: {last}")
        elif row.get("schema") not in READABLE:
            schemas[str(row.get("schema"))] += 1
        else:
            try:
                yield where, made(row, path.parent)
            except ValueError as wrong:
                notes.add(f"{where}: left out: {wrong}")
    for schema, count in schemas.items():
        notes.left_out(count, f"of {path}", f"schema {schema}, this reads {READABLE}")


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _profiles(path: Path, notes: Notes) -> Iterator[Row]:
    """Yields the probed device profiles, which are those with tables."""
    files = sorted(path.rglob("profiles/*.json")) if path.is_dir() else []
    for file in (file for file in files if file.is_file()):
        profile = _parse(file.read_bytes())
        if profile is None:
            notes.add(f"{file}: left out: cut off, or no JSON object")
        elif profile.get("kind") == "device" and isinstance(profile.get("tables"), dict):
            yield {**profile, "file": str(file)}
