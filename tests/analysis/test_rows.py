"""Reading rows: a bad line is left out with one note, the others are drawn; which probe counts. The
command line: strict, one line for a mistake, exit code 2."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import draw, main
from analysis.figures import FIGURES
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
        (LINES[3][:200], "cut off"),
        (changed(LINES[3], tok_per_s=None), "it has no tok_per_s"),
        (changed(LINES[40], fan_out=3), "fan_out=3: allowed: a list"),
    ],
)
def test_a_bad_line_costs_one_note(tmp_path: Path, bad: str, note: str) -> None:
    data = load([write(tmp_path, LINES[0], bad, "", LINES[1])])
    assert len(data.rows) == 2
    (found,) = data.notes
    assert found.startswith(f"left out 1 row of {tmp_path}/runs.jsonl: line 2: {note}"), found


def test_null_is_a_key_that_is_missing(tmp_path: Path) -> None:
    """Every figure's condition may be unknown: no row is left out for it."""
    names = ("batch_size", "context", "seed", "graph", "num_drafts", "dtype", "provenance")
    rows = [changed(line, **dict.fromkeys(names)) for line in LINES]
    data = load([write(tmp_path, *rows)])
    assert len(data.rows) == len(LINES) and not data.notes
    assert [item.why for item in draw(data, "latency")]


def test_a_broken_profile_costs_one_note(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "set")
    path = tmp_path / "set/profiles/h200-70b-1b-T2D1.json"
    path.write_text(path.read_text()[:500])
    data = load([tmp_path])
    assert data.profiles == ()
    assert data.notes == [f"{path}: left out: cut off, or no JSON object"]


def test_nothing_left(tmp_path: Path) -> None:
    with pytest.raises(NothingLeft, match=r"no row is left: .*runs\.jsonl: line 1: cut off"):
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
    assert "left out 1 row of NVIDIA H200: a figure shows one machine, here " + H100 in (here.notes)
    with pytest.raises(ConfigError, match=r"unknown device 'V100': .*allowed: NVIDIA"):
        on_machine(data, "V100")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["throughputs"], "unknown figure 'throughputs': did you mean 'throughput'?"),
        (["fan_out", "--result=x"], "unknown flag '--result': did you mean '--results'?"),
        (["fan_out", "--out"], "out: needs a value"),
        (["fan_out", "--formats=png,jpg"], "unknown format 'jpg':"),
        (["fan_out", "--workers=0"], "workers=0: allowed: a whole number in [1, 64]"),
        (["fan_out", f"--results={'a' * 400}"], "results 'aaa"),
        (["latency", f"--results={FIXTURE}", f"--out={__file__}"], "out: cannot write "),
        (["fan_out", "pareto"], "'pareto' is not a flag: write --name=value"),
        (["fan_out", "--results=nowhere"], "results 'nowhere': no such file or folder"),
        (["fan_out", f"--results={FIXTURE}", "--device=H900"], "unknown device 'H900':"),
        (["all", f"--results={FIXTURE}", "--device=H900"], "unknown device 'H900':"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    *notes, last = told.err.splitlines()
    assert last.startswith(f"analysis: {line}") and all("left out" in note for note in notes)
    assert not told.out


def test_help_names_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown, stderr = capsys.readouterr()
    assert "--results" in shown and not stderr and all(f"  {name} " in shown for name in FIGURES)


def test_figures_without_rows_end_in_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["saguaro", f"--results={FIXTURE}", f"--out={tmp_path / 'out'}"]) == 2
    assert "analysis: saguaro: no rows for it: it needs markov SSD rows" in capsys.readouterr().err
    write(tmp_path, *(changed(line, device_name="null device (emulated)") for line in LINES[:5]))
    assert main(["all", f"--results={tmp_path}", f"--out={tmp_path / 'out'}"]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and not told.out and not (tmp_path / "out").exists()
