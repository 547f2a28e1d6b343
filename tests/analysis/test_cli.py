"""The command line: strict, one line for a mistake, exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import cli
from analysis.__main__ import main
from analysis.figures import FIGURES
from analysis.findings import FINDINGS
from mpissd.common.errors import ConfigError

FIXTURE = Path(__file__).parent / "fixture"


def test_a_plan_has_what_was_said() -> None:
    assert cli.parse(["fan_out"]) == cli.Plan(what="fan_out")
    said = ["all", "--results=a,b", "--out=o", "--formats=png,svg", "--workers=1"]
    plan = cli.parse(said)
    assert plan == cli.Plan("a,b", "o", None, "png,svg", 1, what="all")
    assert plan.paths == ["a", "b"] and plan.kinds == ["png", "svg"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["throughputs"], "unknown figure 'throughputs': did you mean 'throughput'?"),
        (["fan_out", "--result=x"], "unknown flag '--result': did you mean '--results'?"),
        (["fan_out", "--out"], "out: needs a value"),
        (["fan_out", "--formats=png,jpg"], "unknown format 'jpg':"),
        (["fan_out", "--workers=0"], "workers=0: allowed: a whole number in [1, 64]"),
        (["fan_out", "--workers=two"], "workers=two: allowed: a whole number in [1, 64]"),
        (["fan_out", "--workers=²"], "workers=²: allowed: a whole number in [1, 64]"),
        (["fan_out", f"--results={'a' * 400}"], "results 'aaa"),
        (["predicted", f"--results={FIXTURE}", f"--out={__file__}"], "out: cannot write "),
        (["fan_out", "pareto"], "'pareto' is not a flag: write --name=value"),
        (["fan_out", "-", "--out=x"], "'-' is not a flag: write --name=value"),
        (["fan_out", "--results=nowhere"], "results 'nowhere': no such file or folder"),
        (["fan_out", f"--results={FIXTURE}", "--device=H900"], "unknown device 'H900':"),
        (["all", f"--results={FIXTURE}", "--device=H900"], "unknown device 'H900':"),
        (["report", f"--results={FIXTURE}", "--device=H900"], "unknown device 'H900':"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"analysis: {line}") and told.err.count("\n") == 1
    assert not told.out


def test_a_page_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of few rows: the page is drawn before it is written."""
    rows = (FIXTURE / "runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_text("".join(rows[:5]))
    assert main(["report", f"--results={tmp_path}", f"--out={__file__}"]) == 2
    *progress, last = capsys.readouterr().err.splitlines()
    assert last.startswith("analysis: out: cannot write ")
    assert any(line.endswith(": drawn") for line in progress)


def test_help_is_shown_and_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["fan_out", "--help"])
    assert left.value.code == 0
    shown, stderr = capsys.readouterr()
    assert "--results" in shown and not stderr


def test_every_figure_has_a_command_and_a_finding() -> None:
    assert set(FIGURES) == set(FINDINGS) and len(FIGURES) == 21
    assert set(cli.COMMANDS) == {*FIGURES, "all", "report"}


def test_a_figure_without_rows_is_skipped_and_the_code_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["saguaro", f"--results={FIXTURE}", f"--out={tmp_path}"]) == 2
    told = capsys.readouterr()
    assert "saguaro: skipped: no rows for it: it needs markov SSD rows" in told.err
    assert not list(tmp_path.iterdir())


def test_a_plan_refuses_an_unknown_flag() -> None:
    with pytest.raises(ConfigError, match="did you mean '--formats'"):
        cli.checked("all", {"format": "png"})
