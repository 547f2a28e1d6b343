"""A Python without the packages is told which one has them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = "import runpy, sys; sys.modules['fire'] = None; runpy.run_module('mpissd', None, '__main__')"


@pytest.mark.parametrize("is_set_up", [True, False])
def test_the_message_names_what_to_use(tmp_path: Path, is_set_up: bool) -> None:
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mpissd", tmp_path / "mpissd", ignore=skip)
    venv = tmp_path / ".venv/bin/python"
    if is_set_up:
        venv.parent.mkdir(parents=True)
        venv.touch()
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    use = f"use {venv}" if is_set_up else "pip install . there, or make venv"
    assert done.returncode == 2
    assert done.stderr == f"mpissd: {sys.executable} has no fire: {use}\n"
