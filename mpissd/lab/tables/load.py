"""Reads result rows, their jobs' profiles and their raw rounds; refuses malformed files.

The files are runs*.jsonl, profiles/RUN_ID.json and rounds/RUN_ID.npz.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.rates import Rounds
from mpissd.common.row import SCHEMA, Row

Paths = Iterable[str | Path]


def load_rows(paths: Paths) -> list[Row]:
    """Returns the rows of files, and of the runs*.jsonl under folders, in order, without repeats.

    Raises ConfigError, naming file and line, for an unreadable or truncated row, another schema, or
    one run id on two different rows.
    """
    rows: dict[str, Row] = {}
    for path in _run_files(paths):
        for number, line in enumerate(_read(path).split("\n"), 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            row = Row.from_dict(_parse(where, line))
            if rows.setdefault(str(row.get("run_id", line)), row) != row:
                raise ConfigError(f"{where}: run_id {row.run_id!r} is that of another row, too")
    return list(rows.values())


def of_one_group(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of jobs with one target group: tables compare these alone."""
    return [row for row in rows if (row.groups or 1) == 1]


def load_profiles(paths: Paths, rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Returns {run_id: profile} from profiles/RUN_ID.json beside each runs*.jsonl, where it exists.

    Raises ConfigError, naming the file, if it is unreadable, truncated, of another schema, or not
    the profile of a job.
    """
    ids = [str(row.run_id) for row in rows]
    profiles: dict[str, dict[str, Any]] = {}
    for folder in dict.fromkeys(path.parent / "profiles" for path in _run_files(paths)):
        for run_id in ids:
            path = folder / f"{run_id}.json"
            if run_id not in profiles and path.is_file():
                profile = _parse(str(path), _read(path))
                forward_times(str(path), profile)
                profiles[run_id] = profile
    return profiles


def load_rounds(paths: Paths, rows: Iterable[Row]) -> dict[str, Rounds]:
    """Returns {run_id: rounds} from rounds/RUN_ID.npz beside each runs*.jsonl, where it exists.

    Raises ConfigError, naming the file, if arrays are missing or do not match the row's rounds.
    """
    known = list(rows)
    rounds: dict[str, Rounds] = {}
    for folder in dict.fromkeys(path.parent / "rounds" for path in _run_files(paths)):
        for row in known:
            run_id = str(row.run_id)
            path = folder / f"{run_id}.npz"
            if run_id not in rounds and path.is_file():
                rounds[run_id] = Rounds.read(path, row)
    return rounds


def forward_times(where: str, profile: Mapping[str, Any]) -> dict[int, float]:
    """Returns {rows: seconds} of the target's forwards in a job's profile.

    where: names the profile in errors.
    """
    try:
        points = {int(rows): float(s) for rows, s in profile["device"]["verify"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: device.verify: allowed: {{rows: seconds}}") from error
    if bad := [s for s in points.values() if not 0 <= s < math.inf]:
        raise ConfigError(f"{where}: device.verify: {bad[0]}: allowed: seconds, at least 0")
    return points


def _run_files(paths: Paths) -> Iterator[Path]:
    for path in map(Path, paths):
        yield from sorted(path.rglob("runs*.jsonl")) if path.is_dir() else [path]


def _read(path: Path) -> str:
    data = b""
    try:
        data = path.read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text") from error


def _parse(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: cut off, or no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a {type(value).__name__}: allowed: a JSON object")
    if value.get("schema") != SCHEMA:
        raise ConfigError(f"{where}: schema {value.get('schema')!r}: allowed: {SCHEMA}")
    return value
