"""Reads result rows from files runs*.jsonl. A malformed line raises an error or, if the caller
passes a list `left_out`, is added to that list and skipped."""

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
    """Raised for a line that is no valid result row. where: "FILE:LINE". key: a short name of the
    fault; lines with the same fault are reported together. reason: the fault as text."""

    def __init__(self, where: str, key: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.file, _, self.line = where.rpartition(":")
        self.key, self.reason = key, reason


class LeftOut(list[Malformed]):
    """A list of malformed lines that were skipped. Used in a `with` block, at whose end it prints
    one line to stderr for each file and kind of fault."""

    def __enter__(self) -> LeftOut:
        return self

    def __exit__(self, *failure: object) -> None:
        for line in self.lines:
            print(f"mpissd: {line}", file=sys.stderr, flush=True)

    @property
    def lines(self) -> list[str]:
        """A text for each file and kind of fault: number of lines, the first one, the reason."""
        groups: dict[tuple[str, str], list[Malformed]] = {}
        for fault in self:
            groups.setdefault((fault.file, fault.key), []).append(fault)
        return [
            f"left out {len(faults)} row{'s' * (len(faults) > 1)} of {file}: line "
            f"{faults[0].line}: {faults[0].reason}"
            for (file, _), faults in groups.items()
        ]


def load_rows(paths: Paths, left_out: LeftOut | None = None) -> list[Row]:
    """Returns the rows in files, and in runs*.jsonl below folders. left_out: gets faulty lines."""
    return [row for _, row in placed_rows(paths, left_out)]


def placed_rows(
    paths: Paths, left_out: LeftOut | None = None, needed: Iterable[str] = NEEDED
) -> list[tuple[Path, Row]]:
    """Returns (file, row) for each row in the files `paths`, and in files runs*.jsonl below
    folders, in order; a row that occurs twice is returned once. left_out: receives the lines that
    are malformed, have the run id of a different row, or lack a key in `needed`. Without left_out
    malformed lines and equal run ids raise ConfigError, as unreadable files always do."""
    rows: dict[str, tuple[Path, Row]] = {}
    for file in (file for path in map(Path, paths) for file in _run_files(path)):
        for where, text in _lines(file):
            try:
                line = _parse(where, text)
                missing = [name for name in needed if line.get(name) is None]
                if missing and left_out is not None:
                    raise Malformed(where, missing[0], f"it has no {missing[0]}")
                row = Row.from_dict(line)
                if (row.sweep or {}).get("turn") == 0:  # a warm-up of a comparison, not a result
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
    """Returns ("FILE:NUMBER", text) for each line of a file that is not empty."""
    try:
        lines = read_file(file).split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    return [(f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def of_one_group(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of jobs with one copy of the target model. Rows of jobs with several copies
    are left out, because they are never compared."""
    return [row for row in rows if (row.groups or 1) == 1]


def _run_files(path: Path) -> list[Path]:
    return sorted(path.rglob("runs*.jsonl")) if path.is_dir() else [path]


def row_files(folder: Path) -> list[Path]:
    """Returns the .jsonl files below a folder whose first line is a result row; flagged.jsonl,
    which holds rejected rows, is left out. If `folder` is a file, that file is returned."""
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
    """Returns the result rows that a user names, the latest last. named: a .jsonl file, a folder,
    or the id of a run in the folder `out` (None: all rows in `out`); rows of a folder are those in
    files runs*.jsonl below it. left_out: receives malformed lines, which otherwise raise
    ConfigError. Raises ConfigError if there are no such rows."""
    is_file = (named or "").endswith(".jsonl")
    is_id = named is not None and not is_file and not Path(named).is_dir()
    path = Path(out if named is None or is_id else named)
    rows = load_rows([path], left_out) if is_file or path.is_dir() else []
    if is_id:
        rows = [row for row in rows if row.run_id == named]
    elif not is_file:  # A folder may have several files of rows, whose times overlap.
        rows.sort(key=began)
    if not rows:
        raise ConfigError(
            f"result {named or out!r}: no such row in {str(path)!r}: allowed: a run id there, a "
            "folder, or a runs.jsonl"
        )
    return rows


def began(row: Row) -> str:
    """Returns the start time of a row's run as ISO 8601 text; "" if it is unknown."""
    return str((row.provenance or {}).get("started_at") or "")


def find_pair(
    a: str, b: str | None, out: str, left_out: LeftOut | None = None
) -> tuple[list[Row], list[Row]] | None:
    """Returns (rows of a, rows of b), the two configurations to compare, with all their seeds. a,
    b: a run id, a file or a folder, which must hold the rows of one configuration. If b is None,
    `a` must hold exactly two configurations, else None is returned. out: folder in which run ids
    are looked up. left_out: receives malformed lines, which otherwise raise ConfigError."""
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
