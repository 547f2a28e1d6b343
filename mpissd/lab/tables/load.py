"""Reads result rows from runs*.jsonl; malformed lines are refused, or left out and counted.

find_rows and find_pair take the names that people give to results: a run id, a file or a folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.files import read_file
from mpissd.common.row import NEEDED, READABLE, Row, fault_of, flat
from mpissd.lab.tables.pair import configurations

Paths = Iterable[str | Path]


class Malformed(ConfigError):
    """A line that holds no row: where it is, the key of its fault, and the reason."""

    def __init__(self, where: str, key: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.file, _, self.line = where.rpartition(":")
        self.key, self.reason = key, reason


class LeftOut(list[Malformed]):
    """The lines that were left out, with one text for all lines of a file with one fault. A `with`
    block prints the texts to stderr at its end."""

    def __enter__(self) -> LeftOut:
        return self

    def __exit__(self, *failure: object) -> None:
        for line in self.lines:
            print(f"mpissd: {line}", file=sys.stderr, flush=True)

    @property
    def lines(self) -> list[str]:
        """Texts with the number of lines, their file, the first line, and its reason."""
        groups: dict[tuple[str, str], list[Malformed]] = {}
        for fault in self:
            groups.setdefault((fault.file, fault.key), []).append(fault)
        return [
            f"left out {len(faults)} row{'s' * (len(faults) > 1)} of {file}: line "
            f"{faults[0].line}: {faults[0].reason}"
            for (file, _), faults in groups.items()
        ]


def load_rows(paths: Paths, left_out: LeftOut | None = None) -> list[Row]:
    """Returns the rows of placed_rows without their files."""
    return [row for _, row in placed_rows(paths, left_out)]


def placed_rows(
    paths: Paths, left_out: LeftOut | None = None, needed: Iterable[str] = NEEDED
) -> list[tuple[Path, Row]]:
    """Returns the rows of files, and of the runs*.jsonl under folders, in order, without repeats,
    each with its file.

    left_out: receives the lines with an unreadable or truncated row, another schema, a value that
    no row can have, the run id of another row, or without one of the needed keys. Without left_out
    they raise ConfigError, naming file and line, except for those without a needed key. An
    unreadable file always does.
    """
    rows: dict[str, tuple[Path, Row]] = {}
    for file in (file for path in map(Path, paths) for file in _run_files(path)):
        for where, text in _lines(file):
            try:
                line = _parse(where, text)
                missing = [name for name in needed if line.get(name) is None]
                if missing and left_out is not None:
                    raise Malformed(where, missing[0], f"it has no {missing[0]}")
                row = Row.from_dict(line)
                if (row.sweep or {}).get("turn") == 0:  # warms a comparison up
                    continue
                if rows.setdefault(str(row.get("run_id", where)), (file, row))[1] != row:
                    reason = f"run_id {row.run_id!r} is that of another row, too"
                    raise Malformed(where, "run_id of another row", reason)
            except Malformed as fault:
                if left_out is None:
                    raise
                left_out.append(fault)
    return list(rows.values())


def _lines(file: Path) -> list[tuple[str, bytes]]:
    """Returns (FILE:LINE, text) of the lines that are not empty."""
    try:
        lines = read_file(file).split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    return [(f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def of_one_group(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of jobs with one target group, which are the only ones that are compared."""
    return [row for row in rows if (row.groups or 1) == 1]


def _run_files(path: Path) -> list[Path]:
    return sorted(path.rglob("runs*.jsonl")) if path.is_dir() else [path]


def row_files(folder: Path) -> list[Path]:
    """Returns the files of rows in a folder and its subfolders that have rounds, or one file."""
    if folder.is_file():
        return [folder]
    files = (p for p in folder.glob("**/*.jsonl") if p.is_file() and p.name != "flagged.jsonl")
    first_lines = {path: path.open("rb").readline() for path in sorted(files)}
    return [p for p, text in first_lines.items() if b'"num_rounds"' in text and b'"schema"' in text]


def _parse(where: str, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed(where, "JSON", f"cut off, or no JSON: {error}") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise Malformed(where, kind, f"a {kind}: allowed: a JSON object")
    if (schema := value.get("schema")) not in READABLE:
        allowed = " or ".join(map(str, READABLE))
        raise Malformed(where, f"schema {schema!r}", f"schema {schema!r}: allowed: {allowed}")
    line = flat(value)
    if (fault := fault_of(line)) is not None:
        raise Malformed(where, *fault)
    return line


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def find_rows(named: str | None, out: str, left_out: LeftOut | None = None) -> list[Row]:
    """Returns the rows of a name, latest last.

    named: a .jsonl file, a folder with runs*.jsonl below it, or the id of a run below the folder
    `out`; None means all rows below `out`. left_out: see load_rows. Raises ConfigError if there is
    no such row.
    """
    is_file = (named or "").endswith(".jsonl")
    is_id = named is not None and not is_file and not Path(named).is_dir()
    path = Path(out if named is None or is_id else named)
    rows = load_rows([path], left_out) if is_file or path.is_dir() else []
    if is_id:
        rows = [row for row in rows if row.run_id == named]
    elif not is_file:  # a folder may have one file for each shard
        rows.sort(key=began)
    if not rows:
        raise ConfigError(
            f"result {named or out!r}: no such row in {str(path)!r}: allowed: a run id there, a "
            "folder, or a runs.jsonl"
        )
    return rows


def began(row: Row) -> str:
    """Returns when a row's run began, "" if it does not say."""
    return str((row.provenance or {}).get("started_at") or "")


def find_pair(
    a: str, b: str | None, out: str, left_out: LeftOut | None = None
) -> tuple[list[Row], list[Row]] | None:
    """Returns the rows of the two configurations to compare, under all their seeds.

    Each name (see find_rows) must hold one configuration, and raises ConfigError if it holds
    several. Without b, a must hold two of them; if not, None is returned.
    """
    if b is None:
        sides = configurations(find_rows(a, out, left_out))
        return (sides[0], sides[1]) if len(sides) == 2 else None
    return _single(a, out, left_out), _single(b, out, left_out)


def _single(name: str, out: str, left_out: LeftOut | None) -> list[Row]:
    sides = configurations(find_rows(name, out, left_out))
    if len(sides) > 1:
        last = ", ".join(str(side[-1].run_id) for side in sides[-3:])
        raise ConfigError(
            f"result {name!r}: {len(sides)} configurations: allowed: one, or a run id: {last}"
        )
    return sides[0]
