"""The studies of predictor and advisor: what they count, on rows that are made up."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.config import parse_flags
from mpissd.common.row import Row
from mpissd.engine.job import resolve
from mpissd.lab.predict.row import is_predictable
from mpissd.lab.tables import load_rows
from mpissd.lab.tables.load import Rounds
from tests.scripts import load

ROOT = Path(__file__).resolve().parents[2]


def path_of(name: str) -> str:
    return f"results/emulated-{name}/{name}.py"


predictions, advisor = (load(path_of(name)) for name in ("predictions", "advisor"))
study = sys.modules["study"]


def row(mode: str, rate: float, *, cell: int = 0, sd: float = 0.01, **changed: Any) -> Any:
    """A row of 100 rounds whose draws are worth `sd`; what was predicted is what was measured."""
    flat = {"mean": 1e4, "p50": 1e4, "p90": 1e4, "p99": 1e4}
    told = {"mode": mode, "tok_per_s": rate, "predicted_tok_per_s": rate, "prediction_error": 0.0}
    known = {"seed": cell, "target": "t", "tp": 1, "device_name": "d", "batch_size": 1}
    known |= {"run_id": f"{mode}-{cell}", "num_rounds": 100, "round_us": flat, "sampling_sd": sd}
    return Row.from_dict(known | told | changed)


# --- predictions


def test_cells_whose_interval_holds_0_are_not_counted() -> None:
    """±2.8%: 10% more or less is told, 2% is not, however right or wrong it was predicted."""
    rows = []
    for cell, (ssd, predicted) in enumerate(
        [(110, 105), (110, 90), (90, 80), (102, 120), (98, 90)]
    ):
        rows += [row("sd", 100.0, cell=cell)]
        rows += [row("ssd", float(ssd), cell=cell, predicted_tok_per_s=float(predicted))]
    assert predictions.signs(rows, {}) == (2, 3, 2)
    wide = [r | {"sampling_sd": 0.1} for r in rows]
    assert predictions.signs(wide, {}) == (0, 0, 5)


def test_rounds_count_where_they_were_kept() -> None:
    """Rows of much luck, rounds of none: the rounds are believed."""
    rows = [row("sd", 100.0, sd=0.2), row("ssd", 103.0, sd=0.2)]
    assert predictions.signs(rows, {}) == (0, 0, 1)
    kept = {r["run_id"]: Rounds(np.full(100, 0.01), np.ones(100)) for r in rows}
    assert predictions.signs(rows, kept) == (1, 1, 0)
    assert "by the rounds of 2 rows" in predictions.verdict(rows, kept)
    assert "by the rows' own statistics" in predictions.verdict(rows, {})


def test_a_cell_of_one_mode_is_no_cell() -> None:
    assert predictions.signs([row("sd", 100.0), row("ssd", 150.0, cell=1)], {}) == (0, 0, 0)


@pytest.mark.parametrize("study", ["emulated-predictions", "h200-predictions"])
def test_the_committed_verdict_is_what_the_rows_say(study: str) -> None:
    """And replay and sign meet their bars."""
    rows = load_rows([ROOT / "results" / study / "runs.jsonl"])
    assert predictions.verdict(rows, {}) in (ROOT / "docs" / "predictions.md").read_text()
    right, told, _ = predictions.signs(rows, {})
    assert right >= 0.98 * told > 0
    median, p95 = np.quantile([abs(row["prediction_error"]) for row in rows], [0.5, 0.95])
    assert median <= 0.03 and p95 <= 0.08


# --- advisor


@pytest.fixture(scope="module")
def cells() -> list[Any]:
    return [advisor.Cell.draw(number, 1) for number in range(6)]


def test_cells_are_the_same_each_time_and_their_lines_run(cells: list[Any]) -> None:
    assert advisor.Cell.draw(3, 1) == cells[3] != advisor.Cell.draw(3, 2)
    for cell in cells:
        lines = [cell.flags(choice) for choice in cell.rivals]
        assert len({tuple(line) for line in lines}) == len(lines) == 5
        assert {choice.mode for choice in cell.rivals} == {"ar", "sd", "ssd"}
        assert cell.rivals[0].tok_per_s == max(choice.tok_per_s for choice in cell.rivals)
        for choice, line in zip(cell.rivals, lines, strict=True):
            config = parse_flags(dict(flag[2:].split("=", 1) for flag in line))
            job = resolve(config, choice.tp, backend="emulated", memory_bytes=None)
            assert job.world_size == choice.gpus <= cell.gpus and is_predictable(job)
            assert config.rounds is not None and config.rounds >= 20


def test_what_was_advised_is_kept_with_the_rows(cells: list[Any], tmp_path: Path) -> None:
    assert advisor.cells_of(tmp_path, 2, 1) == cells[:2]
    advisor.save(cells[3:5], tmp_path / "new")
    assert advisor.cells_of(tmp_path / "new", 20, 9) == cells[3:5]


def test_the_best_two_run_twice_and_in_turn(cells: list[Any]) -> None:
    for cell in cells:
        turns = list(advisor.turns(cell))
        assert turns[:5] == [(0, choice) for choice in cell.rivals]
        (first, advice), (second, closest) = turns[5:]
        assert first == second == 1 and advice == cell.rivals[0]
        assert closest.tok_per_s == sorted(choice.tok_per_s for choice in cell.rivals)[-2]


def measured(cell: Any, rates: list[float], luck: list[float] | None = None) -> list[Any]:
    """Rows of a cell's rivals, as fast as said."""
    rows = []
    for n, (choice, rate) in enumerate(zip(cell.rivals, rates, strict=True)):
        command = ["run", "--out=somewhere", *cell.flags(choice)]
        told = {"provenance": {"command": command}, "sampling_error": luck[n] if luck else 0.0}
        rows.append(row(choice.mode, rate, run_id=f"{cell.number}-{n}", sd=0.005, **told))
    return rows


@pytest.mark.parametrize(
    ("rates", "luck", "verdict"),
    [
        ([100, 90, 80, 50, 60], None, ("the same", 1, 0, 1)),
        ([99, 100, 80, 50, 60], None, ("1.0% (no difference)", 1, 0, 1)),
        ([97.9, 100, 80, 50, 60], None, ("2.1% | 2.1% |", 0, 0, 0)),
        ([97.9, 100, 80, 50, 60], [-0.03, 0, 0, 0, 0], ("2.1% | 0.0% |", 0, 0, 1)),
        ([100, 99, 80, 50, 60], [0.05, 0, 0, 0, 0], ("| 0.0% | 3.8% |", 1, 0, 0)),
    ],
)
def test_an_advice_behind_the_best_is_seen(
    rates: list[float],
    luck: list[float] | None,
    verdict: tuple[str, int, int, int],
    cells: list[Any],
) -> None:
    """±2% for the ratio of two runs."""
    told, near, alike, fair = verdict
    text = advisor.table(cells[:1], measured(cells[0], rates, luck), {})
    assert told in text
    assert f"in {near} of 1 cells, and no different from it in {alike} more" in text
    assert f"luck of the draws in {fair}." in text


def test_an_advice_that_luck_put_behind_is_no_different(cells: list[Any]) -> None:
    rows = [r | {"sampling_sd": 0.05} for r in measured(cells[0], [95, 100, 80, 50, 60])]
    text = advisor.table(cells[:1], rows, {})
    assert "| 5.0% (no difference) | 5.0% |" in text
    assert "in 0 of 1 cells, and no different from it in 1 more" in text


def test_the_committed_advice_is_what_the_rows_say() -> None:
    """20 cells, each within 2% of the best of five or no different from it."""
    folder = ROOT / "results" / "emulated-advisor"
    text = advisor.table(advisor.cells_of(folder, 0, 0), study.rows_of(folder), {})
    assert text in (ROOT / "docs" / "predictions.md").read_text()
    near, full, alike = (
        int(n) for n in re.findall(r"in (\d+) of (\d+) cells, .* in (\d+) more", text)[0]
    )
    assert near + alike == full == 20


def attempt(folder: Path, name: str) -> None:
    (folder / "rounds").mkdir(parents=True)
    (folder / "rounds" / f"{name}.npz").write_text(name)
    row = {"run_id": name, "provenance": {"command": ["run", f"--out={folder}", "--fuse"]}}
    (folder / "runs.jsonl").write_text(json.dumps(row) + "\n")


def test_what_is_kept_is_added_to_what_was_there(tmp_path: Path) -> None:
    for name in ("one", "two"):
        attempt(tmp_path / name, name)
        study.keep(tmp_path / name, tmp_path / "out")
    rows = study.rows_of(tmp_path / "out")
    assert [r["run_id"] for r in rows] == ["one", "two"]
    assert rows[0]["provenance"]["command"] == ["run", f"--out={tmp_path / 'out'}", "--fuse"]
    assert study.flags_of(rows[0]) == ("--fuse",)
    kept = sorted(path.name for path in (tmp_path / "out" / "rounds").iterdir())
    assert kept == ["one.npz", "two.npz"] and study.rows_of(tmp_path / "none") == []


def test_a_cell_that_was_not_run_through_is_left_out(cells: list[Any]) -> None:
    rows = measured(cells[0], [100, 90, 80, 50, 60])
    assert "in 0 of 0 cells" in advisor.table(cells[:1], rows[:4], {})
