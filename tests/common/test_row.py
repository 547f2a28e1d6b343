"""A row is read and written without loss, whichever schema its line has. The output folder is
judged before the run; rows are added to its files as whole lines."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.output import append_row, check_output, make_output, read_rows
from mpissd.common.records import token_digest
from mpissd.common.row import Row, fault_of, flat
from tests.scripts import python

LINES = [
    line
    for path in sorted((Path(__file__).parents[2] / "results").rglob("*.jsonl"))
    for line in path.read_text().splitlines()
]
NEWEST = max((line for line in LINES if "round_us" in line), key=lambda line: len(json.loads(line)))
RANKS = [{"device": "A"}, {"device": "A"}, {"device": "B"}]
OWN = {"device_name": "A", "num_drafts": 1, "tp": 2}


def test_every_committed_line_is_read_without_loss() -> None:
    for line in LINES:
        said = json.loads(line, parse_constant=pytest.fail)  # no NaN, no infinity
        row = Row.from_dict(said)
        assert dict(row) == flat(said) and row == flat(said) and len(row) == len(flat(said))
        assert "round_us" not in said or "schema" not in said or fault_of(flat(said)) is None


def test_a_line_is_a_configuration_and_measurements() -> None:
    row = Row.from_dict(json.loads(NEWEST))
    line = row.to_dict()
    assert line["configuration"]["context"] == row.context and "context" not in line
    assert line["tok_per_s"] == row.tok_per_s and len(Row().to_dict()) <= 70
    assert Row.from_dict(line) == row and flat(line) == row


@pytest.mark.parametrize(
    ("line", "device", "other"),
    [
        ({**OWN, "draft_device_name": "A"}, "A", None),
        ({**OWN, "draft_device_name": "B"}, "B", "B"),
        ({**OWN, "provenance": {"ranks": RANKS}}, "B", "B"),
        ({**OWN, "provenance": {"ranks": RANKS[:2]}}, None, None),
        ({**OWN, "tp": "2", "provenance": {"ranks": RANKS}}, None, None),
        ({}, None, None),
    ],
)
def test_the_draft_s_device(line: dict[str, Any], device: str | None, other: str | None) -> None:
    row = Row.from_dict(line)
    assert (row.draft_device, row.other_draft_device) == (device, other)


def test_a_token_digest_covers_the_first_tokens_of_every_sequence() -> None:
    digest = token_digest({0: [1, 2, 3], 1: [4, 5]}, 2)
    assert digest == token_digest({1: [4, 5, 6, 7], 0: [1, 2]}, 2)
    for other in ({0: [1, 2], 1: [4, 6]}, {0: [1, 2], 2: [4, 5]}, {0: [4, 5], 1: [1, 2]}):
        assert digest != token_digest(other, 2)


@pytest.mark.parametrize("judge", [check_output, make_output])
def test_a_file_is_no_folder(judge: Callable[[str], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    for out in ("file", "file/below"):
        with pytest.raises(ConfigError, match=r"out=.*file"):
            judge(str(tmp_path / out))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    row = {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": -float("inf"), "e": "NaN"}}
    append_row(tmp_path / "rows.jsonl", row)
    line = (tmp_path / "rows.jsonl").read_text()
    assert line == '{"a": null, "b": [1.5, null], "c": {"d": null, "e": "NaN"}}\n'


WHOLE = b'{"a": 1}\n{"b": "x"}\n'


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b"", []),
        (WHOLE + b'{"c": 3', [{"a": 1}, {"b": "x"}]),
        (WHOLE + b'{"c": 3}', [{"a": 1}, {"b": "x"}, {"c": 3}]),  # all there but its end
        (WHOLE + b"x" * 200_000, [{"a": 1}, {"b": "x"}]),  # longer than one read
        (WHOLE + b'{"c": "\xc3', [{"a": 1}, {"b": "x"}]),  # cut within a character
        (WHOLE + b"\0" * 512, [{"a": 1}, {"b": "x"}]),  # after a crash of the file system
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


def test_a_row_is_one_write(tmp_path: Path) -> None:
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
    done = python("-c", program, path)
    assert done.returncode != 0 and "written in part" in done.stderr
    assert path.read_bytes() == full
    append_row(path, {"c": 2})
    assert path.read_text() == '{"a": 1}\n{"c": 2}\n'


def test_jobs_that_share_a_file_never_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    program = (
        "import sys, pathlib; from mpissd.common.output import append_row\n"
        "for n in range(20): append_row(pathlib.Path(sys.argv[1]), {'who': sys.argv[2], 'n': n, "
        "'x': 'y' * 9000})"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", program, str(path), str(n)]) for n in range(3)]
    assert [job.wait(60) for job in jobs] == [0, 0, 0]
    found = [(row["who"], row["n"]) for row in read_rows(path)]
    assert sorted(found) == sorted((str(who), n) for who in range(3) for n in range(20))
    assert len(path.read_text().splitlines()) == 60
