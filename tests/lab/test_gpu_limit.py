"""results/h200-limit/measure.sh: what it launches on so many GPUs, and what it says without any."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.needs import needs
from tests.scripts import call, fake_tools

ROOT = Path(__file__).resolve().parents[2]
MEASURE = "h200-limit/measure.sh"
FAKE = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
if "mpirun" in sys.argv[0]:
    flag = {{word.split("=")[0]: word for word in words}}
    told = [words[1], flag.get("--mode", words[-1]), flag.get("--pair", "")]
    print(" ".join(told))
    sys.exit(int(os.environ.get("FAILS") == told[1]))
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """The scripts, and a Python and an mpirun that only report."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for name in ("study.sh", MEASURE, "h200-whole/measure.sh"):
        (tmp_path / "results" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "results" / name, tmp_path / "results" / name)
    shutil.copy(ROOT / "Makefile", tmp_path)
    fake_tools(tmp_path, FAKE)
    return tmp_path


def measure(box: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return call(box, *command, PYTHON="fakes/bin/python", MPIRUN="fakes/bin/mpirun", **env)


def launched(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"^\d .*$", done.stdout, re.M)


AR_8B, SSD_8B = "1 --mode=ar --pair=8b/1b", "2 --mode=ssd --pair=8b/1b"
AR_70B, SSD_70B = "2 --mode=ar --pair=70b/1b", "3 --mode=ssd --pair=70b/1b"


@pytest.mark.parametrize(
    "gpus, expected",
    [
        ("1", ["1 2000 ", *[AR_8B] * 3]),
        ("3", ["1 2000 ", *[AR_8B] * 3, *[SSD_8B] * 3, "2 2000 ", *[AR_70B] * 3, *[SSD_70B] * 3]),
    ],
)
def test_as_many_ranks_as_there_are_gpus(box: Path, gpus: str, expected: list[str]) -> None:
    done = measure(box, f"results/{MEASURE}", "out", gpus)
    assert done.returncode == 0, done.stderr
    assert launched(done) == expected


def test_a_part_can_be_chosen_and_begins_its_rows_anew(box: Path) -> None:
    (box / "out").mkdir()
    for name in ("T1.jsonl", "T4.jsonl"):
        (box / "out" / name).write_text(json.dumps({"what": "read", "tp": 1}))
    done = measure(box, f"results/{MEASURE}", "out", "4", TP="4", RUNS="1", REPLAYS="9")
    assert launched(done) == ["4 9 ", "4 --mode=ar --pair=70b/1b"]
    assert not (box / "out/T4.jsonl").read_text() and (box / "out/T1.jsonl").read_text()


def test_what_fails_is_said_and_the_others_go_on(box: Path) -> None:
    done = measure(box, f"results/{MEASURE}", "out", "1", FAILS="--mode=ar", RUNS="2")
    assert done.returncode == 1 and done.stdout.count("FAILED: np=1 --mode=ar") == 2


@needs("an environment without CuPy", find_spec("cupy") is None)
def test_without_a_gpu_it_says_so_and_ends_2(box: Path) -> None:
    done = measure(box, "make", "bench-gpu", f"PYTHON={sys.executable}", "OUT=out")
    assert done.returncode == 2 and done.stdout == "" and not (box / "out").exists()
    assert re.search(r"^bench-gpu: nothing to measure: .*cupy", done.stderr, re.M)


def test_make_knows_its_variables(box: Path) -> None:
    words = "PYTHON=fakes/bin/python MPIRUN=fakes/bin/mpirun TP=1 OUT=out"
    done = measure(box, "make", "bench-gpu", *words.split(), "REPLAYS=9", GPUS="1")
    assert launched(done)[:1] == ["1 9 "], done.stderr
    done = measure(box, "make", "bench-gpu", "REPLASY=9")
    assert done.returncode == 2 and "REPLASY is no variable of bench-gpu" in done.stderr
