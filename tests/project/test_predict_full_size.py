"""results/full-size: grids predicted from smaller jobs' profiles, on the committed rows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ROOT / "results" / "h200-sweep"
POSTER, T4 = "results/h200-sweep/poster_70b", "results/full-size/t4"


def call(*said: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "results/full-size/predict_full_size.py", *said]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def predict(to: Path, grid: str, tp: int, profiles: Path) -> subprocess.CompletedProcess[str]:
    where = [f"--targets={profiles}", f"--drafts={profiles}", f"--to={to}"]
    return call("predict", f"{grid}.grid", f"--tp={tp}", *where)


def test_what_was_measured_lies_where_it_was_predicted(tmp_path: Path) -> None:
    """The T=2 sweep from its own jobs: the figures are those of the job's own predictions."""
    to = tmp_path / "deep" / "predicted.jsonl"
    done = predict(to, POSTER, 2, SWEEP / "profiles")
    assert done.returncode == 0, done.stderr
    assert "114 configurations predicted, 0 not" in done.stdout
    done = call("judge", str(to), str(SWEEP))
    found = re.findall(r"^(\w+) +D=(\d) +(\d+) rows: .* in size ([\d.]+)%", done.stdout, re.M)
    assert {(mode, drafts): int(n) for mode, drafts, n, _ in found} == {
        ("ar", "0"): 3,
        ("sd", "0"): 28,
        ("sd", "1"): 30,
        ("ssd", "1"): 55,
    }
    assert all(float(size) < 2 for *_, size in found)


def test_rows_that_no_job_measured_are_not_predicted(tmp_path: Path) -> None:
    done = predict(tmp_path / "x", T4, 4, SWEEP / "profiles")
    told = [json.loads(text) for text in (tmp_path / "x").read_text().splitlines()]
    assert "90 configurations predicted, 17 not" in done.stdout
    assert max((t["lookahead"] + 1) * t["batch_size"] for t in told) <= 11


def test_the_committed_prediction_is_what_the_command_says(tmp_path: Path) -> None:
    predict(tmp_path / "x", T4, 4, SWEEP / "profiles")
    again = [json.loads(text) for text in (tmp_path / "x").read_text().splitlines()]
    committed = (ROOT / "results" / "full-size" / "predicted.jsonl").read_text().splitlines()
    for ours, told in zip(again, map(json.loads, committed), strict=True):
        rates = ours.pop("tok_per_s"), told.pop("tok_per_s")
        assert abs(rates[0] / rates[1] - 1) < 1e-6
        assert {k: v for k, v in ours.items() if not isinstance(v, float)} == {
            k: v for k, v in told.items() if not isinstance(v, float)
        }


def test_a_slower_machine_is_told_apart(tmp_path: Path) -> None:
    rows = [json.loads(text) for text in (SWEEP / "runs_70b_t4.jsonl").read_text().splitlines()]
    (tmp_path / "runs.jsonl").write_text(
        "".join(json.dumps({**row, "tok_per_s": row["tok_per_s"] / 2}) + "\n" for row in rows)
    )
    predict(tmp_path / "x", f"{POSTER}_4", 4, SWEEP / "profiles")
    done = call("judge", str(tmp_path / "x"), str(tmp_path))
    assert re.search(r"sd +D=0 +28 rows: .* median -(49|50|51)", done.stdout)


def test_no_profile_is_one_line(tmp_path: Path) -> None:
    done = predict(tmp_path / "x", T4, 4, tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "no job's profile with T=4" in done.stderr
