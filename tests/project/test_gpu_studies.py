"""The scripts for two and four GPUs: what they plan, what they expect, what they say of rows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import ROOT, load

RESULTS = ROOT / "results"
STUDIES = {"two-gpus": 2, "four-gpus": 4}
beside, idle = load("results/beside.py"), load("results/idle.py")


def measure(study: str, out: Path, *steps: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the script's dry form, in which nothing starts mpirun."""
    told = {"PATH": "/usr/bin:/bin", "HOME": str(out), "PYTHON": sys.executable, "DRY": "1"}
    return subprocess.run(
        [RESULTS / study / "measure.sh", str(out), *steps],
        cwd=ROOT,
        env={**told, "MPIRUN": "true", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def lines(study: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (RESULTS / study / "expected.jsonl").open()]


@pytest.mark.parametrize("study", STUDIES)
def test_every_step_can_be_measured(study: str, tmp_path: Path) -> None:
    """Each grid is a step's, and each of its cells is planned on the step's ranks."""
    done = measure(study, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    planned = dict(re.findall(r"^(\S+): planned for (\d) GPUs, exit code 0$", done.stdout, re.M))
    grids = {path.stem for path in (RESULTS / study).glob("*.grid")}
    grids -= {name for name in grids if name.startswith("text-")}  # without weights: skipped
    assert grids == set(planned) - {"probe", "probe-real"}
    assert max(planned.values()) == str(STUDIES[study])
    for name in grids:
        said = (tmp_path / f"{name}.log").read_text()
        assert re.search(rf"measurements on T={beside.ranks_of(Path(name))}, D=\d", said), said
        assert "cannot" not in said and "error" not in said


def test_a_step_that_fails_leaves_the_others(tmp_path: Path) -> None:
    done = measure("two-gpus", tmp_path, "70b", "probe", FLAGS="--nonsense=1")
    assert done.returncode == 1
    assert done.stdout.count("exit code 2") == 2 and done.stdout.count("nonsense") == 2
    late = measure("two-gpus", tmp_path, "70b", BUDGET_S="5")
    assert late.returncode == 1 and re.search(
        r"cells 70b-T2D0: SKIPPED, \d s are left", late.stdout
    )


@pytest.mark.parametrize("study", STUDIES)
def test_what_is_expected_covers_the_grids_and_stands_in_the_readme(study: str) -> None:
    """Predictions over the built-in profile are made again; replays take longer, and are not."""
    cells: dict[str, Any] = {}
    for grid in sorted((RESULTS / study).glob("*.grid")):
        for flags, job in beside.jobs(grid):
            cells[beside.key(job.tp, flags)] = job
    retired = ("pearl", "amusd")
    expected = [x for x in lines(study) if x["flags"].get("schedule") not in retired]
    known = {beside.key(line["tp"], line["flags"]): line for line in expected}
    assert set(known) == set(cells)
    for name, job in cells.items():
        line = known[name]
        assert {**beside.described(job)}.items() <= line.items()
        if job.config.workload != "replay":
            assert beside.rate_of(job) == pytest.approx(line["tok_per_s"], rel=1e-3)
    readme = (RESULTS / study / "README.md").read_text().replace(",", "")
    for line in lines(study):
        rate = line["tok_per_s"]
        near = {f"{rate:.0f}", f"{round(rate, -1):.0f}"}
        assert near & set(re.findall(r"\d+", readme)), line


def row_of(line: dict[str, Any], rate: float, seed: int = 0) -> dict[str, Any]:
    """A row of a cell, as a sweep writes it, with what its table reads."""
    known = (RESULTS / "h200-real" / "measured_t1.jsonl").read_text().splitlines()[0]
    row = json.loads(known)
    row["provenance"]["sweep"]["flags"] = {**line["flags"], "seed": str(seed)}
    row |= {"run_id": f"{seed}-{rate}", "tp": line["tp"], "tok_per_s": rate, "seed": seed}
    return {**row, "mode": line["flags"]["mode"]}


def test_the_table_stands_beside_what_was_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near, afar = lines("two-gpus")[:2]
    rates = ((near, 1.05), (afar, 0.8), (afar, 0.6))
    rows = [row_of(of, of["tok_per_s"] * by, seed) for seed, (of, by) in enumerate(rates)]
    (tmp_path / "some-T2D0").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "some-T2D0" / "runs.jsonl").write_text(text)
    assert beside.show(RESULTS / "two-gpus" / "expected.jsonl", tmp_path, []) == 0
    said = capsys.readouterr().out
    assert re.search(rf"{near['use']} \| \d+ \| \d+ \| 1.05 \| 1 \|", said)
    assert re.search(rf"{afar['use']} \| \d+ \| \d+ \| 0.70 ! \| 2 \|", said)
    assert "3 rows, 0 of them expected nowhere" in said
    (tmp_path / "some-T2D0" / "runs.jsonl").unlink()
    assert beside.show(RESULTS / "two-gpus" / "expected.jsonl", tmp_path, []) == 1


def test_the_committed_rows_are_those_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    folder = RESULTS / "two-gpus"
    assert beside.show(folder / "expected.jsonl", folder, []) == 0
    table, _, told = capsys.readouterr().out.partition("\n\n")
    assert table in (folder / "README.md").read_text() and table.count(" ! ") == 1
    assert "136 rows, 6 of them expected nowhere" in told and "equal tokens" in told


def committed(name: str) -> list[dict[str, Any]]:
    rows = [json.loads(text) for text in (RESULTS / name).open()]
    return [row for row in rows if row["mode"] == "ssd"]


def test_the_wait_behind_a_hit_is_the_drafts_chain_or_the_hosts() -> None:
    """Of 8B the 1.5 ms are growth beyond the verification; of 70B the draft is ready, and waits."""
    late = committed("h200-real/measured_t1.jsonl")[0]
    assert idle.is_draft_bound(late) and "glue and growth take 6.02 ms" in idle.why(late)
    beyond = 1e6 * (late["t_growth_s"] - late["t_target_s"])
    waited = late["round_us"]["p50"] - 1e6 * late["t_target_s"]
    assert abs(waited - beyond) < 200  # of 1,550 µs
    assert abs(late["predicted_round_us"]["p50"] / late["round_us"]["p50"] - 1) < 0.03
    for name in ("t2", "t3", "replay2"):
        for row in committed(f"h200-70b-transformer/measured_{name}.jsonl"):
            assert not idle.is_draft_bound(row) and "host and link" in idle.why(row)


def test_a_run_whose_growth_was_always_cut_short_has_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a row has no t_growth_s; the first visit's table ended there, before all other rows."""
    late = committed("h200-real/measured_t1.jsonl")[0]
    assert "cut short" in idle.why({**late, "t_growth_s": None})
    text = json.dumps({**late, "t_growth_s": None}) + "\n" + json.dumps(late) + "\n"
    (tmp_path / "runs.jsonl").write_text(text)
    monkeypatch.setattr(sys, "argv", ["idle.py", str(tmp_path)])
    assert idle.main() == 0
    cut, whole = capsys.readouterr().out.splitlines()
    assert "cut short in every round" in cut and "no raw rounds" in cut
    assert "glue and growth take 6.02 ms" in whole
