"""Rows are added as whole lines, whatever a kill left behind and whoever else adds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpissd.common.output import append_row, read_rows

WHOLE = b'{"a": 1}\n{"b": "x"}\n'


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b"", []),
        (WHOLE, [{"a": 1}, {"b": "x"}]),
        (WHOLE + b'{"c": 3', [{"a": 1}, {"b": "x"}]),
        (WHOLE + b'{"c": 3}', [{"a": 1}, {"b": "x"}, {"c": 3}]),  # all there but its end
        (b'{"c"', []),
        (WHOLE + b"x" * 200_000, [{"a": 1}, {"b": "x"}]),  # longer than what is read at once
        (WHOLE + b'{"c": "\xc3', [{"a": 1}, {"b": "x"}]),  # cut within a character
        (WHOLE + b"\0" * 512, [{"a": 1}, {"b": "x"}]),  # what a crashed file system leaves
    ],
)
def test_a_torn_last_line_is_skipped_and_repaired(
    tmp_path: Path, left: bytes, kept: list[dict[str, object]]
) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(left)
    assert read_rows(path) == kept
    append_row(path, {"new": "é"})
    append_row(path, {"more": 1})
    lines = path.read_text().split("\n")
    assert lines[-1] == "" and [json.loads(line) for line in lines[:-1]] == [
        *kept,
        {"new": "é"},
        {"more": 1},
    ]


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "runs.jsonl") == []


def test_a_row_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes half of a line: the row is not there, and the next fixes it."""
    path = tmp_path / "runs.jsonl"
    append_row(path, {"a": 1})
    full = path.read_bytes()
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({len(full) + 5},) * 2);"
    program = (
        f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); {limit}"
        "import sys, pathlib; from mpissd.common.output import append_row;"
        "append_row(pathlib.Path(sys.argv[1]), {'b': 'x' * 100})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and "written in part" in done.stderr
    assert read_rows(path) == [{"a": 1}]
    append_row(path, {"c": 2})
    assert path.read_text() == '{"a": 1}\n{"c": 2}\n'


def test_jobs_that_share_a_file_never_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    program = (
        "import sys, pathlib; from mpissd.common.output import append_row\n"
        "for n in range(50): append_row(pathlib.Path(sys.argv[1]), {'who': sys.argv[2], 'n': n, "
        "'x': 'y' * 9000})"
    )
    jobs = [
        subprocess.Popen([sys.executable, "-c", program, str(path), str(n)], env={**os.environ})
        for n in range(3)
    ]
    assert [job.wait(60) for job in jobs] == [0, 0, 0]
    found = [(row["who"], row["n"]) for row in read_rows(path)]
    assert sorted(found) == sorted((str(who), n) for who in range(3) for n in range(50))
    assert len(path.read_text().splitlines()) == 150
