"""Files that can't be read as a whole: what was left out is one line, and the rest is drawn."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.load import NothingLeft, load
from analysis.select import machines, on_machine
from mpissd.common.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = Path(__file__).parent / "fixture"


def lines() -> list[str]:
    return (FIXTURE / "runs.jsonl").read_text().splitlines()


def write(folder: Path, text: str, name: str = "runs.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder


def changed(line: str, **values: Any) -> str:
    return json.dumps({**json.loads(line), **values})


def test_a_cut_off_last_line_costs_one_line(tmp_path: Path) -> None:
    good = lines()[:3]
    folder = write(tmp_path, "\n".join([*good, lines()[3][:200]]))
    data = load([folder])
    assert len(data.rows) == 3
    assert data.notes.lines == (f"{folder}/runs.jsonl:4: left out: the last line, cut off",)


def test_a_broken_line_in_the_middle_is_told_apart(tmp_path: Path) -> None:
    good = lines()[:2]
    folder = write(tmp_path, "\n".join([good[0], "[1, 2]", "", good[1], ""]))
    data = load([folder])
    assert len(data.rows) == 2
    assert data.notes.lines == (f"{folder}/runs.jsonl:2: left out: no JSON object",)


def test_another_schema_is_counted(tmp_path: Path) -> None:
    good = lines()[:4]
    other = [changed(line, schema=3) for line in good[:3]]
    folder = write(tmp_path, "\n".join([*other, good[3]]))
    data = load([folder])
    assert len(data.rows) == 1
    assert data.notes.lines == (
        f"left out 3 rows of {folder}/runs.jsonl: schema 3, this reads (1, 2)",
    )


def test_a_row_without_what_a_row_has(tmp_path: Path) -> None:
    folder = write(tmp_path, "\n".join([changed(lines()[0], tok_per_s=None), lines()[1]]))
    data = load([folder])
    assert len(data.rows) == 1
    assert data.notes.lines == (f"{folder}/runs.jsonl:1: left out: it has no tok_per_s",)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tok_per_s", "fast"),
        ("tok_per_s", 0),
        ("tok_per_s", float("nan")),
        ("world_size", 0),
        ("round_us", [1, 2]),
        ("batch_size", None),
        ("phases_us", 7),
        ("provenance", "none"),
        ("fan_out", 3),
        ("sampling_sd", "small"),
        ("sampling_sd", float("nan")),
        ("sampling_sd", 1e300),
        ("batch_size", 0),
    ],
)
def test_a_row_of_other_types(tmp_path: Path, key: str, value: Any) -> None:
    folder = write(tmp_path, "\n".join([changed(lines()[40], **{key: value}), lines()[41]]))
    data = load([folder])
    assert len(data.rows) == 1
    assert len(data.notes.lines) == 1
    assert data.notes.lines[0].startswith(f"{folder}/runs.jsonl:1: left out: ")


def test_a_row_twice_counts_once_and_two_rows_of_one_id_are_told(tmp_path: Path) -> None:
    write(tmp_path / "a", lines()[0])
    write(tmp_path / "b", lines()[0])
    assert len(load([tmp_path]).rows) == 1
    assert load([tmp_path]).notes.lines == ()
    write(tmp_path / "b", changed(lines()[0], tok_per_s=1.0))
    data = load([tmp_path])
    assert list(data.rows["tok_per_s"]) != [1.0]
    (note,) = data.notes.lines
    assert "run_id 'ar-000' is that of another row" in note


def test_a_broken_profile_costs_one_line(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "set")
    path = tmp_path / "set/profiles/h200-70b-1b-T2D1.json"
    path.write_text(path.read_text()[:500])
    data = load([tmp_path])
    assert data.profiles == ()
    assert data.notes.lines == (f"{path}: left out: cut off, or no JSON object",)


def test_nothing_left(tmp_path: Path) -> None:
    folder = write(tmp_path, "{")
    with pytest.raises(NothingLeft, match=r"no row is left: .*runs\.jsonl:1: left out"):
        load([folder])
    with pytest.raises(ConfigError, match="no such file or folder"):
        load([tmp_path / "nowhere"])
    (tmp_path / "bare").mkdir()
    with pytest.raises(NothingLeft, match=r"no runs\*\.jsonl there"):
        load([tmp_path / "bare"])


def test_another_machine_is_left_out_and_told(tmp_path: Path) -> None:
    other = "NVIDIA V100 32GB SXM2 (emulated)"
    rows = [changed(x, device_name=other, run_id=f"v{i}") for i, x in enumerate(lines()[:5])]
    data = load([write(tmp_path, "\n".join([*lines(), *rows]))])
    assert machines(data.rows) == ["NVIDIA H100 80GB SXM (emulated)", other]
    here = on_machine(data)
    assert set(here.rows["device_name"]) == {"NVIDIA H100 80GB SXM (emulated)"}
    assert here.notes.lines == (
        f"left out 5 rows of {other}: a figure shows one machine, here "
        "NVIDIA H100 80GB SXM (emulated)",
    )
    assert len(on_machine(data, other).rows) == 5
    with pytest.raises(ConfigError, match=r"unknown device 'V100': .*allowed: NVIDIA"):
        on_machine(data, "V100")


def test_measured_machines_come_first_and_the_null_device_never(tmp_path: Path) -> None:
    names = ["null device (emulated)"] * 5 + ["NVIDIA H200"]
    rows = [
        changed(x, device_name=n, run_id=f"r{i}")
        for i, (x, n) in enumerate(zip(lines(), names, strict=False))
    ]
    data = load([write(tmp_path, "\n".join([*lines(), *rows]))])
    assert machines(data.rows) == ["NVIDIA H200", "NVIDIA H100 80GB SXM (emulated)"]


@pytest.mark.parametrize("what", ["all"])
def test_rows_of_the_null_device_alone_are_nothing(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    null = [changed(line, device_name="null device (emulated)") for line in lines()[:5]]
    folder = write(tmp_path / "in", "\n".join(null))
    assert main([what, f"--results={folder}", f"--out={tmp_path / 'out'}"]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and not told.out and not (tmp_path / "out").exists()


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "analysis", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
