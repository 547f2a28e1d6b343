"""Reads result rows from runs*.jsonl, and refuses malformed lines.

find_rows and find_pair take the names that people give to results: a run id, a file or a folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.row import READABLE, Row, flat
from mpissd.lab.tables.pair import configurations

Paths = Iterable[str | Path]


def load_rows(paths: Paths) -> list[Row]:
    """Returns the rows of files, and of the runs*.jsonl under folders, in order, without repeats.

    Raises ConfigError, naming file and line, for an unreadable or truncated row, another schema, or
    one run id on two different rows.
    """
    rows: dict[str, Row] = {}
    for path in _run_files(paths):
        for where, line in read_lines(path):
            if isinstance(line, ConfigError):
                raise line
            row = Row.from_dict(line)
            if rows.setdefault(str(row.get("run_id", where)), row) != row:
                raise ConfigError(f"{where}: run_id {row.run_id!r} is that of another row, too")
    return list(rows.values())


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | ConfigError]]:
    """Yields (FILE:LINE, object) for each line of a .jsonl file: the object that the line holds,
    flattened, or a ConfigError if it holds none."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        yield str(path), ConfigError(f"{path}: cannot be read: {error.strerror}")
        return
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if line.strip():
            try:
                yield where, flat(_parse(where, line))
            except ConfigError as error:
                yield where, error


def of_one_group(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of jobs with one target group, which are the only ones that are compared."""
    return [row for row in rows if (row.groups or 1) == 1]


def _run_files(paths: Paths) -> Iterator[Path]:
    for path in map(Path, paths):
        yield from sorted(path.rglob("runs*.jsonl")) if path.is_dir() else [path]


def row_files(folder: Path) -> list[Path]:
    """Returns the files of rows in a folder and its subfolders that have rounds, or one file."""
    if folder.is_file():
        return [folder]
    kept = (p for p in folder.glob("**/*.jsonl") if p.is_file() and p.name != "flagged.jsonl")
    return [p for p in sorted(kept) if b'"num_rounds"' in p.open("rb").readline()]


def _parse(where: str, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: cut off, or no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a {type(value).__name__}: allowed: a JSON object")
    if value.get("schema") not in READABLE:
        allowed = " or ".join(map(str, READABLE))
        raise ConfigError(f"{where}: schema {value.get('schema')!r}: allowed: {allowed}")
    return value


def find_rows(named: str | None, out: str) -> list[Row]:
    """Returns the rows of a name, latest last.

    named: a .jsonl file, a folder with runs*.jsonl below it, or the id of a run below the folder
    `out`; None means all rows below `out`. Raises ConfigError if there is no such row.
    """
    is_file = (named or "").endswith(".jsonl")
    is_id = named is not None and not is_file and not Path(named).is_dir()
    path = Path(out if named is None or is_id else named)
    rows = load_rows([path]) if is_file or path.is_dir() else []
    if is_id:
        rows = [row for row in rows if row.run_id == named]
    elif not is_file:  # a folder may have one file for each shard
        rows.sort(key=lambda row: str((row.provenance or {}).get("started_at") or ""))
    if not rows:
        raise ConfigError(
            f"result {named or out!r}: no such row in {str(path)!r}: allowed: a run id there, a "
            "folder, or a runs.jsonl"
        )
    return rows


def find_pair(a: str, b: str | None, out: str) -> tuple[list[Row], list[Row]] | None:
    """Returns the rows of the two configurations to compare, under all their seeds.

    Each name (see find_rows) must hold one configuration, and raises ConfigError if it holds
    several. Without b, a must hold two of them; if not, None is returned.
    """
    if b is None:
        sides = configurations(find_rows(a, out))
        return (sides[0], sides[1]) if len(sides) == 2 else None
    one, other = (_one_configuration(name, out) for name in (a, b))
    return one, other


def _one_configuration(name: str, out: str) -> list[Row]:
    sides = configurations(find_rows(name, out))
    if len(sides) > 1:
        last = ", ".join(str(side[-1].run_id) for side in sides[-3:])
        raise ConfigError(
            f"result {name!r}: {len(sides)} configurations: allowed: one, or a run id: {last}"
        )
    return sides[0]
