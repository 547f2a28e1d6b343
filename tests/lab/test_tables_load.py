"""Rows as files: which are loaded, and the error for each bad one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.errors import ConfigError
from mpissd.lab.tables.load import load_rows
from tests.common.tables_model import ar, sd


def write(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "runs.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
    return path


def test_rows_are_found_under_a_folder_and_count_once(tmp_path: Path) -> None:
    rows = [ar("8b/1b"), *(sd("8b/1b", lookahead) for lookahead in (2, 4, 6))]
    first = write(tmp_path / "a" / "b", rows[:3])
    write(tmp_path / "c", rows[3:], "runs-more.jsonl")
    write(tmp_path, [{"no": "row"}], "other.jsonl")
    assert load_rows([tmp_path, str(first)]) == rows


GOOD = json.dumps(dict(ar("8b/1b")))


@pytest.mark.parametrize(
    ("content", "line_number", "reason"),
    [
        (f"{GOOD}\n{GOOD[:200]}", 2, "cut off"),
        (f"{GOOD}\n{json.dumps(dict(ar('8b/1b', schema=3)))}\n", 2, "schema 3: allowed: 1 or 2"),
        (f"{GOOD}\n" + '{"run_id": "x"}\n', 2, "schema None"),
        (f"{GOOD}\n[1, 2]\n", 2, "a list: allowed: a JSON object"),
        (f"{GOOD}\n{json.dumps(dict(ar('8b/1b', tok_per_s=1.0)))}\n", 2, "another row"),
        (GOOD.encode() + b"\n\n\xff\xfe{}\n", 3, "not UTF-8"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, content: str | bytes, line_number: int, reason: str
) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=re.escape(f"{path}:{line_number}: ") + f".*{reason}"):
        load_rows([path])
