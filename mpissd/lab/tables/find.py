"""Finds the rows that `why` and `compare` are asked about, by run id, file or folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.lab.tables.load import load_rows
from mpissd.lab.tables.pair import siblings


def find_rows(named: str | None, out: str) -> tuple[list[Row], Path]:
    """Returns the rows that a name stands for, latest last, and the file or folder that has them.

    named: a .jsonl file, a folder with runs*.jsonl below it, or the id of a run below the folder
    `out`; None stands for all rows below `out`. Raises ConfigError if there is no such row.
    """
    is_file = (named or "").endswith(".jsonl")
    is_id = named is not None and not is_file and not Path(named).is_dir()
    path = Path(out if named is None or is_id else named)
    rows = load_rows([path]) if is_file or path.is_dir() else []
    if is_id:
        rows = [row for row in rows if row.run_id == named]
    elif not is_file:  # a folder may have one file for each shard
        rows.sort(key=_started_at)
    if not rows:
        raise ConfigError(
            f"result {named or out!r}: no such row in {str(path)!r}: allowed: a run id there, a "
            "folder, or a runs.jsonl"
        )
    return rows, path


def _started_at(row: Row) -> str:
    return str((row.provenance or {}).get("started_at") or "")


def find_pair(a: str | None, b: str | None, out: str) -> tuple[Row, Row, list[Path]]:
    """Returns the two rows to compare, and the files or folders that hold them.

    A name (see find_rows) stands for its last row and the rows of the same configuration under
    other seeds. Of these, the latest two with a common seed are returned, or else the latest of
    each name. Without b, a must be a folder or file with two configurations. Raises ConfigError.
    """
    if a is None:
        raise ConfigError(
            "compare: needs two results, each a run id, a runs.jsonl or a folder, or one folder "
            "that holds two configurations"
        )
    rows, path = find_rows(a, out)
    if b is None:
        kinds = _by_configuration(rows)
        if len(kinds) != 2:
            held = f"{len(kinds)} configuration{'s' * (len(kinds) != 1)}"
            ids = " ".join(str(kind[-1].run_id) for kind in kinds[-2:])
            folder = path if path.is_dir() else path.parent
            hint = f"; or two run ids, such as: compare {ids} --out={folder}" * (len(kinds) > 1)
            raise ConfigError(f"compare: needs two results: {a!r} holds {held}: allowed: 2{hint}")
        return (*_of_one_seed(*kinds), [path])
    others, other_path = find_rows(b, out)
    return (*_of_one_seed(_alike(rows), _alike(others)), [path, other_path])


def _alike(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that have the last row's configuration, in order."""
    alike = siblings(rows[-1], rows)
    return [row for row in rows if row in alike]


def _by_configuration(rows: Sequence[Row]) -> list[list[Row]]:
    kinds: list[list[Row]] = []
    left = list(rows)
    while left:
        alike = siblings(left[0], left)
        kinds.append([row for row in left if row in alike])
        left = [row for row in left if row not in alike]
    return kinds


def _of_one_seed(a: Sequence[Row], b: Sequence[Row]) -> tuple[Row, Row]:
    pairs = ((x, y) for x in reversed(a) for y in reversed(b) if x.seed == y.seed)
    return next(pairs, (a[-1], b[-1]))
