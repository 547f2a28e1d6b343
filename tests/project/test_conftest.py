"""Which examples of properties are tested, when a test shows where it is, and what ends a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT

SEEN = """
from hypothesis import settings

def test_seen():
    print("same examples:", settings.default.derandomize, settings().derandomize)
"""


def run_of(
    tmp_path: Path, text: str, *flags: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a text under this folder's conftest.py."""
    path = tmp_path / "test_seen.py"
    path.write_text(text)
    words = ["-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q"]
    return subprocess.run(
        [sys.executable, *words, f"--rootdir={tmp_path}", *flags, str(path)],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("environment", [{}, {"CI": "true"}], ids=["here", "in CI"])
@pytest.mark.parametrize(
    "flags, expected",
    [
        ([], True),
        (["--long"], False),
        (["--long", "--hypothesis-profile=same"], True),
        (["--hypothesis-profile=explore"], False),
    ],
)
def test_new_examples_are_drawn_where_long_tests_run(
    tmp_path: Path, flags: list[str], expected: bool, environment: dict[str, str]
) -> None:
    done = run_of(tmp_path, SEEN, "-s", *flags, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"same examples: {expected} {expected}" in done.stdout


SLEEPS = """
import time, pytest

{mark}
def test_that_sleeps():
    time.sleep(1.5)
"""
LONG = "@pytest.mark.long"


@pytest.mark.parametrize(
    "mark, own_s, is_shown", [("", "9", True), (LONG, "9", False), (LONG, "0.5", True)]
)
def test_a_long_test_has_a_time_of_its_own_before_it_shows_where_it_is(
    tmp_path: Path, mark: str, own_s: str, is_shown: bool
) -> None:
    short = ["-o", "faulthandler_timeout=0.5", "-o", "markers=long"]
    done = run_of(tmp_path, SLEEPS.format(mark=mark), "--long", *short, LONG_TEST_S=own_s)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("in test_that_sleeps" in done.stderr) == is_shown


TOLD_TO_END = """
import os, signal, tempfile, time

def test_that_is_ended():
    with tempfile.TemporaryDirectory(dir=os.environ["OWN"]):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
"""


def test_a_run_that_is_told_to_end_removes_what_it_made(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    assert run_of(tmp_path, TOLD_TO_END, OWN=str(own)).returncode == 2
    assert not [*own.iterdir()]
