"""The output folder: judged without a trace, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.output import append_row, check_output, make_output
from tests.needs import IS_ROOT, needs, needs_linux

JUDGES = [check_output, make_output]


@pytest.mark.parametrize("out", ["new", "a/b/c", ".", "../sibling"])
def test_a_folder_that_can_be_made_is_not_made_yet(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    check_output(out)
    assert list(tmp_path.rglob("*")) == [here]


@pytest.mark.parametrize("out", ["file", "file/below", "file/below/more"])
@pytest.mark.parametrize("judge", JUDGES)
def test_a_file_is_no_folder(judge: Callable[[str], None], out: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(ConfigError, match=r"out=.*file"):
        judge(str(tmp_path / out))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@needs_linux
@pytest.mark.parametrize("out", ["/proc/x", "/proc/x/y"])
def test_a_file_system_that_takes_no_files_not_even_of_root(out: str) -> None:
    with pytest.raises(ConfigError, match="'/proc' cannot be written"):
        check_output(out)


@needs("another user than root", not IS_ROOT)
@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_a_folder_of_somebody_else(mode: int, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=mode)
    for out in (locked, locked / "below", locked / "below" / "more"):
        with pytest.raises(ConfigError, match="out="):
            check_output(str(out))


def test_what_stands_in_the_way_of_the_results_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "rounds").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be written"):
        make_output(str(tmp_path))
    other = tmp_path / "other"
    (other / "runs.jsonl").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be written"):
        make_output(str(other))


def test_earlier_rows_stay(tmp_path: Path) -> None:
    rows = tmp_path / "runs.jsonl"
    rows.write_text('{"schema": 1}\n')
    make_output(str(tmp_path))
    assert rows.read_text() == '{"schema": 1}\n'


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    row = {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": -float("inf"), "e": "NaN"}}
    append_row(tmp_path / "rows.jsonl", row)
    line = (tmp_path / "rows.jsonl").read_text()
    assert line == '{"a": null, "b": [1.5, null], "c": {"d": null, "e": "NaN"}}\n'
