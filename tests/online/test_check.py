"""What a run says of a learner's interpreter before anything starts; needs no PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpissd.common.errors import ConfigError
from mpissd.online.process import check_trainer
from tests.tiny_pair import tiny_pair


def interpreter(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> str:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("MPISSD_LEARNER_PYTHON", str(file))
    return str(file)


@pytest.mark.parametrize(
    ("script", "told"),
    [("echo torch safetensors", "has no torch, safetensors: pip install"), ("exit 3", "not run")],
)
def test_an_interpreter_that_cannot_train_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    python = interpreter(tmp_path, script, monkeypatch)
    with pytest.raises(ConfigError, match=f"^learners=1: {python} .*{told}"):
        check_trainer()
    monkeypatch.setenv("MPISSD_LEARNER_PYTHON", f"{tmp_path}/nowhere")
    with pytest.raises(ConfigError, match="nowhere does not run: No such file"):
        check_trainer()


def test_it_is_asked_itself_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This interpreter without its packages, and with modules of their names."""
    interpreter(tmp_path, f'exec {sys.executable} -S "$@"', monkeypatch)
    with pytest.raises(ConfigError, match="has no numpy, safetensors, torch: pip"):
        check_trainer()
    for name in ("numpy", "safetensors", "torch"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}/nowhere")
    check_trainer()


@pytest.mark.parametrize("learners", [0, 1])
def test_a_run_without_pytorch_is_refused_in_one_line_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learners: int
) -> None:
    pair = tiny_pair(tmp_path)
    interpreter(tmp_path, "echo torch", monkeypatch)
    flags = ["--mode=sd", "--workload=text", "--prompt_ids=1,2,3", f"--learners={learners}"]
    flags += [f"--target={pair.target}", f"--draft={pair.draft}", f"--out={tmp_path}/out"]
    told = [sys.executable, "-m", "mpissd", "run", "--backend=numpy", *flags]
    told.append(f"--dry_run={2 + learners}")
    done = subprocess.run(told, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 * learners, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == learners and all("has no torch" in line for line in lines)
