"""`compare` takes run ids, files and folders: the rows it selects, its output, its refusals."""

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


def faster(factor: float) -> dict[str, Any]:
    """What a row's rates and times are if it ran this much faster."""
    row = result("")
    round_us = {k: v if k == "n" else v / factor for k, v in row["round_us"].items()}
    return {"tok_per_s": row["tok_per_s"] * factor, "round_us": round_us}


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


def test_why_takes_the_row_that_was_measured_last_or_a_run_id(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a" / "runs_2.jsonl", result("old", **at(1)), result("late", **at(9)))
    write(tmp_path / "a" / "below" / "runs_3.jsonl", result("between", **at(5)))
    folder = str(tmp_path / "a")
    for words, run_id in (((folder,), "late"), ((f"--out={folder}",), "late"),
                          (("between", f"--out={folder}"), "between")):  # fmt: skip
        assert main(["compare", "--show=why", *words]) == 0
        assert capfd.readouterr().out.startswith(f"{run_id}: ")


@pytest.mark.parametrize("seeds", [1, 5])
def test_two_folders_of_one_configuration_stay_apart(
    seeds: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, scale in (("a", 1.0), ("b", 1.5)):
        rows = [
            result(f"{name}{n}", seed=n, token_digest=f"{n}", **faster(scale * (1 + n / 1000)))
            for n in range(seeds)
        ]
        write(tmp_path / name / "runs.jsonl", *rows)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["low"] <= 1.5 <= found["high"] and found["low"] > 1.2


def test_a_folder_with_two_configurations(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "runs_1.jsonl", result("one"), result("two", fuse=True), result("three"))
    assert compared(capfd, tmp_path) == ("three", "two")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("one", "--show=pair"), "a pair needs two results"),
        (("one", "one", "--show=best"), "b=one with show=best: allowed: with show=pair"),
        (("empty",), "result 'empty': no such row in 'empty'"),
        (("one", "none", "--out=one"), "result 'none': no such row in 'one'"),
        (("--show=why",), "result 'out': no such row in 'out'"),
        (("none", "--show=tables"), "results 'none': no runs*.jsonl there"),
        (("one", "--show=claims"), "claims: no SSD with another use of its GPUs"),
    ],
)
def test_what_it_refuses_is_one_line(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("one/runs.jsonl"), result("a"), result("b", seed=1))
    Path("empty").mkdir()
    assert message in refused(capfd, "compare", *arguments)
