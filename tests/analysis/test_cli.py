"""The command line: strict, one line for a mistake, exit code 2."""

import json
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.figures import FIGURES

FIXTURE = Path(__file__).parent / "fixture"


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
    assert "saguaro: skipped: no rows for it: it needs markov SSD rows" in capsys.readouterr().err
    null = [
        json.dumps({**json.loads(line), "device_name": "null device (emulated)"})
        for line in (FIXTURE / "runs.jsonl").read_text().splitlines()[:5]
    ]
    (tmp_path / "runs.jsonl").write_text("\n".join(null))
    assert main(["all", f"--results={tmp_path}", f"--out={tmp_path / 'out'}"]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and not told.out and not (tmp_path / "out").exists()
