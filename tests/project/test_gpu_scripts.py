"""The studies that wait for a GPU: each step is tried, whatever fails, and the budget is kept."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import call, fake_tools, load

ROOT = Path(__file__).resolve().parents[2]
# What each script tries, in order, where nothing answers.
STEPS = {
    "online": "online steeper offline slower repeated rejected ar ssd-learner ssd "
    "ssd-targets sd-learner sd sd-targets",
    "heads": "distill drafts0 ar0 lookup0 drafts0.7 ar0.7 lookup0.7 figure",
    "drafts": "distill rate ar",
}
ON_CPU = {"GPU": "1", "BACKEND": "numpy", "PYTHONPATH": "/packages"}
FAKE = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
if words[0].endswith("rates.py"):
    print("a table")
if "/packages" not in os.environ["PYTHONPATH"].split(":"):  # where this machine has them
    sys.exit("lost")
sys.exit(int(os.environ.get("FAILS", "") in " ".join(words) and "FAILS" in os.environ))
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """The scripts and prompts, and a Python and an mpirun that do nothing."""
    for name in ("launch", "results", "tests/data/prompts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.npz"))
    fake_tools(tmp_path, FAKE)
    return tmp_path


def measure(box: Path, name: str, **env: str) -> subprocess.CompletedProcess[str]:
    tools = {"PYTHON": f"{box}/fakes/bin/python", "MPIRUN": f"{box}/fakes/bin/mpirun"}
    command = (f"results/{name}/measure.sh", "model.gguf", f"{box}/out")
    return call(box, *command, **tools, **ON_CPU, **env)


def tried(told: str) -> list[str]:
    return re.findall(r"^([\w.-]+): (?:0 rows, )?exit code \d+, \d+ s$", told, re.M)


@pytest.mark.parametrize("name", STEPS)
def test_all_steps_are_tried_and_a_table_comes_last(box: Path, name: str) -> None:
    done = measure(box, name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tried(done.stdout) == STEPS[name].split()
    assert "a table" in done.stdout.splitlines()[-3:]


@pytest.mark.parametrize("name", ["heads", "online"])
def test_a_step_that_fails_does_not_keep_the_others_from_theirs(box: Path, name: str) -> None:
    done = measure(box, name, FAILS=" -m mpissd ")
    assert done.returncode == 1 and tried(done.stdout) == STEPS[name].split()


@pytest.mark.parametrize("name", STEPS)
def test_nothing_begins_once_the_budget_is_over(box: Path, name: str) -> None:
    done = measure(box, name, BUDGET_S="0")
    assert done.returncode == 1 and not tried(done.stdout), done.stdout
    assert done.stdout.count("SKIPPED") == len(STEPS[name].split())


def test_a_command_ends_with_its_time(tmp_path: Path) -> None:
    script = f". {ROOT}/results/study.sh; within 1 told slow sleep 600; within 5 told next true"
    done = call(tmp_path, "bash", "-c", script, out=str(tmp_path / "out"), BUDGET_S="99")
    assert "slow: exit code 124" in done.stdout and "next: exit code 0" in done.stdout


def test_a_curve_s_share_of_its_gap_is_of_the_best_offline_draft() -> None:
    table = load("results/online/table.py").table
    about = {"learn_from": "all", "rate": 3e-5, "batch": 16, "steps_a_prompt": 0.25}
    told = {"alpha": 0.5, "prompts": 9, "tokens_per_round_4": 2.0, "tokens_per_round_7": 3.0}
    points = [
        {"stage": "code", "schedule": schedule, "agreement": value, "about": about} | told
        for schedule, value in (
            ("static", 0.5), ("online", 0.55), ("offline", 0.6), ("offline", 0.58),
        )
    ]  # fmt: skip
    points[1] |= {"trained": {"agreement": 0.52}, "published": False}
    points.insert(1, {**points[1], "prompts": 0, "published": None, "agreement": 0.51})
    rows = [line.split(" | ") for line in table(points)]
    assert [row[-1] for row in rows[3:]] == ["0.10 |", "0.50 |", " |", " |"]
    trained = rows[0].index("as trained")
    assert [row[trained] for row in rows[2:]] == [
        "",
        "0.5200, not judged",
        "0.5200, refused",
        "",
        "",
    ]
    assert [row[rows[0].index("times")] for row in rows[2:]] == ["", "4", "4", "1", "1"]


def stream() -> list[dict[str, Any]]:
    lines = (ROOT / "results/online/h200.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_stream_s_page_says_what_its_rows_say() -> None:
    page = (ROOT / "docs/online.md").read_text().partition("## A stream of two shifts")[2]
    page = re.sub(r"(?<=\d),(?=\d)", "", page.partition("![")[0].replace("*", ""))
    told = re.findall(r"^\| +\| (\d+) (.*\d) \|$", page, re.M)
    lines = load("results/online/table.py").table(stream())[2:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    rows = [(row[5], *row[6:10], row[11]) for row in cells if row[1] == "online"]
    found = {(seen, f"| {' | '.join(rest)}".replace(" 0.", " .")) for seen, *rest in rows}
    assert len(told) == 6 and set(told) <= found


def test_the_page_says_what_the_runs_beside_a_learner_gave_on_two_gpus() -> None:
    page = (ROOT / "docs/online.md").read_text().partition("## What a learner costs")[2]
    page = re.sub(r"(?<=\d),(?=\d)", "", page.partition("\n- **")[0].replace("*", ""))
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line[:1] == "|"][2:]
    lines = (ROOT / "results/online/two-h200.jsonl").read_text().splitlines()
    for row, (_, rate, gpus, each, tokens, p50, *learner) in zip(
        map(json.loads, lines), cells, strict=True
    ):
        on = 1 if row["mode"] == "ar" else 2
        assert int(gpus) == on == row["world_size"] - (row["learners"] or 0)
        assert int(rate.split()[0]) == round(row["tok_per_s"])
        assert int(each) == round(row["tok_per_s"] / on)
        assert float(tokens) == round(row["acceptance_length"], 2)
        assert float(p50.removesuffix(" ms")) == round(row["round_us"]["p50"] / 1e3, 2)
        if (told := row["learner"]) is not None:
            done = f"{told['steps']}; {told['refused']}, {told['published']}"
            assert learner == [done, "none"] and row["draft_versions"] == 0


def test_the_figure_draws_a_stage_behind_another_and_what_is_in_use() -> None:
    table = load("results/online/figure.py").figure(stream()).table()
    drawn = table[table["panel"] == table["panel"].iloc[0]]
    online = drawn[drawn["series"].str.startswith("online")]
    assert list(online["x"]) == sorted(online["x"]) and len(online) == 1 + 2 * 9
    assert online["y"].iloc[-1] == 0.86931 and online["x"].iloc[-1] > 370
    refused = drawn[drawn["series"].str.startswith("refused")]
    assert len(refused) == 9 and set(refused["y"]).isdisjoint(online["y"])


def test_the_figure_draws_each_run_as_a_line_with_its_own_crosses() -> None:
    """Two runs that differ in steps alone, one that is slower, one from rejected positions, and a
    later stage's point at 0 prompts, which is no refused version."""
    other = ({"steps_a_prompt": 1.0}, {"rate": 3e-5}, {"learn_from": "rejected"})
    points = stream()
    online = [point for point in points if point["schedule"] == "online"]
    begins = {**online[9], "prompts": 0, "tokens": 0, "published": None}
    assert begins["stage"] == "edits"
    online.insert(9, begins)
    for told in other:
        points += [{**point, "about": point["about"] | told} for point in online]
    table = load("results/online/figure.py").figure(points).table()
    drawn = table[table["panel"] == table["panel"].iloc[0]]
    for kind, most in (("online", 2 * 9 + 2), ("refused", 9)):
        series = drawn[drawn["series"].str.startswith(kind)].groupby("series", sort=False)
        assert len(series) == 4
        for _, line in series:
            assert list(line["x"]) == sorted(line["x"]) and most - 1 <= len(line) <= most
