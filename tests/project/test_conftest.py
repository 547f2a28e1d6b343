"""Which examples of properties are tested."""

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
    path = tmp_path / "test_seen.py"
    path.write_text(SEEN)
    words = ["-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-s", "-q"]
    done = subprocess.run(
        [sys.executable, *words, f"--rootdir={tmp_path}", *flags, str(path)],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"same examples: {expected} {expected}" in done.stdout
