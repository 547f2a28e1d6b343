"""`why` and `compare` take a folder: which of its rows they mean, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from tests.common import tables_model
from tests.lab.test_why import SD

SHARED = {"workload": "gemm", "seed": 0, "token_digest": "f00d", "num_rounds": 60, "world_size": 1}


def result(run_id: str, **changed: Any) -> dict[str, Any]:
    """A row that can be compared and whose gaps are known."""
    return {**SD, **tables_model.sd("8b/1b", 4, run_id=run_id), **SHARED, **changed}


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def at(second: int) -> dict[str, Any]:
    return {"provenance": {"started_at": f"2026-01-01T00:00:{second:02}+00:00"}}


def compared(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    assert main(["compare", *map(str, arguments)]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    return found["a"], found["b"]


def refused(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([*map(str, arguments)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("mpissd: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("named", ["positional", "flag", "out"])
def test_why_takes_the_row_of_a_folder_that_was_measured_last(
    named: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a" / "runs_2.jsonl", result("old", **at(1)), result("late", **at(9)))
    write(tmp_path / "a" / "below" / "runs_3.jsonl", result("between", **at(5)))
    folder = str(tmp_path / "a")
    said = {"positional": folder, "flag": f"--result={folder}", "out": f"--out={folder}"}[named]
    assert main(["why", said]) == 0
    assert capfd.readouterr().out.startswith("late: ")


def test_why_finds_a_run_id_below_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "runs_1.jsonl", result("one"), result("two"))
    assert main(["why", "one", f"--out={tmp_path}"]) == 0
    assert capfd.readouterr().out.startswith("one: ")


def test_two_folders(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a" / "runs.jsonl", result("zero"), result("one", fuse=True))
    write(tmp_path / "b" / "runs.jsonl", result("two", lookahead=5))
    assert compared(capfd, tmp_path / "a", tmp_path / "b") == ("one", "two")
    assert compared(capfd, tmp_path / "b" / "runs.jsonl", tmp_path / "a") == ("two", "one")


def test_rows_of_one_seed_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A sweep measures the seeds of both in orders of their own."""
    seeds = [(0, "a"), (1, "a"), (2, "a"), (2, "b"), (1, "b")]
    rows = [
        result(f"{name}{seed}", seed=seed, token_digest=f"{seed}", fuse=name == "b")
        for seed, name in seeds
    ]
    write(tmp_path / "both" / "runs.jsonl", *rows)
    assert compared(capfd, tmp_path / "both") == ("a2", "b2")
    write(tmp_path / "a" / "runs.jsonl", *rows[:2])
    write(tmp_path / "b" / "runs.jsonl", *rows[3:])
    assert compared(capfd, tmp_path / "a", tmp_path / "b") == ("a1", "b1")


def test_a_folder_with_two_configurations(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "runs_1.jsonl", result("one"), result("two", fuse=True), result("three"))
    assert compared(capfd, tmp_path) == ("three", "two")


def test_a_folder_that_is_none_or_holds_too_little_or_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("one/runs.jsonl"), result("a"), result("b", seed=1))
    write(Path("three/runs.jsonl"), *(result(str(k), lookahead=k) for k in (1, 2, 3)))
    Path("empty").mkdir()
    told = refused(capfd, "compare", "one")
    assert "needs two results: 'one' holds 1 configuration: allowed: 2" in told
    told = refused(capfd, "compare", "three")
    hint = "or two run ids, such as: compare 2 3 --out=three"
    assert f"'three' holds 3 configurations: allowed: 2; {hint}" in told
    for command in (("compare", "empty"), ("compare", "one", "empty"), ("why", "empty")):
        assert "result 'empty': no such row in 'empty'" in refused(capfd, *command)
    for command in (("compare", "none"), ("compare", "one", "none"), ("why", "none")):
        assert "result 'none': no such row in 'one'" in refused(capfd, *command, "--out=one")
    assert "result 'out': no such row in 'out'" in refused(capfd, "why")
