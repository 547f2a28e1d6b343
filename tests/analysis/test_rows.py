"""Reading rows: a bad line is left out with one note, the others are drawn; which probe counts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from analysis.rows import NothingLeft, load
from analysis.select import machines, on_machine
from mpissd.common.errors import ConfigError

FIXTURE = Path(__file__).parent / "fixture"
LINES = (FIXTURE / "runs.jsonl").read_text().splitlines()
H100 = "NVIDIA H100 80GB SXM (emulated)"


def write(folder: Path, *lines: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.jsonl").write_text("\n".join(lines))
    return folder


def changed(line: str, **values: Any) -> str:
    return json.dumps({**json.loads(line), **values})


@pytest.mark.parametrize(
    ("bad", "note"),
    [
        (LINES[3][:200], "{folder}/runs.jsonl:2: cut off"),
        ("[1, 2]", "{folder}/runs.jsonl:2: a list: allowed: a JSON object"),
        (changed(LINES[3], schema=9), "left out 1 row of {folder}/runs.jsonl: schema 9: allowed"),
        (changed(LINES[3], tok_per_s=None), "{folder}/runs.jsonl:2: left out: it has no tok_per_s"),
        *(
            (changed(LINES[40], **{key: value}), "{folder}/runs.jsonl:2: left out: ")
            for key, value in (
                ("tok_per_s", "fast"),
                ("tok_per_s", float("nan")),
                ("world_size", 0),
                ("round_us", [1, 2]),
                ("fan_out", 3),
            )
        ),
    ],
)
def test_a_bad_line_costs_one_note(tmp_path: Path, bad: str, note: str) -> None:
    data = load([write(tmp_path, LINES[0], bad, "", LINES[1])])
    assert len(data.rows) == 2
    (found,) = data.notes.lines
    assert found.startswith(note.format(folder=tmp_path)), found


def test_a_broken_profile_costs_one_note(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "set")
    path = tmp_path / "set/profiles/h200-70b-1b-T2D1.json"
    path.write_text(path.read_text()[:500])
    data = load([tmp_path])
    assert data.profiles == ()
    assert data.notes.lines == (f"{path}: left out: cut off, or no JSON object",)


def test_nothing_left(tmp_path: Path) -> None:
    with pytest.raises(NothingLeft, match=r"no row is left: .*runs\.jsonl:1: cut off"):
        load([write(tmp_path / "cut", "{")])
    with pytest.raises(ConfigError, match="no such file or folder"):
        load([tmp_path / "nowhere"])
    (tmp_path / "bare").mkdir()
    with pytest.raises(NothingLeft, match=r"no runs\*\.jsonl there"):
        load([tmp_path / "bare"])


def test_a_figure_is_of_one_machine_and_measured_ones_come_first(tmp_path: Path) -> None:
    names = ["null device (emulated)"] * 5 + ["NVIDIA H200"]
    others = [changed(x, device_name=n, run_id=f"r{n}{i}")
              for i, (x, n) in enumerate(zip(LINES, names, strict=False))]  # fmt: skip
    data = load([write(tmp_path, *LINES, *others)])
    assert machines(data.rows) == ["NVIDIA H200", H100]
    here = on_machine(data, H100)
    assert set(here.rows["device_name"]) == {H100} and len(here.rows) == len(LINES)
    assert "left out 1 row of NVIDIA H200: a figure shows one machine, here " + H100 in (
        here.notes.lines
    )
    with pytest.raises(ConfigError, match=r"unknown device 'V100': .*allowed: NVIDIA"):
        on_machine(data, "V100")
